"""Runs that begin with the same steps take them once.

With a `last-steps` schedule a run takes base steps first. Runs that differ in nothing that base steps depend on, such
as those of a search for cut, fraction and rho, have the same weights until then. So one of them, the first, takes these
steps for all. Where another one's own steps begin it leaves a checkpoint, from which that one goes on like any run that
was stopped. In deterministic mode it ends as it would have ended alone, bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from sparsam.runs.checkpoint import save_checkpoint
from sparsam.runs.directory import RunDirectory
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
        groups: dict[Recipe, list[PlannedRun]] = {}
        for run in planned:
            if _base_share(run.recipe) > 0:
                groups.setdefault(_base_recipe(run.recipe), []).append(run)
        for runs in groups.values():
            first = max(runs, key=lambda run: _base_share(run.recipe))
            self._waiting[first.path] = [
                run for run in runs if run is not first and run.recipe.sam.enabled and not RunDirectory(run.path).exists
            ]

    def is_ready(self, run: PlannedRun) -> bool:
        """Tell whether a run can be trained now."""
        return not any(run in waiting for waiting in self._waiting.values())

    def attach(self, trainer: Trainer) -> None:
        """Let a run leave checkpoints for those that wait for it, except where it is past that step."""
        waiting = self._waiting.get(trainer.directory.path, [])
        for run in list(waiting):
            first = _base_steps(run.recipe, trainer.total_steps)
            if first > trainer.steps_taken:
                trainer.after_step.setdefault(first, []).append(partial(self._leave, run))
            else:
                waiting.remove(run)

    def release(self, path: Path) -> None:
        """Let no run wait any longer for this one, which has ended."""
        self._waiting.pop(path, None)

    def _leave(self, run: PlannedRun, trainer: Trainer) -> None:
        """Write a run as one that was stopped where the trainer stands."""
        directory, own = RunDirectory(run.path), trainer.directory
        with directory.locked():
            if not directory.exists:
                state = trainer.state()
                base = (trainer.sam.base_optimizer if trainer.sam else trainer.opt).state_dict()
                for group in base["param_groups"]:
                    group["rho"] = run.recipe.sam.rho
                state |= {"optimizer": base, "base_steps": trainer.steps_taken, "shared": True}
                save_checkpoint(directory.last, state)
                if own.best.exists():
                    shutil.copy(own.best, directory.best)
                no_mask = trainer.mask_statistics.epoch(two_passes=0)
                directory.write_metrics([{**metrics, **no_mask} for metrics in own.metrics()])
                start = {"run": own.path.name, "steps": trainer.steps_taken}
                directory.create(run.recipe, {**describe_environment(trainer.device), "start": start})
        self._waiting[own.path].remove(run)


def _base_share(recipe: Recipe) -> float:
    """Return how much of a run is base steps, before all others."""
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
