"""Shows how a run goes: not at all, in a terminal, or in a log."""

from __future__ import annotations

import json
import math
import sys
from types import TracebackType
from typing import Any, Self, TextIO

from sparsam.errors import need
from sparsam.runs.recipe import Recipe


class Progress:
    """Shows nothing; the interface of the others."""

    place = ""  # of this run among several, such as "2 of 31"
    label = ""  # what this run is called; empty: its method

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exception: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def start(self, recipe: Recipe, steps: int, total_steps: int, epoch: int) -> None:
        """Show that a run starts.

        Args:
            recipe: What is trained.
            steps: Of an epoch.
            total_steps: Of the run.
            epoch: Where it starts.
        """

    def step_done(self, batch: int, seconds: float) -> None:
        """Show how far the epoch is, and how long it has taken."""

    def epoch_done(self, metrics: dict[str, Any]) -> None:
        """Show the metrics of an epoch."""

    def remark(self, text: str) -> None:
        """Show something worth knowing; the same text may come again and again."""

    def done(self, summary: dict[str, Any]) -> None:
        """Show how the run ended."""


class LogProgress(Progress):
    """Writes lines of JSON, for logs and other programs: one for each epoch, and if asked for one for each run.

    Args:
        stream: Where to; stderr if None.
        ends: Whether the end of a run gets a line too.
    """

    def __init__(self, stream: TextIO | None = None, *, ends: bool = False) -> None:
        self.stream = stream or sys.stderr
        self.ends = ends
        self.remarks: set[str] = set()

    def start(self, recipe: Recipe, steps: int, total_steps: int, epoch: int) -> None:
        """Note the run's name for the lines to come."""
        self.name, self.seed = recipe.name, recipe.train.seed

    def remark(self, text: str) -> None:
        """Write a line, once."""
        if text not in self.remarks:
            self.remarks.add(text)
            self._write({"remark": text})

    def epoch_done(self, metrics: dict[str, Any]) -> None:
        """Write one line."""
        self._write({key: value for key, value in metrics.items() if key != "mask_density"})

    def done(self, summary: dict[str, Any]) -> None:
        """Write one line for the run, if asked for."""
        if self.ends:
            self._write({key: summary[key] for key in ("method", "epochs", "test_accuracy", "step_ms", "seconds")})

    def _write(self, values: dict[str, Any]) -> None:
        rounded = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in values.items()}
        place = {"place": self.place} if self.place else {}
        print(json.dumps({"run": self.name, "seed": self.seed, **place, **rounded}), file=self.stream, flush=True)


class TerminalProgress(Progress):
    """Draws a bar with the epoch, loss, accuracy, learning rate, step time and time left."""

    def __init__(self) -> None:
        rich = need("rich.progress", "progress bars", extra="train")
        self.remarks: set[str] = set()
        self._bar = rich.Progress(
            rich.TextColumn("[bold]{task.description}"),
            rich.BarColumn(bar_width=8),
            rich.TextColumn("{task.fields[epoch]}"),
            rich.TextColumn("{task.fields[numbers]}", style="dim"),
            rich.TimeRemainingColumn(),
            transient=True,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, exception: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def start(self, recipe: Recipe, steps: int, total_steps: int, epoch: int) -> None:
        """Draw an empty bar."""
        self.steps, self.epochs, self.epoch, self.numbers = steps, math.ceil(total_steps / steps), epoch, ""
        self.max_steps, self.label = recipe.train.max_steps, self.label or recipe.method
        self._task = self._bar.add_task(
            f"{self.place and f'Run {self.place}: '}{self.label}, seed {recipe.train.seed}",
            total=total_steps,
            completed=steps * epoch,
            epoch="",
            numbers="",
        )

    def step_done(self, batch: int, seconds: float) -> None:
        """Move the bar."""
        self._bar.update(
            self._task,
            completed=self.epoch * self.steps + batch,
            epoch=f"{self.epoch + 1}/{self.epochs}",
            numbers=f"{1000 * seconds / batch:.1f} ms{self.numbers}",
        )

    def remark(self, text: str) -> None:
        """Print a line above the bar, once."""
        if text not in self.remarks:
            self.remarks.add(text)
            self._bar.console.print(text, style="dim")

    def epoch_done(self, metrics: dict[str, Any]) -> None:
        """Show the epoch's numbers."""
        self.epoch = metrics["epoch"]
        loss, accuracy, lr = (metrics[key] for key in ("train_loss", "test_accuracy", "lr"))
        self.numbers = f" loss {loss:.3f} acc {100 * accuracy:.2f}% lr {lr:.3f}"
        numbers = f"{metrics['step_ms']:.1f} ms{self.numbers}"
        self._bar.update(self._task, completed=self.epoch * self.steps, numbers=numbers)

    def done(self, summary: dict[str, Any]) -> None:
        """Leave one line."""
        time = "" if summary["step_ms"] is None else f", {summary['step_ms']:.2f} ms/step"
        self._bar.console.print(
            f"{self.label}, seed {summary['seed']}: {100 * summary['test_accuracy']:.2f} % "
            f"({summary['evaluated_on']}, {length_of(summary, self.max_steps)}){time}"
        )


def length_of(summary: dict[str, Any], max_steps: int | None) -> str:
    """Return how long a run was: in steps where `train.max_steps` has ended it, else in epochs."""
    steps, epochs = summary["steps"], summary["epochs"]
    if steps == max_steps:
        return f"{steps} step{'' if steps == 1 else 's'}"
    return "1 epoch" if epochs == 1 else f"the last of {epochs} epochs"


def suitable_progress(*, ends: bool = False) -> Progress:
    """Return a bar for a terminal, lines of JSON for anything else: `ends` as in :class:`LogProgress`."""
    return TerminalProgress() if sys.stderr.isatty() else LogProgress(ends=ends)
