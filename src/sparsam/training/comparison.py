"""Several recipes, several seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from sparsam.runs.recipe import Recipe, load_recipe, relevant_overrides
from sparsam.runs.schema import RecipeError
from sparsam.training.planned import PlannedRun, check_planned
from sparsam.training.progress import Progress
from sparsam.training.turns import time_steps, train_runs


def compare_recipes(
    recipes: Sequence[str | Path],
    seeds: int,
    output: Path,
    *,
    overrides: Sequence[str] = (),
    device: torch.device,
    at_once: int = 1,
    share_start: bool = False,
    rounds: int = 0,
    progress: Callable[[], Progress] = Progress,
) -> list[Path]:
    """Train every recipe with every seed; return the runs' directories.

    A run that is finished is left as it is and one that was stopped is continued, if its recipe is still the same.

    Args:
        recipes: Names or files.
        seeds: How many runs of each, with seeds 0, 1, ...
        output: Where the runs are written, as NAME-seedN.
        overrides: `key=value`, for all recipes that they have a meaning for: a sparsity is for sparse masks only.
        device: Where to train.
        at_once: How many runs share the device (:func:`~.turns.train_runs`).
        share_start: Whether runs that begin with the same steps take them once (:mod:`~.shared_start`).
        rounds: Time the steps of all methods in turn afterwards (:func:`~.turns.time_steps`); 0: do not.
        progress: Makes what shows the progress, anew for each run.
    """
    planned = _plan(recipes, seeds, output, overrides)
    check_planned(planned, at_once)
    train_runs(planned, device=device, at_once=at_once, share_start=share_start, progress=progress)
    if rounds:
        time_steps(planned, device=device, rounds=rounds)
    return [run.path for run in planned]


def _plan(sources: Sequence[str | Path], seeds: int, output: Path, overrides: Sequence[str]) -> list[PlannedRun]:
    """Return the runs."""
    planned = []
    used: set[str] = set()
    for source in sources:
        try:
            relevant = relevant_overrides(source, overrides)
            recipe = load_recipe(source, relevant)
        except RecipeError as error:
            raise _with_file(source, error) from None
        used.update(relevant)
        planned += with_seeds(recipe, seeds, output)
    check_used(overrides, used)
    return planned


def _with_file(source: str | Path, error: RecipeError) -> RecipeError:
    """Return an error with the recipe that has it, unless it names that already or comes from overrides."""
    try:
        load_recipe(source)
    except RecipeError as own:
        if str(own) == str(error) and str(source) not in str(error):
            return RecipeError(f"{source}: {error}")
    return error


def with_seeds(recipe: Recipe, seeds: int, output: Path) -> list[PlannedRun]:
    """Return the runs of a recipe with seeds 0, 1, ..., which are written as NAME-seedN."""
    return [
        PlannedRun(replace(recipe, train=replace(recipe.train, seed=seed)), output / f"{recipe.name}-seed{seed}")
        for seed in range(seeds)
    ]


def check_used(overrides: Sequence[str], used: set[str]) -> None:
    """Refuse an override that has no meaning for any recipe."""
    for override in overrides:
        if override not in used:
            raise RecipeError(f"{override.partition('=')[0]} has no meaning for any of the recipes; leave it out")
