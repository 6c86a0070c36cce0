"""Several recipes, several seeds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sparsam.training.progress import Progress
from sparsam.training.recipe import RecipeError, load_recipe
from sparsam.training.rundir import RunDirectory
from sparsam.training.trainer import resume, train


def compare_recipes(
    recipes: Sequence[Path],
    seeds: int,
    output: Path,
    *,
    overrides: Sequence[str] | None = None,
    device: torch.device,
    progress: Callable[[], Progress] = Progress,
) -> list[Path]:
    """Train every recipe with every seed; return the runs' directories.

    A run that is finished is left as it is and one that was stopped is continued, if its recipe is still the same.

    Args:
        recipes: Files.
        seeds: How many runs of each, with seeds 0, 1, ...
        output: Where the runs are written, as NAME-seedN.
        overrides: `key=value`, for all runs that they concern: those of `mask` go to recipes with a sparse mask only,
            those of `sam` to recipes with SAM.
        device: Where to train.
        progress: Makes the one who is told, anew for each run.
    """
    planned = []
    for file in recipes:  # everything is checked before the first is trained
        for seed in range(seeds):
            recipe = load_recipe(file, [*_concerned(file, overrides or []), f"train.seed={seed}"])
            path = output / f"{recipe.name}-seed{seed}"
            if (path / "recipe.json").is_file() and RunDirectory(path).recipe() != recipe:
                raise RecipeError(f"{path} holds a run of another recipe; choose another --output or delete it")
            planned.append((recipe, path))
    if len({path for _, path in planned}) < len(planned):
        raise RecipeError("the recipes must have different names, but two have the same")
    for recipe, path in planned:
        gc.collect()  # the run before must not count in this one's memory
        if (path / "recipe.json").is_file():
            resume(path, device=device, progress=progress())
        else:
            train(recipe, path, device=device, progress=progress())
    return [path for _, path in planned]


def _concerned(file: Path, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that concern a recipe: SGD has no rho, and SAM no sparsity."""
    recipe = load_recipe(file)
    absent = () if recipe.mask.kind != "dense" else ("mask.",) if recipe.sam.enabled else ("mask.", "sam.")
    return [override for override in overrides if not override.startswith(absent)]
