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
    "Worst case": "worst_case",
    "Worst case, masked": "worst_case_masked",
    "Average case": "average_case",
    "Worst case, adaptive": "worst_case_adaptive",
    "Average case, adaptive": "average_case_adaptive",
    "λ1": "lambda1",
}


def show(runs: Sequence[Path], results: Sequence[dict[str, Any]]) -> None:
    """Print one row for each run."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("Run", no_wrap=True)
    shown = {heading: key for heading, key in COLUMNS.items() if any(r[key] is not None for r in results)}
    for heading in shown:
        table.add_column(heading, justify="right")
    for run, result in zip(runs, results, strict=True):
        table.add_row(run.name, *("–" if result[key] is None else f"{result[key]:.4g}" for key in shown.values()))
    console = Console(highlight=False)
    console.print(table)
    first = results[0]
    console.print(
        f"Rise of the training loss over {first['samples']} images, BatchNorm in eval mode. Worst case: "
        f"{first['ascent']} step(s) of ascent to ‖ε‖ = ρ = {first['rho']:g}; masked: only what the run perturbs. "
        f"Average case: Gaussian noise of mean length ρ, {first['noise']} draws. Adaptive: relative to the weights, "
        f"ρ = {first['adaptive_rho']:g}. λ1: largest eigenvalue of the Hessian.",
        style="dim",
    )
