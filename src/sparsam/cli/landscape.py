"""`sparsam landscape`: the loss around the weights of runs, side by side as figures and as a page."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sparsam.analysis.landscape import Landscape, loss_landscape
from sparsam.analysis.run_objective import load_objective
from sparsam.cli.console import plain_console
from sparsam.cli.names import names_of
from sparsam.errors import UserValueError
from sparsam.report.landscape_figure import draw_figures
from sparsam.report.landscape_page import write_landscapes
from sparsam.runs.checkpoint import check_checkpoint
from sparsam.runs.directory import RunDirectory
from sparsam.runs.files import RunError
from sparsam.runs.results import check_shared, result_file
from sparsam.training.interrupt import Interrupted, stopping_on_signals

NAMES = {1: "landscape-line", 2: "landscape"}  # a run may have both
SHARED = ("dimensions", "points", "range", "directions", "seed", "precision")
LINES_EVERY = 10.0  # seconds between two lines in a log


def check(*, directions: str, checkpoints: Sequence[Path]) -> None:
    """Refuse at once what would fail only after some of the runs are computed."""
    if bool(checkpoints) != (directions == "pca"):
        given = f"--directions is {directions}" if checkpoints else "there is none"
        raise UserValueError(f"--checkpoint must be given for --directions pca, and only then, but {given}")
    for file in checkpoints:
        check_checkpoint(file)


def measure(
    run: Path,
    *,
    dimensions: int,
    samples: int,
    best: bool,
    directions: str,
    checkpoints: Sequence[Path],
    device: torch.device,
    data_root: Path | None = None,
    **options: Any,
) -> Landscape:
    """Compute the landscape of a run, or its missing points. Keep it in RUN/analysis.

    Args:
        run: The directory of a run.
        dimensions: 1 or 2.
        samples: The number of training images.
        best: Take the weights of the best epoch, not of the last.
        directions: "random" or "pca".
        checkpoints: For "pca".
        device: Where it is computed.
        data_root: Where the data is now, if it has moved since the run.
        options: Further options of :func:`loss_landscape`.
    """
    recipe = RunDirectory(run).recipe()
    objective = load_objective(run, samples=samples, best=best, data_root=data_root, device=device)
    about = {
        "label": recipe.method,
        "seed": recipe.train.seed,
        "run": run.resolve().name,
        "setup": f"{recipe.model.name} on {recipe.data.name}",
        "weights": "best" if best else "last",
        "epochs": len(RunDirectory(run).metrics()),
        "samples_asked": samples,
    }
    with _progress(run.name) as progress:
        return loss_landscape(
            objective.model,
            objective.loss_fn,
            objective.batches,
            dimensions=dimensions,
            directions=directions,
            checkpoints=checkpoints,
            file=_file(run, dimensions),
            about=about,
            progress=progress,
            **options,
        )


def load(run: Path, dimensions: int) -> Landscape:
    """Read a landscape that was computed before. It may be unfinished."""
    file = _file(run, dimensions)
    if not file.is_file():
        raise RunError(f"there is no {file}; compute it with: sparsam landscape {run} --dimensions {dimensions}")
    return Landscape.load(file)


def show(runs: Sequence[Path], landscapes: Sequence[Landscape], output: Path) -> None:
    """Print one row for each run, draw the figures and write the page."""
    check_shared(runs, [shown.settings for shown in landscapes], SHARED)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("Run", no_wrap=True)
    for heading in ("Loss at w", "Median", "Highest", "Not finite", "Points"):
        table.add_column(heading, justify="right")
    for name, shown in zip(names_of(runs), landscapes, strict=True):
        finite = shown.losses[abs(shown.losses) < float("inf")]
        # Numbers of a part of the grid do not compare with others.
        whole = [f"{shown.median:.4g}", f"{finite.max():.4g}"] if shown.complete and len(finite) else ["–", "–"]
        points = str(shown.finished) if shown.complete else f"{shown.finished} of {shown.losses.size}"
        table.add_row(name, f"{shown.centre:.4g}", *whole, str(shown.gaps), points)
    files = draw_figures(landscapes, output)
    page = write_landscapes(landscapes, output / f"{NAMES[landscapes[0].losses.ndim]}.html")
    console = plain_console()
    console.print(table)
    figures = ", ".join(str(file) for file in files if file.suffix == ".png")
    console.print(f"Figures: {figures}, and as SVG\nThe page to turn and read off: {page}", style="dim")


def _file(run: Path, dimensions: int) -> Path:
    return result_file(run, f"{NAMES[dimensions]}.npz")


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar with the time left on a terminal, and print lines elsewhere. Ctrl-C stops after a point."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    stopped: list[bool] = []
    with (
        stopping_on_signals(lambda: stopped.append(True)),
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task(name, total=None)
        lines = None if console.is_terminal else ProgressLines(name)

        def progress(finished: int, total: int) -> None:
            bar.update(task, completed=finished, total=total)
            if lines is not None:
                lines.update(finished, total)
            if stopped and finished < total:
                raise Interrupted(
                    f"{name}: stopped after {finished} of {total} points, which are saved; the same command continues"
                )

        yield progress


class ProgressLines:
    """Prints a line now and then, with the time left.

    Args:
        name: What is computed.
        interval: Seconds between two lines.
        clock: Returns the time in seconds.
    """

    def __init__(self, name: str, interval: float = LINES_EVERY, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.interval, self.clock = name, interval, clock
        self.start = self.last = clock()
        self.first = -1

    def update(self, finished: int, total: int) -> None:
        """Print a line if it is time for one."""
        now = self.clock()
        if self.first < 0:
            self.first = finished  # points of an earlier command
        if now - self.last < self.interval or finished == self.first:
            return
        self.last = now
        left = (now - self.start) / (finished - self.first) * (total - finished)
        minutes, seconds = divmod(round(left), 60)
        print(f"{self.name}: {finished}/{total} points, {minutes}:{seconds:02} left", file=sys.stderr, flush=True)
