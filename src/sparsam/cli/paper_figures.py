"""The paper's figures, drawn from the runs of `sparsam reproduce`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparsam.cli import gradients, hessian, landscape
from sparsam.cli.analysis import earlier_results, warn_outdated
from sparsam.report import write_report
from sparsam.report.sparsity_figure import Point, draw_sparsity
from sparsam.reproduce.comparison import Result
from sparsam.reproduce.experiments import Experiment
from sparsam.runs.files import RunError
from sparsam.runs.results import outdated, read_result, result_file
from sparsam.runs.run import Run

MEASURED = {"gradients": "gradients.json", "hessian": "hessian.json", "landscape": "landscape.npz"}
"""The file of a run that a figure is drawn from; other figures need its metrics only."""


def draw_figure(
    experiment: Experiment,
    results: Sequence[Result],
    folder: Path,
    device: Any = None,
    samples: int = 10_000,
    points: int = 50,
) -> None:
    """Measure what a figure needs of its runs, unless that was done before, and draw it into a folder.

    Args:
        experiment: The figure.
        results: Its rows with their runs. The first seed of each is drawn.
        folder: Where to write.
        device: Where it is measured.
        samples: Training images to measure over.
        points: On each axis of a landscape.
    """
    runs = [result.method.runs[0] for result in results if result.method]
    if experiment.shows == "sparsity":
        _sparsity(results, folder)
    elif not runs:
        print(f"{experiment.name}: there is no run to draw")
    elif experiment.shows == "curves":
        _curves(runs, folder)
    elif experiment.shows == "gradients":
        _gradients(runs, folder, device, samples)
    elif experiment.shows == "hessian":
        _hessian(runs, folder, device, samples)
    else:
        _landscape(runs, folder, device, samples, points)


def redraw_figure(experiment: Experiment, results: Sequence[Result], folder: Path) -> None:
    """Draw a figure into a folder from what its runs hold, and measure nothing: weights are not needed.

    Args:
        experiment: The figure.
        results: Its rows with their runs. The first seed of each that was measured is drawn.
        folder: Where to write.
    """
    shows = experiment.shows or ""
    if shows not in MEASURED:
        draw_figure(experiment, results, folder)
        return
    of_rows = [result.method.runs for result in results if result.method]
    measured = [[run for run in runs if result_file(run.directory, MEASURED[shows]).is_file()] for runs in of_rows]
    directories = [runs[0].directory for runs in measured if runs]
    if not directories:
        print(f"{experiment.name}: nothing was measured of these runs, and that needs their weights")
        return
    try:
        if shows == "landscape":
            _redraw_landscape(directories, folder)
        else:
            _redraw_results(shows, directories, folder)
    except RunError as error:  # other figures may still be drawn
        print(f"{experiment.name} is not drawn: {error}")


def _redraw_landscape(runs: Sequence[Path], folder: Path) -> None:
    found = [landscape.load(run, 2) for run in runs]
    warn_outdated(runs, [shown.about for shown in found])
    landscape.show(runs, found, folder)


def _redraw_results(shows: str, runs: Sequence[Path], folder: Path) -> None:
    command: Any = gradients if shows == "gradients" else hessian
    command.show(runs, earlier_results(shows, runs, command.SHARED), folder)


def _curves(runs: Sequence[Run], folder: Path) -> None:
    """Write a page with curves for each network and data set."""
    for setup in dict.fromkeys(run.setup for run in runs):
        alike = [run.directory for run in runs if run.setup == setup]
        print(f"Curves: {write_report(alike, folder / (setup.replace(' ', '-') + '.html'))}")


def _sparsity(results: Sequence[Result], folder: Path) -> None:
    panels: dict[str, list[Point]] = {}
    for result in results:
        recipe, accuracy = result.recipe, result.method.accuracy if result.method else None
        title = f"{recipe.model.name} on {recipe.data.name}"
        panels.setdefault(title, []).append(Point(recipe.method, recipe.mask.sparsity, result.row.paper, accuracy))
    print(f"Figures: {', '.join(map(str, draw_sparsity(panels, folder / 'sparsity')))}")


def _gradients(runs: Sequence[Run], folder: Path, device: Any, samples: int) -> None:
    size = min(128, samples)
    batches = max(1, min(8, samples // size))

    def measure(run: Run) -> dict[str, Any]:
        return gradients.measure(
            run.directory, rho=run.rho or 0.1, batch_size=size, batches=batches, best=False, device=device
        )

    found = [_once(run, "gradients", batches * size, measure) for run in runs]
    gradients.show([run.directory for run in runs], found, folder)


def _hessian(runs: Sequence[Run], folder: Path, device: Any, samples: int) -> None:
    settings: dict[str, Any] = {"top": 5, "products": 100, "probes": 3, "steps": 60, "precision": "fp32", "memory": 4.0}

    def measure(run: Run) -> dict[str, Any]:
        return hessian.measure(run.directory, samples=samples, seed=0, best=False, device=device, **settings)

    found = [_once(run, "hessian", samples, measure) for run in runs]
    hessian.show([run.directory for run in runs], found, folder)


def _landscape(runs: Sequence[Run], folder: Path, device: Any, samples: int, points: int) -> None:
    asked: dict[str, Any] = {"points": points, "seed": 0, "precision": "bf16" if device.type == "cuda" else "fp32"}
    found = []
    for run in runs:
        file = result_file(run.directory, "landscape.npz")
        known = landscape.load(run.directory, 2) if file.is_file() else None
        earlier = {} if known is None else {**known.settings, **known.about}
        other = known is not None and any(
            earlier.get(key) != value for key, value in {**asked, "samples_asked": samples}.items()
        )
        found.append(
            landscape.measure(
                run.directory,
                dimensions=2,
                range=1.0,
                directions="random",
                checkpoints=(),
                samples=samples,
                best=False,
                overwrite=other,
                device=device,
                **asked,
            )
        )
    landscape.show([run.directory for run in runs], found, folder)


def _once(run: Run, name: str, samples: int, measure: Callable[[Run], dict[str, Any]]) -> dict[str, Any]:
    """Return an earlier result of a run over as many images, or a new one."""
    if result_file(run.directory, f"{name}.json").is_file():
        known = read_result(run.directory, name)
        if known.get("samples_asked") == samples and not outdated(run.directory, known):
            return known
    return measure(run)
