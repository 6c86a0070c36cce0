"""Runs that begin with the same steps take them once.

With a `last-steps` schedule a run takes base steps first. Runs that differ in nothing that base steps depend on, such
as those of a search for cut, fraction and rho, have the same weights until then. So one of them, the first, takes these
steps for all. Where another one's own steps begin it leaves a checkpoint, from which that one goes on like any run that
was stopped. In deterministic mode on a CPU it ends as it would have ended alone, bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from sparsam.errors import UserError
from sparsam.runs.checkpoint import save_checkpoint
from sparsam.runs.directory import RunDirectory
from sparsam.runs.files import RunError
from sparsam.runs.lock import Locked
from sparsam.runs.recipe import Recipe
from sparsam.training.build import base_steps, build_ascent, build_schedule
from sparsam.training.environment import describe_environment
from sparsam.training.planned import PlannedRun
from sparsam.training.trainer import Trainer


class SharedStart:
    """Which runs wait for another one to take their first steps.

    Args:
        planned: Runs that are not finished. Those that exist already go on from where they are.
    """

    def __init__(self, planned: Sequence[PlannedRun]) -> None:
        self._waiting: dict[Path, list[PlannedRun]] = {}  # by the path of the run that they wait for
        self._left: set[Path] = set()  # runs that were left, and not begun yet
        groups: dict[Recipe, list[PlannedRun]] = {}
        for run in planned:
            if _rank(run) > 0:
                groups.setdefault(_base_recipe(run.recipe), []).append(run)
        for runs in groups.values():
            self._group(runs)

    def _group(self, runs: Sequence[PlannedRun]) -> None:
        """Let those of some runs that are not begun yet wait for the one with most base steps."""
        first = max(runs, key=_rank)
        self._waiting[first.path] = [
            run for run in runs if run is not first and run.recipe.sam.enabled and not RunDirectory(run.path).exists
        ]

    @property
    def count(self) -> int:
        """How many runs wait."""
        return sum(map(len, self._waiting.values()))

    def is_ready(self, run: PlannedRun) -> bool:
        """Tell whether a run can be trained now."""
        return not any(run in waiting for waiting in self._waiting.values())

    def attach(self, trainer: Trainer) -> None:
        """Let a run leave checkpoints for those that wait for it. Those that it cannot serve share with each other."""
        path, missed = trainer.directory.path, []
        own = _shareable_steps(trainer.recipe, trainer.total_steps)
        for run in self._waiting.get(path, []).copy():
            steps = _shareable_steps(run.recipe, trainer.total_steps)
            if trainer.steps_taken < steps <= own:
                trainer.after_step.setdefault(steps, []).append(partial(self._leave, run))
            else:
                self._waiting[path].remove(run)
                missed.append(run)
        if missed:
            self._group(missed)

    def release(self, path: Path) -> None:
        """Let no run wait any longer for this one, which has ended."""
        waiting = self._waiting.pop(path, [])
        if waiting:
            self._group(waiting)

    def not_opened(self, run: PlannedRun, error: Exception) -> list[tuple[PlannedRun, RunError]]:
        """Note that a run could not be opened; return the runs that fail with it, and why.

        Those that wait for a run of another process fail: alone they would take its steps again. A start that was left
        is deleted if its recipe is at fault, because the mended one would be another.
        """
        if isinstance(error, Locked):
            waiting = self._waiting.pop(run.path, [])
            return [(other, RunError(f"another run takes its first steps: {error}")) for other in waiting]
        self.release(run.path)
        if run.path in self._left and isinstance(error, UserError) and not isinstance(error, RunError):
            directory = RunDirectory(run.path)
            with suppress(RunError), directory.locked():
                if directory.only_started:
                    directory.clear()
        return []

    def _leave(self, run: PlannedRun, trainer: Trainer) -> None:
        """Write a run as one that was stopped where the trainer stands, unless another process has begun it.

        What goes wrong in its folder is its own trouble, in its own turn.
        """
        self._waiting[trainer.directory.path].remove(run)
        directory = RunDirectory(run.path)
        try:
            with directory.locked():
                if not directory.exists:
                    _write_start(directory, run.recipe, trainer)
                    self._left.add(run.path)
        except (OSError, UserError) as error:
            trainer.progress.remark(f"{run.path.name} has no shared start: {error}")


def _write_start(directory: RunDirectory, recipe: Recipe, trainer: Trainer) -> None:
    state, own = trainer.state(), trainer.directory
    base = (trainer.sam.base_optimizer if trainer.sam else trainer.opt).state_dict()
    for group in base["param_groups"]:
        group["rho"] = recipe.sam.rho
    save_checkpoint(directory.last, {**state, "optimizer": base, "base_steps": trainer.steps_taken, "untimed": True})
    if own.best.exists():
        shutil.copy(own.best, directory.best)
    no_mask = trainer.mask_statistics.epoch(two_passes=0)
    directory.write_metrics([{**metrics, **no_mask} for metrics in own.metrics()])
    start = {"run": own.path.name, "steps": trainer.steps_taken, **own.environment()}
    directory.create(recipe, {**describe_environment(trainer.device), "start": start})


def _rank(run: PlannedRun) -> int:
    """Return how many of 10,000 steps are base steps that come first: runs that could share have equally many steps."""
    return _shareable_steps(run.recipe, 10_000)


def _shareable_steps(recipe: Recipe, total_steps: int) -> int:
    """Return how many base steps a run takes before all others; 0 if it cannot share them."""
    if recipe.train.precision == "fp16":
        return 0  # a gradient scaler leaves out steps, which SAM's schedule does not count
    if not recipe.sam.enabled:
        return total_steps
    try:
        schedule, ascent = build_schedule(recipe.schedule, total_steps), build_ascent(recipe.ascent)
    except UserError:
        return 0  # it fails in its own turn, under its own name
    return base_steps(schedule, ascent, total_steps)


def _base_recipe(recipe: Recipe) -> Recipe:
    """Return what base steps depend on."""
    none = Recipe()
    return replace(recipe, name="", sam=none.sam, mask=none.mask, ascent=none.ascent, schedule=none.schedule)
