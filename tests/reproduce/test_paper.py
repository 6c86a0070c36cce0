"""The rows in paper.toml against the tables in the paper's TeX."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from sparsam.reproduce.experiments import PAPER, Row, read_experiments

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("SPARSAM_PAPER", ROOT.parent / "shared" / "paper"))
FILES = sorted(FOLDER.glob("*.tex"))
with_tex = pytest.mark.skipif(not FILES, reason="needs the paper's TeX: SPARSAM_PAPER names no folder that holds it")

EXPERIMENTS = read_experiments(PAPER)
NETWORKS = {"resnet18": "resnet18", "wideresnet28-10": "wrn-28-10", "resnet50": "resnet50", "vgg11-bn": "vgg11-bn"}
DATA = {"cifar10": "cifar10", "cifar100": "cifar100", "imagenet": "imagefolder"}
PERCENT = re.compile(r"(\d\d\.\d\d)\\%")
CAPTIONS = {
    "table1": "CIFAR using ResNet-18",
    "table2": "CIFAR using WideResNet-28-10",
    "table3": "ImageNet-1K using ResNet50",
    "table4": "VGG11-BN on CIFAR10",
    "table5": "on CIFAR10 and CIFAR100 with different perturbation",
    "table6": "on ImageNet with different perturbation",
    "table7": "different masking strategy",
    "table8": "different number of samples",
    "table9": "intervals of update mask",
}


def tabular(name: str) -> list[list[str]]:
    """Return the cells of the table whose caption holds some words."""
    text = FILES[0].read_text()
    start = text.index(r"\begin{tabular}", text.index(CAPTIONS[name]))
    body = text[start : text.index(r"\end{tabular}", start)]
    body = re.sub(r"\\textcolor\{blue\}\{[^}]*\}|\\tablefootnote\{.*?\}\s", "", body)
    return [[cell.strip() for cell in line.split("&")] for line in body.split(r"\\") if "&" in line]


def accuracies(cell: str) -> list[float]:
    return [float(number) for number in PERCENT.findall(cell)]


def carried(rows: list[list[str]], column: int) -> list[str]:
    """Return the cells of a column; an empty cell has the one above it."""
    cells: list[str] = []
    for row in rows:
        cells.append(re.sub(r"\\[a-z]+(\[.*?\])?|\{[-\d*]*\}|[{}]|\*", "", row[column]).strip() or cells[-1])
    return cells


def rows_of(name: str) -> list[tuple[Row, object]]:
    return [(row, row.recipe()) for row in EXPERIMENTS[name].rows if row.paper is not None]


def by_method(name: str) -> dict:
    """Return (data, method, sparsity): (accuracy, FLOPs)."""
    return {(r.data.name, r.method, r.mask.sparsity): (row.paper, row.flops) for row, r in rows_of(name)}


def method(text: str) -> str:
    return re.search(r"SSAM-[FD]|SAM|SGD", text).group()


def sparsity(text: str) -> float | None:
    found = re.match(r"(\d+)\\%", text)
    return int(found.group(1)) / 100 if found and found.group(1) != "0" else None


@with_tex
@pytest.mark.parametrize(("name", "data"), [("table1", 2), ("table2", 2), ("table3", 1)])
def test_the_main_tables(name, data):
    rows = [row for row in tabular(name) if any(map(accuracies, row))]
    sets = ("cifar10", "cifar100") if data == 2 else ("imagefolder",)
    expected = {}
    for row, text in zip(rows, carried(rows, 1), strict=True):
        flops = float(re.match(r"([\d.]+)\$", row[-1]).group(1))
        for i, images in enumerate(sets):
            expected[images, method(text), sparsity(row[2])] = (accuracies(row[3 + i])[0], flops)
    assert len(expected) == (28 if data == 2 else 8)
    assert by_method(name) == expected
    assert {r.model.name for _, r in rows_of(name)} == {
        {"table1": "resnet18", "table2": "wrn-28-10"}.get(name, "resnet50")
    }


@with_tex
def test_vgg():
    expected = {}
    for row in tabular("table4"):
        found = accuracies(row[-1])
        if len(found) == 2:
            expected |= {
                ("cifar10", m, sparsity(row[-2])): (a, None) for m, a in zip(("SSAM-F", "SSAM-D"), found, strict=True)
            }
        elif found:
            expected["cifar10", method(row[2]), None] = (found[0], None)
    assert len(expected) == 14
    assert by_method("table4") == expected
    assert {r.sam.rho for _, r in rows_of("table4") if r.sam.enabled} == {0.05}


@with_tex
@pytest.mark.parametrize(("name", "count"), [("table5", 24), ("table6", 6)])
def test_rho(name, count):
    head, *rows = tabular(name)
    radii = [float(re.search(r"[\d.]+", cell).group()) for cell in head[2:]]
    names = [re.search(r"CIFAR100|CIFAR10|ImageNet", row[0]) for row in rows]
    sets = [found.group().lower() if found else None for found in names]
    sets = [found or after for found, after in zip(sets, [*sets[1:], None], strict=True)]  # stands in the second row
    expected = {
        (DATA[images], NETWORKS[row[1].lower()], rho): accuracies(cell)[0]
        for images, row in zip(sets, rows, strict=True)
        for rho, cell in zip(radii, row[2:], strict=True)
    }
    assert len(expected) == count
    assert {(r.data.name, r.model.name, r.sam.rho): row.paper for row, r in rows_of(name)} == expected
    assert {r.method for _, r in rows_of(name)} == {"SAM"}


STRATEGIES = {
    "Random Mask": ("SSAM, random", None),
    "Topk Fisher Information": ("SSAM-F", None),
    "Random Drop": ("SSAM-D", "random"),
    "Drop Sharpnest weights": ("SSAM-D", "sharpest"),
    "Drop Flattest weights": ("SSAM-D", "flattest"),
}


@with_tex
def test_strategies():
    rows = [row for row in tabular("table7") if accuracies(row[-1])]
    expected = {STRATEGIES.get(row[3], (row[2], None)): accuracies(row[4])[0] for row in rows}
    assert len(expected) == 7
    assert {(r.method, r.mask.criterion): row.paper for row, r in rows_of("table7")} == expected
    assert {r.data.name for _, r in rows_of("table7")} == {"imagefolder"}
    ours = [row.recipe() for row in EXPERIMENTS["table7"].rows if row.paper is None]
    assert {(r.method, r.mask.criterion) for r in ours if r.data.name == "cifar10"} == expected.keys()


@with_tex
def test_samples():
    rows = [row for row in tabular("table8") if accuracies(row[2])]
    shares = [float(re.search(r"0\.\d", text).group()) for text in carried(rows, 0)]
    expected = {
        (share, int(row[1])): (accuracies(row[2])[0], float(re.match(r"[\d.]+", row[3]).group()))
        for share, row in zip(shares, rows, strict=True)
    }
    assert len(expected) == 12
    found = {(r.mask.sparsity, r.mask.samples): (row.paper, row.seconds) for row, r in rows_of("table8")}
    assert found == expected


@with_tex
def test_intervals():
    rows = [row for row in tabular("table9") if accuracies(row[2])]
    shares = [float(re.search(r"0\.\d", text).group()) for text in carried(rows, 0)]
    expected = {
        (share, None if row[1] == "Fixed" else int(row[1]), name): accuracy
        for share, row in zip(shares, rows, strict=True)
        for name, accuracy in zip(("SSAM-F", "SSAM-D"), accuracies(row[2]), strict=True)
    }
    assert len(expected) == 24
    found = {(r.mask.sparsity, r.mask.interval_epochs, r.method): row.paper for row, r in rows_of("table9")}
    assert found == expected


@with_tex
def test_every_table_and_figure_of_the_paper_is_listed():
    text = FILES[0].read_text()
    figures = text.count(r"\begin{figure}")
    tables = re.findall(r"\\begin\{tabular\}.*?\\end\{tabular\}", text, re.DOTALL)
    assert len([table for table in tables if PERCENT.search(table)]) == len(CAPTIONS)
    assert [name for name in EXPERIMENTS if name.startswith("figure")] == [f"figure{i + 1}" for i in range(figures)]
    assert [name for name in EXPERIMENTS if name.startswith("table")] == list(CAPTIONS)


def test_figures_repeat_the_tables():
    tables = {row.name: row.paper for name in ("table2", "table3") for row in EXPERIMENTS[name].rows}
    assert {row.name: row.paper for row in EXPERIMENTS["figure3"].rows} == {
        name: paper for name, paper in tables.items() if paper is not None
    }


def test_rows_have_one_name_each():
    for experiment in EXPERIMENTS.values():
        names = [row.name for row in experiment.rows]
        assert len(set(names)) == len(names)
