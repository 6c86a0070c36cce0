"""Numbers from the committed files in results/, for claims.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import front_page
from front_page import AT_1_15, AT_1_35, METHODS, SAM, SGD, SSAM_F  # noqa: F401

from sparsam.report.method import Statistic
from sparsam.reproduce.comparison import Difference, Result, compare, find_runs
from sparsam.reproduce.experiments import Experiment, find_experiments
from sparsam.runs.run import Run, read_run

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


# The table of the README and a row that it leaves out, by name
PLAIN = "plain gradient"
ROWS = {**METHODS, PLAIN: "cifar100-resnet18-thrifty-gradient-sigma-none-decay-none-fraction0.366"}


@cache
def front() -> dict[str, front_page.Measured]:
    """Return the rows that have runs."""
    return {method.name: method for method in front_page.measure(ROWS)}


def cost(name: str) -> float:
    """Return the counted cost of a training, relative to SGD."""
    return front()[name].cost


def seeds(name: str) -> int:
    """Return the number of seeds."""
    return len(front()[name].accuracies)


def accuracy(name: str) -> list[float]:
    """Return the mean accuracy in percent and its standard deviation."""
    return _percent(Statistic.of(front()[name].accuracies))


def difference(name: str, other: str) -> list[float]:
    """Return the difference of two mean accuracies and the ends of its 95 % interval."""
    found = Difference.of(front()[name].accuracies, front()[other].accuracies)
    return [found.value, *(found.interval or ())]


def difference_or_none(name: str, other: str) -> list[float]:
    """Return the difference of two rows; nothing for a row and itself."""
    return [] if name == other else difference(name, other)


@cache
def losses(pattern: str) -> list[float]:
    """Return the test loss after the last epoch of some runs of 200 epochs on CIFAR-100."""
    files = sorted((RESULTS / "cifar100-resnet18-200").glob(f"{pattern}/metrics.jsonl"))
    return [json.loads(file.read_text().splitlines()[-1])["test_loss"] for file in files]


def loss_difference(pattern: str, other: str) -> list[float]:
    """Return the difference of two mean test losses and the ends of its 95 % interval."""
    found = Difference.of(*([loss / 100 for loss in losses(name)] for name in (pattern, other)))  # it is in percent
    return [found.value, *(found.interval or ())]


def last_steps(name: str) -> float:
    """Return the percentage of the steps that are sharpness-aware."""
    return 100 * front()[name].fraction


# Table 1: rows by name


@cache
def table_1() -> dict[str, Result]:
    """Return all rows, with the runs of 200 epochs."""
    runs = [run for folder in sorted(RESULTS.glob("*-resnet18-200")) for run in find_runs(folder)]
    return {result.row.name: result for result in compare(paper_table("table1"), runs)}


@cache
def paper_table(name: str) -> Experiment:
    """Return a table of the paper."""
    [table] = find_experiments([name])
    return table


def paper(name: str, table: str = "table1") -> float | None:
    """Return the paper's accuracy of a row; None if the row is ours."""
    return next((row.paper for row in paper_table(table).rows if row.name == name), None)


def ours(name: str) -> float:
    """Return our accuracy in percent."""
    return _percent(table_1()[name].accuracy)[0]


def train_loss(name: str) -> float:
    """Return our training loss of the last epoch."""
    return table_1()[name].train_loss.mean


def best(name: str) -> float:
    """Return our highest accuracy of any epoch in percent."""
    return _percent(table_1()[name].method.best_accuracy)[0]


def trained(data: str = "") -> list[str]:
    """Return the rows that have runs, on CIFAR-10, CIFAR-100 or both."""
    return [name for name, result in table_1().items() if result.method and name.startswith(data)]


def gain_of_best_epoch() -> list[float]:
    """Return by how much the best epoch is above the last one: the least and the most."""
    return _ends(best(name) - ours(name) for name in trained())


def below_the_paper(data: str) -> list[float]:
    """Return by how much our accuracy is below the paper's: the least and the most."""
    return _ends(paper(name) - ours(name) for name in trained(data) if paper(name))


def gap(data: str) -> list[float]:
    """Return what SAM's weight decay brings for SGD, and the difference of SAM and SGD."""
    sgd, decay, sam = (ours(f"{data}-resnet18-{method}") for method in ("sgd", "sgd-decay", "sam"))
    return [decay - sgd, sam - sgd]


def lost_at_90(data: str, number: Callable[[str], float]) -> list[float]:
    """Return what SSAM-F and SSAM-D lose from sparsity 0.5 to 0.9."""
    names = [f"{data}-resnet18-{method}" for method in ("ssam-f", "ssam-d")]
    return [number(name) - number(f"{name}-sparsity0.9") for name in names]


# Little data: rows by name


@cache
def little_data() -> dict[tuple[str, str], Result]:
    """Return the rows of the tables in results/small-data by table and name."""
    tables = find_experiments(
        [str(RESULTS / "small-data" / f"{name}.toml") for name in ("final", "vit-final", "plain")]
    )
    runs = [run for folder in ("final", "plain") for run in find_runs(RESULTS / "small-data" / folder)]
    return {(table.name, result.row.name): result for table in tables for result in compare(table, runs)}


def gain(table: str, name: str) -> float:
    """Return the gain of a row over the base optimizer in points."""
    plain = "vit-adamw" if table.startswith("vit") else "sgd"
    return 100 * (little_data()[table, name].accuracy.mean - little_data()[table, plain].accuracy.mean)


def little_accuracy(row: tuple[str, str]) -> list[float]:
    """Return the mean accuracy of a row in percent and its standard deviation."""
    return _percent(little_data()[row].accuracy)


def little_difference(row: tuple[str, str], other: tuple[str, str] | None = None) -> list[float]:
    """Return the difference to another row, by default the base optimizer, and the ends of its 95 % interval."""
    table, name = row
    base = ("vit", "vit-adamw") if table.startswith("vit") else ("resnet", "sgd")
    if name == base[1]:
        return []
    accuracies = [[run.accuracy for run in little_data()[key].method.counted] for key in (row, other or base)]
    found = Difference.of(*accuracies)
    return [found.value, *found.interval]


def above_sam() -> list[float]:
    """Return the difference of AdamW for 20 epochs to SAM, with the small ViT."""
    return little_difference(("vit", "vit-adamw-epochs20"), ("vit-small-data", "vit-sam-rho0.4"))


def best_epoch(name: str) -> float:
    """Return the highest of the mean accuracies over seeds of each epoch in percent."""
    runs = little_data()["vit", name].method.counted
    by_epoch = zip(*([epoch.test_accuracy for epoch in run.metrics] for run in runs), strict=True)
    return 100 * max(map(fmean, by_epoch))


# Single files


@cache
def run(path: str) -> Run:
    """Return a run in results/."""
    return read_run(RESULTS / path)


@cache
def benchmark(path: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a benchmark's file in results/ by method, of ResNet-18 if the file has several networks."""
    rows = json.loads((RESULTS / path).read_text(encoding="utf-8"))["rows"]
    return {row["method"]: row for row in rows if row.get("network", "resnet18") == "resnet18"}


def ratio(path: str, method: str) -> list[float]:
    """Return the ratio of a step to SGD's, and its quartiles."""
    row = benchmark(path)[method]
    return [row["ratio"], row["low"], row["high"]]


def share_cost(case: str, method: str) -> list[float]:
    """Return what a step of a method costs by benchmarks/shares.py; `counted` is a case too."""
    path = "cpu" if case.startswith("vit-small") else "h200"
    cases = json.loads((RESULTS / "shares" / f"{path}.json").read_text())["cases"]
    [found] = [
        row for each in cases if case in (each["case"], "counted") for row in each["rows"] if row["method"] == method
    ][:1]
    return [found["counted" if case == "counted" else "ratio"]]


def cost_in_time(workload: str, method: str) -> list[float]:
    """Return what a method costs on a core, in steps of the base optimizer, by benchmarks/cost_to_sam."""
    found = json.loads((RESULTS / "cost-to-sam" / "times" / "cpu.json").read_text())
    return [found["costs"][workload][method]["cost"]]


def share_run(rho: float, share: float) -> str:
    """Return the name of a run of a share in thrifty SAM's search; 0.2 is the recipe's rho."""
    named = "" if rho == 0.2 else f"-rho{rho}"
    return f"cifar100-resnet18-sam-validation5000{named}-share{share}-epochs60"


def searched(name: str) -> list[float]:
    """Return validation accuracy in percent, with fresh statistics too, and the loss of a run of thrifty SAM's search."""
    found = run(f"thrifty/search/{name}-seed0")
    [fresh] = [value for key, value in found.extra.items() if "fresh" in key]
    lines = (RESULTS / "thrifty" / "search" / f"{name}-seed0" / "metrics.jsonl").read_text().splitlines()
    return [100 * found.accuracy, fresh, json.loads(lines[-1])["test_loss"]]


def _percent(found: Statistic) -> list[float]:
    """Return a mean in percent, and its standard deviation if there are several seeds."""
    return [100 * found.mean, *([] if found.deviation is None else [100 * found.deviation])]


def _ends(values: Any) -> list[float]:
    values = list(values)
    return [min(values), max(values)]
