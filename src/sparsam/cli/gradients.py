"""`sparsam gradients`: how different SAM's and SGD's gradients are, weight by weight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sparsam.analysis import gradient_difference
from sparsam.analysis.run_objective import load_objective
from sparsam.cli.console import plain_console
from sparsam.cli.names import names_of
from sparsam.report.gradient_figure import draw_layers, draw_runs
from sparsam.runs.directory import RunDirectory
from sparsam.runs.results import write_result
from sparsam.runs.run import read_method

SHARED = ("rho", "samples", "batches", "weights")  # settings that compared results must share


def measure(
    run: Path,
    *,
    rho: float,
    batch_size: int,
    batches: int,
    best: bool,
    device: torch.device,
    data_root: Path | None = None,
) -> dict[str, Any]:
    """Measure one run; write RUN/analysis/gradients.json."""
    samples = batches * batch_size
    objective = load_objective(
        run, samples=samples, batch_size=batch_size, best=best, data_root=data_root, device=device
    )
    result = {
        "method": RunDirectory(run).recipe().method,
        **gradient_difference(objective, rho).to_dict(),
        "samples_asked": samples,
        "weights": "best" if best else "last",
    }
    write_result(run, "gradients", result)
    return result


def show(runs: Sequence[Path], results: Sequence[dict[str, Any]], output: Path) -> None:
    """Print the shares below 0 and draw the figures."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("Run", no_wrap=True)
    table.add_column("r < 0, %", justify="right")
    table.add_column("lowest layer", justify="right")
    table.add_column("highest layer", justify="right")
    labelled = list(zip(names_of(runs), results, strict=True))
    for label, result in labelled:
        layers = {name: share for name, share in result["below_zero"].items() if name}
        ends = (min(layers, key=lambda n: layers[n]), max(layers, key=lambda n: layers[n]))
        table.add_row(label, f"{100 * result['below_zero']['']:.1f}", *(f"{n} {100 * layers[n]:.1f}" for n in ends))
    console = plain_console()
    console.print(table)
    shown = [(label, read_method(run), result) for run, (label, result) in zip(runs, labelled, strict=True)]
    files = draw_runs(shown, output / "gradients")
    for label, result in labelled:
        files += draw_layers(label, result, output / f"gradients-{label.replace('/', '-')}")
    console.print(
        "r = log|(g_SAM − g_SGD)/g_SGD|: below 0, the perturbation changes a weight's gradient by less than the "
        "gradient itself, or both gradients are zero, as those of dead filters are. "
        f"Figures: {', '.join(str(f) for f in files if f.suffix == '.png')}",
        style="dim",
    )
