"""The paper's figures, drawn from the runs of `sparsam reproduce`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich

from sparsam.runs.results import outdated, read_result, result_file

if TYPE_CHECKING:
    from sparsam.reproduce.comparison import Result
    from sparsam.reproduce.experiments import Experiment
    from sparsam.runs.run import Run


def draw_figure(
    experiment: Experiment, results: Sequence[Result], output: Path, device: Any, samples: int, points: int
) -> None:
    """Measure what a figure needs of its runs, unless that was done before, and draw it into OUTPUT/NAME.

    Args:
        experiment: The figure.
        results: Its rows with their runs. The first seed of each is drawn.
        output: Where to write.
        device: Where it is measured.
        samples: Training images to measure over.
        points: On each axis of a landscape.
    """
    runs = [result.method.runs[0] for result in results if result.method]
    folder = output / experiment.name
    if experiment.shows == "curves":
        _curves(runs, folder)
    elif experiment.shows == "sparsity":
        _sparsity(results, folder)
    elif experiment.shows == "gradients":
        _gradients(runs, folder, device, samples)
    elif experiment.shows == "hessian":
        _hessian(runs, folder, device, samples)
    else:
        _landscape(runs, folder, device, samples, points)


def _curves(runs: Sequence[Run], folder: Path) -> None:
    """Write a page with curves for each network and data set."""
    from sparsam.report import write_report

    for setup in dict.fromkeys(run.setup for run in runs):
        alike = [run.directory for run in runs if run.setup == setup]
        rich.print(f"Curves: {write_report(alike, folder / (setup.replace(' ', '-') + '.html'))}")


def _sparsity(results: Sequence[Result], folder: Path) -> None:
    from sparsam.report.sparsity_figure import Point, draw_sparsity
    from sparsam.reproduce.table import DATA, NETWORKS

    panels: dict[str, list[Point]] = {}
    for result in results:
        recipe = result.recipe
        title = " on ".join((NETWORKS[recipe.model.name], DATA[recipe.data.name]))
        accuracy = result.method.accuracy if result.method else None
        panels.setdefault(title, []).append(Point(recipe.method, recipe.mask.sparsity, result.row.paper, accuracy))
    rich.print(f"Figures: {', '.join(map(str, draw_sparsity(panels, folder / 'sparsity')))}")


def _gradients(runs: Sequence[Run], folder: Path, device: Any, samples: int) -> None:
    from sparsam.cli import gradients

    size = min(128, samples)

    def measure(run: Run) -> dict[str, Any]:
        batches = max(1, min(8, samples // size))
        return gradients.measure(
            run.directory, rho=run.rho or 0.1, batch_size=size, batches=batches, best=False, device=device
        )

    found = [_once(run, "gradients", measure) for run in runs]
    gradients.show([run.directory for run in runs], found, folder)


def _hessian(runs: Sequence[Run], folder: Path, device: Any, samples: int) -> None:
    from sparsam.cli import hessian

    settings: dict[str, Any] = {"top": 5, "products": 100, "probes": 3, "steps": 60, "precision": "fp32", "memory": 4.0}

    def measure(run: Run) -> dict[str, Any]:
        return hessian.measure(run.directory, samples=samples, seed=0, best=False, device=device, **settings)

    found = [_once(run, "hessian", measure) for run in runs]
    hessian.show([run.directory for run in runs], found, folder)


def _landscape(runs: Sequence[Run], folder: Path, device: Any, samples: int, points: int) -> None:
    from sparsam.cli import landscape

    settings: dict[str, Any] = {"dimensions": 2, "range": 1.0, "directions": "random", "checkpoints": (), "seed": 0}
    precision = "bf16" if device.type == "cuda" else "fp32"
    found = [
        landscape.measure(
            run.directory,
            points=points,
            precision=precision,
            samples=samples,
            best=False,
            overwrite=False,
            device=device,
            **settings,
        )
        for run in runs
    ]
    landscape.show([run.directory for run in runs], found, folder)


def _once(run: Run, name: str, measure: Callable[[Run], dict[str, Any]]) -> dict[str, Any]:
    """Return an earlier result of a run, or a new one."""
    if result_file(run.directory, f"{name}.json").is_file():
        known = read_result(run.directory, name)
        if not outdated(run.directory, known):
            return known
    return measure(run)
