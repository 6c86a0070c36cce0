"""`sparsam hessian`: the spectra of runs, as numbers in a table and as one figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from sparsam.analysis import hessian
from sparsam.analysis.run_objective import load_objective
from sparsam.cli.console import plain_console
from sparsam.cli.names import names_of
from sparsam.errors import UserValueError
from sparsam.report.spectrum_figure import draw_spectra
from sparsam.runs.directory import RunDirectory
from sparsam.runs.results import write_result
from sparsam.runs.run import read_method

NONE = "–"
SHARED = ("samples", "weights")  # settings that compared results must share


def measure(
    run: Path,
    *,
    top: int,
    products: int,
    probes: int,
    steps: int,
    precision: str,
    memory: float,
    samples: int,
    seed: int,
    best: bool,
    device: torch.device,
    data_root: Path | None = None,
) -> dict[str, Any]:
    """Measure one run; write RUN/analysis/hessian.json."""
    objective = load_objective(run, samples=samples, best=best, data_root=data_root, device=device)
    common: dict[str, Any] = {"precision": precision, "memory_limit": memory, "seed": seed}
    try:
        used = hessian.memory_needed(objective, k=top, products=products, steps=steps, memory_limit=memory)
    except UserValueError as error:
        raise UserValueError(f"{error} (k is --top, memory_limit is --memory)") from error
    plain_console(stderr=True).print(
        f"{run.name}: {hessian.weights_of(objective):,} weights, {objective.count:,} images; at most {products} "
        f"products for eigenvalues and {probes} × {steps} for the density; {used / hessian.GIB:.2g} GiB for vectors",
        style="dim",
    )
    with _bar(f"{run.name}: eigenvalues") as progress:
        found = hessian.top_eigenvalues(objective, top, products=products, progress=progress, **common)
    with _bar(f"{run.name}: density") as progress:
        density = hessian.spectral_density(
            objective, probes=probes, steps=steps, known=found, progress=progress, **common
        )
    result = {
        "method": RunDirectory(run).recipe().method,
        "eigenvalues": list(found.values),
        "residuals": list(found.residuals),
        "converged": found.converged,
        "products": found.products,
        "ratio": found.ratio,
        "trace": density.trace,
        "trace_error": density.trace_error,
        "density": density.to_dict(),
        "probes": probes,
        "steps": steps,
        "precision": precision,
        "loss": objective.loss().item(),
        "samples": objective.count,
        "samples_asked": samples,
        "seed": seed,
        "weights": "best" if best else "last",
    }
    write_result(run, "hessian", result)
    return result


def show(runs: Sequence[Path], results: Sequence[dict[str, Any]], output: Path) -> None:
    """Print one row for each run and draw the figure."""
    console = plain_console()
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("Run", no_wrap=True)
    for heading in ("λ1", "λ5", "λ1/λ5", "Trace", "Residuals of λ1, λ5"):
        table.add_column(heading, justify="right")
    names = names_of(runs)
    for name, result in zip(names, results, strict=True):
        table.add_row(name, *_cells(result))
    console.print(table)
    methods = list(map(read_method, runs))
    labels = methods if len(set(methods)) == len(methods) else names
    files = draw_spectra(list(zip(labels, methods, results, strict=True)), output / "hessian")
    weak = [name for name, result in zip(names, results, strict=True) if not result["converged"]]
    if weak:
        console.print(f"Not converged, see the residuals, or take more --products: {', '.join(weak)}", style="yellow")
    error = " ± its standard error" if all(r["trace_error"] is not None for r in results) else ""
    console.print(
        "Hessian of the training loss, BatchNorm in eval mode. An eigenvalue lies within the residual of each value; "
        f"the trace is an estimate{error}. Figure: {files[0]}",
        style="dim",
    )


def _cells(result: dict[str, Any]) -> tuple[str, ...]:
    values, residuals, error = result["eigenvalues"], result["residuals"], result["trace_error"]
    fifth = len(values) > 4
    return (
        f"{values[0]:.4g}",
        f"{values[4]:.4g}" if fifth else NONE,
        NONE if result["ratio"] is None else f"{result['ratio']:.2f}",
        f"{result['trace']:.4g}" + ("" if error is None else f" ± {error:.2g}"),
        f"{residuals[0]:.1e}" + (f", {residuals[4]:.1e}" if fifth else ""),
    )


@contextmanager
def _bar(text: str) -> Iterator[hessian.Progress]:
    """Show a bar on a terminal, with the longest time left."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[left]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, left="")

        def progress(done: int, total: int, left: float) -> None:
            minutes, seconds = divmod(round(left), 60)
            bar.update(task, completed=done, total=total, left=f"{done}/{total}, {minutes}:{seconds:02} left at most")

        yield progress
