"""The table of a reproduction: what a row is, the paper's number, ours, the difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sparsam.report.table import NONE, Cell, Table
from sparsam.reproduce.comparison import Result
from sparsam.runs.recipe import Recipe

FISHER_SECONDS = "Fisher information, s"  # the label of a run's further number

NETWORKS = {"resnet18": "ResNet-18", "resnet50": "ResNet-50", "wrn-28-10": "WRN-28-10", "vgg11": "VGG11-BN"}
DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "imagefolder": "ImageNet-1K", "digits": "digits"}

# What tells rows apart. A column is shown if rows differ in it.
COLUMNS: dict[str, Callable[[Recipe], Any]] = {
    "Data": lambda recipe: DATA.get(recipe.data.name, recipe.data.name),
    "Network": lambda recipe: NETWORKS.get(recipe.model.name, recipe.model.name),
    "Method": lambda recipe: recipe.method,
    "Sparsity": lambda recipe: recipe.mask.sparsity,
    "ρ": lambda recipe: recipe.sam.rho if recipe.sam.enabled else None,
    "N_F": lambda recipe: recipe.mask.samples,
    "T_m": lambda recipe: _interval(recipe),
    "Dropped": lambda recipe: recipe.mask.criterion,
}
ALWAYS = ("Method",)


def paper_table(results: Sequence[Result]) -> Table:
    """Return one row for each result."""
    columns = [
        name
        for name, value in COLUMNS.items()
        if name in ALWAYS or len({value(result.recipe) for result in results} - {None}) > 1
    ]
    timed = any(result.row.seconds for result in results)
    headings = (
        *columns,
        "Paper, %",
        "Ours, %",
        "n",
        "Difference",
        "FLOPs (theory)",
        "Time × SGD",
        *(("Fisher, paper", "Fisher, ours") if timed else ()),
    )
    settings = [tuple(_shown(COLUMNS[name](result.recipe)) for name in columns) for result in results]
    method = columns.index("Method")
    alike = [settings.count(row) > 1 for row in settings]
    for i, result in enumerate(results):
        if alike[i]:
            decay = f"{settings[i][method]}, wd {result.recipe.optimizer.weight_decay:g}"
            settings[i] = (*settings[i][:method], decay, *settings[i][method + 1 :])
    return Table(headings, tuple(_row(*row, timed=timed) for row in zip(results, settings, strict=True)))


def _row(result: Result, settings: Sequence[str], *, timed: bool) -> tuple[Cell, ...]:
    row, method = result.row, result.method
    accuracy = method.accuracy if method else None
    flops = method.theoretical_flops.mean if method and method.theoretical_flops else row.flops
    seconds = method.extra.get(FISHER_SECONDS) if method else None
    spread = f" ± {100 * accuracy.deviation:.2f}" if accuracy and accuracy.deviation is not None else ""
    return (
        *map(Cell, settings),
        Cell("ours" if row.paper is None else f"{row.paper:.2f}"),
        Cell(f"{100 * accuracy.mean:.2f}{spread}" if accuracy else NONE, "; ".join(method.notes) if method else ""),
        Cell(str(accuracy.n) if accuracy else NONE),
        Cell(NONE if result.difference is None else f"{result.difference:+.2f}"),
        Cell(NONE if flops is None else f"{flops:.2f}×"),
        Cell(NONE if method is None or method.relative_step is None else f"{method.relative_step:.2f}×"),
        *((Cell(_seconds(row.seconds)), Cell(_seconds(seconds.mean if seconds else None))) if timed else ()),
    )


def _interval(recipe: Recipe) -> int | str | None:
    if recipe.mask.sparsity is None:
        return None
    return "fixed" if recipe.mask.interval_epochs is None else recipe.mask.interval_epochs


def _seconds(value: float | None) -> str:
    return NONE if value is None else f"{value:.3g} s"


def _shown(value: Any) -> str:
    if value is None:
        return NONE
    return value if isinstance(value, str) else f"{value:g}"
