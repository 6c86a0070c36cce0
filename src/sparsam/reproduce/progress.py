"""How far runs are that other processes train, read from their folders."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sparsam.errors import need
from sparsam.runs.directory import RunDirectory
from sparsam.training.planned import PlannedRun


class RunsProgress:
    """A bar over the epochs of all runs on a terminal; elsewhere lines for epochs, and for finished runs."""

    def __init__(self, planned: Sequence[PlannedRun]) -> None:
        self.runs = [RunDirectory(run.path) for run in planned]
        self.epochs = {run.path: run.recipe.train.epochs for run in planned}
        self._told: set[Path] = set()
        self._seen: dict[Path, int] = {}  # epochs of runs, for a log
        self._bar: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            rich = need("rich.progress", "progress bars", extra="train")
            console = need("rich.console", "progress bars", extra="train").Console(stderr=True)
            self._bar = rich.Progress(
                rich.TextColumn("{task.description}"),
                rich.BarColumn(bar_width=20),
                rich.TextColumn("{task.completed} of {task.total} epochs"),
                rich.TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=sum(self.epochs.values()))
        return self

    def __exit__(
        self, exception: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def look(self) -> None:
        """Show what has changed."""
        for run in self.runs:
            if self._bar is None and run.exists and run.path not in self._told:
                self._log_epoch(run)
            if run.finished and run.path not in self._told:
                self._told.add(run.path)
                summary = run.summary()
                text = f"{run.path.name}: {100 * summary['test_accuracy']:.2f} %"
                self._bar.console.print(text) if self._bar else print(text, file=sys.stderr, flush=True)
        if self._bar is not None:
            done = sum(len(run.metrics()) for run in self.runs if run.exists)
            self._bar.update(self._task, description=f"{len(self._told)} of {len(self.runs)} runs", completed=done)

    def _log_epoch(self, run: RunDirectory) -> None:
        """Write the run's latest epoch, if it is a new one."""
        epochs = run.metrics()
        if epochs and self._seen.get(run.path) != len(epochs):
            self._seen[run.path] = len(epochs)
            text = f"epoch {len(epochs)} of {self.epochs[run.path]}, {100 * epochs[-1]['test_accuracy']:.2f} %"
            print(f"{run.path.name}: {text}", file=sys.stderr, flush=True)
