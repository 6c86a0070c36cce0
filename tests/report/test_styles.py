"""How methods look: one style a method, in every figure and on every page, SGD first."""

from __future__ import annotations

import json
import re
from itertools import combinations

import numpy as np
import pytest
from commands import invoke
from html_elements import Elements
from report_runs import make_run
from small_landscapes import landscapes

from sparsam.analysis.hessian import Density
from sparsam.cli.names import ordered
from sparsam.report import collect, write_report
from sparsam.report.convergence_figure import METHODS as CONVERGENCE_METHODS
from sparsam.report.landscape_page import write_landscapes
from sparsam.report.method import Statistic
from sparsam.report.sparsity_figure import Point, draw_sparsity
from sparsam.report.styles import COLOURS, DASHES, METHODS, place, style, style_sheet, styles
from sparsam.runs.results import write_result
from sparsam.runs.run import read_method

GRADIENTS = {
    "edges": [-1.0, 0.0, 1.0],
    "counts": {"": [1, 3], "stem": [1, 3]},
    "below_zero": {"": 0.25, "stem": 0.25},
    "rho": 0.1,
    "samples": 8,
    "batches": 1,
    "weights": "last",
}
HESSIAN = {
    "eigenvalues": [3.0],
    "residuals": [0.0],
    "converged": True,
    "ratio": None,
    "trace": 5.0,
    "trace_error": None,
    "density": Density(np.array([[0.0, 3.0]]), np.array([[0.9, 0.1]]), size=10).to_dict(),
    "probes": 1,
    "steps": 2,
    "samples": 8,
    "weights": "last",
}

# What people with each kind of colour blindness see of linear RGB (Machado et al. 2009, severity 1).
SIGHT = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
XYZ = [[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0178, 0.1095, 0.8727]]  # of linear RGB, white is 1, 1, 1


def lab(colour, sight):
    """Return a colour in CIELAB, where distances are those that people see."""
    channels = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(np.array(XYZ) @ np.clip(np.array(SIGHT[sight]) @ linear, 0, 1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_methods_of_the_table_differ():
    assert len(set(METHODS.values())) == len(METHODS)
    assert next(iter(METHODS)) == "SGD"
    assert set(CONVERGENCE_METHODS.values()) < METHODS.keys()
    for last in ("SSAM-C", "Thrifty SAM"):
        usual = [METHODS[name] for name in ("SGD", "SAM", "SSAM-F", "SSAM-D", last)]
        assert len({look.colour for look in usual}) == len({look.dash for look in usual}) == 5


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("page", ["light", "dark"])
def test_colours_differ_for_all_eyes(sight, page):
    seen = [lab(pair[page == "dark"], sight) for pair in COLOURS.values()]
    assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) > 15


@pytest.mark.parametrize("name", ["SGD", "SAM", "ASSAM-D", "mine", "<b>"])
def test_a_style_depends_on_the_method_alone(name):
    for others in ([], ["SGD", "SAM"], ["SSAM-F"] * 3):
        mixed = [m for m in others if m != name]
        assert styles([name, *mixed])[0] == styles([*mixed, name])[-1] == style(name)


def test_lines_of_one_chart_differ():
    assert len(set(styles(["SAM"] * 5))) == 5
    assert len({look.colour for look in styles(["SAM"] * 5)}) == 1
    many = [f"method {i % 12}" for i in range(35)]
    assert len(set(styles(many))) == len(COLOURS) * len(DASHES) == 35
    assert len(styles(many * 2)) == 70
    assert styles(["SAM", "SAM", "ASAM"])[2] == style("ASAM")  # which the second SAM leaves alone


def test_the_style_sheet_has_every_class():
    sheet = style_sheet()
    for look in METHODS.values():
        colour, dash = look.classes.split()
        light, dark = COLOURS[look.colour]
        assert f".{colour} {{ --line: light-dark({light}, {dark}); }}" in sheet
        assert (f".{dash} {{" in sheet) == (look.dash != "solid")
        assert look.line["color"] == light


def test_the_order_is_not_that_of_the_arguments(tmp_path):
    runs = [make_run(tmp_path, name, seed) for seed in (1, 0) for name in ("ssam-f", "sgd", "sam")]
    mine = make_run(tmp_path, "sam", summary={"method": "mine"}, recipe={"name": "mine"})
    assert [m.label for m in collect([mine, *runs])] == ["SGD", "SAM", "SSAM-F", "mine"]
    found = [json.loads((run / "recipe.json").read_text()) for run in ordered(runs)]
    assert [(r["name"], r["train"]["seed"]) for r in found] == [
        (name, seed) for name in ("sgd", "sam", "ssam-f") for seed in (0, 1)
    ]
    assert sorted(["SSAM-F", "other", "ASAM", "SGD"], key=place) == ["SGD", "ASAM", "SSAM-F", "other"]


def test_both_pages_show_a_method_alike(tmp_path):
    report = write_report([make_run(tmp_path, "sam"), make_run(tmp_path, "sgd")], tmp_path / "report.html")
    drawn = write_landscapes(landscapes(1, points=3), tmp_path / "landscape.html")
    shown = {}
    for page, key in ((report, "methods"), (drawn, "runs")):
        text = page.read_text(encoding="utf-8")
        data = json.loads(next(inside for a, inside in Elements(text).of("script") if "type" in a))
        shown[key] = {line["label"]: line["style"] for line in data[key]}
        assert style_sheet() in text
    assert shown["methods"] == {name: style(name).classes for name in ("SGD", "SAM")}
    assert shown["runs"].items() > shown["methods"].items()
    swatches = re.findall(r'<svg class="swatch ([^"]*)"', report.read_text(encoding="utf-8"))
    assert swatches == [style(name).classes for name in ("SGD", "SAM")] * 2  # the table, and the runs


def lines(picture):
    """Return the colours and dashes, in halves of a line's width as in the table, of the lines of a picture."""
    found = set()
    for text in re.findall(r'style="(fill: none;[^"]*)"', picture.read_text()):
        look = dict(part.split(": ") for part in text.split("; "))
        lengths = [
            2 * float(length) / float(look.get("stroke-width", 1))
            for length in look.get("stroke-dasharray", "").split(",")
            if length
        ]
        found.add((look.get("stroke"), tuple(round(length, 2) for length in lengths)))
    return found


@pytest.mark.parametrize("others", [[], ["sgd", "sam"]])
def test_a_method_looks_alike_in_every_figure(others, tmp_path):
    """Also where the result of an older version does not name its method."""
    (tmp_path / "runs").mkdir()
    runs = [make_run(tmp_path / "runs", name) for name in ("ssam-f", *others)]
    for run in runs:
        write_result(run, "gradients", GRADIENTS)
        write_result(run, "hessian", HESSIAN)
        metrics = [json.loads(line) | {"mask_kept": 0.5} for line in (run / "metrics.jsonl").read_text().splitlines()]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    for command in (["gradients", "--redraw"], ["hessian", "--redraw"], ["masks"]):
        invoke(*command, *runs, "-o", tmp_path)
    methods = [read_method(run) for run in runs]
    points = [Point(method, 0.5, 90.0, Statistic(0.9, None, 1)) for method in methods]
    draw_sparsity({"all": points}, tmp_path / "sparsity")
    for figure in ("gradients", "hessian", "masks", "sparsity"):
        drawn = lines(tmp_path / f"{figure}.svg")
        for method in ["SSAM-F"] if figure == "masks" else methods:
            look = style(method)
            assert (COLOURS[look.colour][0], DASHES[look.dash]) in drawn, (figure, method)
    page = write_report(runs, tmp_path / "report.html").read_text(encoding="utf-8")
    swatches = re.findall(r'<svg class="swatch ([^"]*)"', page)
    assert set(swatches) == {style(method).classes for method in methods}
