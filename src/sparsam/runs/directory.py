"""A run's directory: what was asked for, what it ran on, what came out.

recipe.json         the resolved recipe, every default written out
environment.json    versions, hardware, git commit; `resumed` has an entry for each time the run went on, `start` says
                    on what another run took its first steps (:mod:`sparsam.training.shared_start`)
metrics.jsonl       one line for each finished epoch
summary.json        the end result; absent while a run is unfinished
checkpoints/        last.pt and best.pt
analysis/           what was measured of the trained weights (:mod:`sparsam.runs.results`)
tensorboard/        events, if the recipe asks for them
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sparsam.runs.files import RunError, append_line, read_text, replace_file
from sparsam.runs.lock import Lock
from sparsam.runs.recipe import Recipe, RecipeError, recipe_from
from sparsam.runs.record import Record

TABLES = ("extra", "measured")  # of summary.json


class RunDirectory:
    """Reads and writes the files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._events: Any = None
        self._lock: Lock | None = None

    @property
    def last(self) -> Path:
        """The latest checkpoint."""
        return self.path / "checkpoints" / "last.pt"

    @property
    def best(self) -> Path:
        """The checkpoint with the highest accuracy so far."""
        return self.path / "checkpoints" / "best.pt"

    @property
    def exists(self) -> bool:
        """Whether there is a run here."""
        return (self.path / "recipe.json").is_file()

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return (self.path / "summary.json").is_file()

    @property
    def only_started(self) -> bool:
        """Whether another run has taken the first steps of this one, and it has taken none itself."""
        environment = self.environment() if self.exists else {}
        return "start" in environment and "resumed" not in environment

    def create(self, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Start a new run here."""
        self.check_new()
        self._write("environment.json", environment)
        self._write("recipe.json", recipe.to_dict())  # the last, because it makes this a run

    def clear(self) -> None:
        """Delete what the start of a run writes here, and nothing else. An empty folder goes when it is unlocked."""
        files = [self.path / name for name in ("recipe.json", "environment.json", "metrics.jsonl")]
        for path in (*files, self.last, self.best):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self.last.parent.rmdir()

    def environment(self) -> dict[str, Any]:
        """Return what the run ran on; nothing if it was not written."""
        return self.read("environment.json").values if (self.path / "environment.json").is_file() else {}

    def note_resumed(self, steps: int, environment: dict[str, Any]) -> None:
        """Note that the run goes on after so many steps, when, and what is not as it was at the start."""
        if not (self.path / "environment.json").is_file():
            return  # the run goes on without
        first = self.environment()
        changed = {key: value for key, value in environment.items() if key == "started" or first.get(key) != value}
        resumed = [*first.get("resumed", []), {"steps": steps, **changed}]
        self._write("environment.json", {**first, "resumed": resumed})

    def check_new(self) -> None:
        """Refuse to overwrite a run."""
        if self.exists:
            raise RecipeError(
                f"{self.path} holds a run already; continue it with --resume {self.path}, or choose another --output"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing this run."""
        self.lock()
        try:
            yield
        finally:
            self.unlock()

    def lock(self) -> None:
        """Keep other processes from writing this run, until :meth:`unlock`. What is locked already stays so."""
        if self._lock is None:
            self._lock = Lock(self.path)

    def unlock(self) -> None:
        """Let other processes write this run."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def read(self, name: str) -> Record:
        """Read a JSON file of the run."""
        if not self.exists:
            raise RunError(f"{self.path} is not a run directory: it has no recipe.json")
        return Record.read(self.path / name)

    def recipe(self) -> Recipe:
        """Return the recipe of the run."""
        return recipe_from(self.read("recipe.json").values)

    def epochs(self) -> list[Record]:
        """Read the metrics of the finished epochs. Errors name the line."""
        path = self.path / "metrics.jsonl"
        if not self.finished and not path.is_file():
            return []
        text = read_text(path)
        lines = text.splitlines()
        if not self.finished and lines and not text.endswith("\n"):
            lines.pop()  # the trainer is writing it, or crashed while it did
        return [Record.parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of the finished epochs as plain values."""
        return [record.values for record in self.epochs()]

    def keep_epochs(self, count: int) -> None:
        """Delete the metrics of later epochs: a resumed run writes them again."""
        self.write_metrics([m for m in self.metrics() if m["epoch"] <= count])
        (self.path / "summary.json").unlink(missing_ok=True)

    def write_metrics(self, epochs: Sequence[dict[str, Any]]) -> None:
        """Write the metrics of all epochs anew."""
        replace_file(self.path / "metrics.jsonl", "".join(json.dumps(m) + "\n" for m in epochs))

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Append the metrics of an epoch, before the checkpoint that relies on them."""
        append_line(self.path / "metrics.jsonl", json.dumps(metrics))

    def add_events(self, metrics: dict[str, Any]) -> None:
        """Write the metrics of an epoch as TensorBoard events."""
        from torch.utils.tensorboard import SummaryWriter

        epoch = metrics["epoch"]
        if self._events is None:
            self._events = SummaryWriter(str(self.path / "tensorboard"), purge_step=epoch)
        for key, value in metrics.items():
            if isinstance(value, float):
                self._events.add_scalar(key, value, epoch)
        for block, share in (metrics["mask_density"] or {}).items():
            self._events.add_scalar(f"mask_density/{block}", share, epoch)
        self._events.flush()

    def summary(self) -> dict[str, Any]:
        """Return the end result."""
        return self.read("summary.json").values

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the end result."""
        self._write("summary.json", summary)

    def add_to_summary(self, values: dict[str, Any]) -> None:
        """Add numbers to the end result that were measured after it.

        Args:
            values: What to add. Tables in :data:`TABLES` keep what they have.
        """
        with self.locked():
            summary = self.summary()
            tables = {key: {**(summary.get(key) or {}), **(values.get(key) or {})} for key in TABLES}
            self.write_summary({**summary, **values, **{key: table for key, table in tables.items() if table}})

    def _write(self, name: str, content: dict[str, Any]) -> None:
        replace_file(self.path / name, json.dumps(content, indent=2) + "\n")


def directories_in(folder: str | Path) -> list[Path]:
    """Return the runs in a folder at any depth, by path; the folder itself if it is one.

    A link to a run is a run. Other links are not followed.
    """
    if RunDirectory(folder).exists:
        return [Path(folder)]
    found: list[Path] = []
    for place, names, _ in os.walk(folder):
        runs = [name for name in names if RunDirectory(Path(place, name)).exists]
        found += [Path(place, name) for name in runs]
        names[:] = [name for name in names if name not in runs]  # what lies within a run belongs to it
    return sorted(found)
