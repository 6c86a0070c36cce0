"""`sparsam sharpness`: the rise of the loss near the weights of runs, in one table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sparsam.cli.console import plain_console
from sparsam.cli.names import names_of

SHARED = ("rho", "adaptive_rho", "ascent", "noise", "samples", "seed", "weights")  # of results side by side
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
    masked = any(r["worst_case_masked"] is not None for r in results)
    shown = {heading: key for heading, key in COLUMNS.items() if masked or key != "worst_case_masked"}
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, result in zip(names_of(runs), results, strict=True):
        table.add_row(name, *(_cell(result, key) for key in shown.values()))
    console = plain_console()
    wide = plain_console(width=max(console.width, 40 + 24 * len(shown)))  # numbers are not cut off
    wide.print(table)
    first, samples = results[0], " or ".join(map(str, sorted({result["samples"] for result in results})))
    console.print(
        f"Rise of the training loss over {samples} images around the {first['weights']} weights, BatchNorm in "
        f"eval mode. Worst: "
        f"{first['ascent']} step(s) of ascent to ‖ε‖ = ρ = {first['rho']:g}; masked: only what the run perturbs. "
        f"Mean: Gaussian noise of mean length ρ, {first['noise']} draws, ± its standard error. Adaptive: relative to "
        f"the weights, ρ = {first['adaptive_rho']:g}. λ1: largest eigenvalue of the Hessian.",
        style="dim",
    )


def _cell(result: dict[str, Any], key: str) -> str:
    value, error = result[key], result.get(f"{key}_error")
    if value is None or not math.isfinite(value):
        return "–" if key == "worst_case_masked" else "not finite"
    return f"{value:.3g}" + ("" if error is None else f" ± {error:.2g}")
