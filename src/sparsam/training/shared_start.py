"""Runs that begin with the same steps take them once.

With a `last-steps` schedule a run takes base steps first. Runs that differ in nothing that base steps depend on, such
as those of a search for cut, fraction and rho, have the same weights until then. So one of them, the first, takes these
steps for all. Where another one's own steps begin it leaves a checkpoint, from which that one goes on like any run that
was stopped. In deterministic mode it ends as it would have ended alone, bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from sparsam.runs.checkpoint import save_checkpoint
from sparsam.runs.directory import RunDirectory
from sparsam.runs.lock import Locked
from sparsam.runs.recipe import Recipe
from sparsam.training.build import build_ascent, build_schedule
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
            if _base_share(run.recipe) > 0:
                groups.setdefault(_base_recipe(run.recipe), []).append(run)
        for runs in groups.values():
            self._group(runs)

    def _group(self, runs: Sequence[PlannedRun]) -> None:
        """Let those of some runs that are not begun yet wait for the one with most base steps."""
        first = max(runs, key=lambda run: _base_share(run.recipe))
        self._waiting[first.path] = [
            run for run in runs if run is not first and run.recipe.sam.enabled and not RunDirectory(run.path).exists
        ]

    @property
    def count(self) -> int:
        """How many runs wait."""
        return sum(map(len, self._waiting.values()))

    def waiting_for(self, path: Path) -> list[PlannedRun]:
        """Return the runs that wait for this one."""
        return list(self._waiting.get(path, []))

    def is_ready(self, run: PlannedRun) -> bool:
        """Tell whether a run can be trained now."""
        return not any(run in waiting for waiting in self._waiting.values())

    def attach(self, trainer: Trainer) -> None:
        """Let a run leave checkpoints for those that wait for it. Those that it is past share among themselves."""
        path, missed = trainer.directory.path, []
        for run in self.waiting_for(path):
            first = _base_steps(run.recipe, trainer.total_steps)
            if first > trainer.steps_taken:
                trainer.after_step.setdefault(first, []).append(partial(self._leave, run))
            else:
                self._waiting[path].remove(run)
                missed.append(run)
        if missed:
            self._group(missed)

    def release(self, path: Path, *, failed: bool = False) -> None:
        """Let no run wait any longer for this one, which has ended; delete a start from which it could not go on."""
        waiting = self._waiting.pop(path, [])
        if waiting:
            self._group(waiting)
        if failed and path in self._left:
            directory = RunDirectory(path)
            with suppress(Locked), directory.locked():
                if "resumed" not in directory.read("environment.json").values:
                    directory.delete()

    def _leave(self, run: PlannedRun, trainer: Trainer) -> None:
        """Write a run as one that was stopped where the trainer stands, unless another process has begun it."""
        self._waiting[trainer.directory.path].remove(run)
        directory = RunDirectory(run.path)
        with suppress(Locked), directory.locked():
            if not directory.exists:
                _write_start(directory, run.recipe, trainer)
                self._left.add(run.path)


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
    start = {"run": own.path.name, "steps": trainer.steps_taken}
    directory.create(recipe, {**describe_environment(trainer.device), "start": start})


def _base_share(recipe: Recipe) -> float:
    """Return how much of a run is base steps, before all others."""
    if recipe.train.precision == "fp16":
        return 0.0  # a gradient scaler leaves out steps, which SAM's schedule does not count
    if not recipe.sam.enabled:
        return 1.0
    schedule = recipe.schedule
    return 1 - schedule.fraction if schedule.fraction is not None and schedule.before is None else 0.0


def _base_steps(recipe: Recipe, total_steps: int) -> int:
    """Return how many base steps a run takes before all others."""
    schedule, ascent = build_schedule(recipe.schedule, total_steps), build_ascent(recipe.ascent)
    return next(step for step in range(total_steps) if schedule.ascent(step, ascent) is not None)


def _base_recipe(recipe: Recipe) -> Recipe:
    """Return what base steps depend on."""
    none = Recipe()
    return replace(recipe, name="", sam=none.sam, mask=none.mask, ascent=none.ascent, schedule=none.schedule)
