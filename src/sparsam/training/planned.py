"""What is to be trained, and what of it is refused before anything is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sparsam.runs.directory import RunDirectory
from sparsam.runs.recipe import Recipe
from sparsam.runs.schema import RecipeError
from sparsam.settings import differences

OF_THE_PROCESS = ("deterministic", "threads")  # settings of `train` that hold for all runs of a process


class PlannedRun(NamedTuple):
    """What to train, and where the run is written."""

    recipe: Recipe
    path: Path


def check_planned(planned: Sequence[PlannedRun], at_once: int = 1) -> None:
    """Refuse at once what would fail only after some of the runs are trained."""
    for recipe, path in planned:
        run = RunDirectory(path)
        if run.exists and (changed := differences(run.recipe().to_dict(), recipe.to_dict())):
            raise RecipeError(
                f"{path} holds a run of another recipe, which differs in {', '.join(changed)}; choose another "
                f"--output or delete it"
            )
    for key in OF_THE_PROCESS:
        if at_once > 1 and len({getattr(recipe.train, key) for recipe, _ in planned}) > 1:
            raise RecipeError(f"runs at once must agree in train.{key}, which holds for the whole process")
    if len({path for _, path in planned}) < len(planned):
        raise RecipeError("the recipes must have different names, but two have the same")
