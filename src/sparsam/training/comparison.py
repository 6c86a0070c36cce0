"""Several recipes, several seeds."""

from __future__ import annotations

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
        overrides: `key=value`, for all runs.
        device: Where to train.
        progress: Makes the one who is told, anew for each run.
    """
    planned = []
    for file in recipes:  # all are read before the first is trained
        for seed in range(seeds):
            recipe = load_recipe(file, [*(overrides or []), f"train.seed={seed}"])
            planned.append((recipe, output / f"{recipe.name}-seed{seed}"))
    if len({path for _, path in planned}) < len(planned):
        raise RecipeError("the recipes must have different names, but two have the same")
    for recipe, path in planned:
        if (path / "recipe.json").is_file():
            if RunDirectory(path).recipe() != recipe:
                raise RecipeError(f"{path} holds a run of another recipe; choose another --output or delete it")
            if RunDirectory(path).finished:
                continue
            resume(path, device=device, progress=progress())
        else:
            train(recipe, path, device=device, progress=progress())
    return [path for _, path in planned]
