"""`sparsam sharpness`: how much the loss rises near the weights of runs, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

COLUMNS = {  # headings and the values below them
    "Loss": "loss",
    "Worst": "worst_case",
    "Worst, masked": "worst_case_masked",
    "Mean": "average_case",
    "Worst, adaptive": "worst_case_adaptive",
    "Mean, adaptive": "average_case_adaptive",
    "λ1": "lambda1",
}


def show(runs: Sequence[Path], results: Sequence[dict[str, Any]]) -> None:
    """Print one row for each run."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("Run", no_wrap=True)
    shown = {heading: key for heading, key in COLUMNS.items() if any(r[key] is not None for r in results)}
    for heading in shown:
        table.add_column(heading, justify="right", width=max(8, *map(len, heading.split())))
    for run, result in zip(runs, results, strict=True):
        table.add_row(run.name, *("–" if result[key] is None else f"{result[key]:.3g}" for key in shown.values()))
    console = Console(highlight=False)
    wide = Console(highlight=False, width=max(console.width, 40 + 12 * len(shown)))  # numbers are not cut off
    wide.print(table)
    first = results[0]
    console.print(
        f"Rise of the training loss over {first['samples']} images, BatchNorm in eval mode. Worst: "
        f"{first['ascent']} step(s) of ascent to ‖ε‖ = ρ = {first['rho']:g}; masked: only what the run perturbs. "
        f"Mean: Gaussian noise of mean length ρ, {first['noise']} draws. Adaptive: relative to the weights, "
        f"ρ = {first['adaptive_rho']:g}. λ1: largest eigenvalue of the Hessian.",
        style="dim",
    )
