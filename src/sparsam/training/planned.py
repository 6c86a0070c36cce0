"""What is to be trained, and what of it is refused before anything is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from sparsam.data.shapes import TRAINING_IMAGES
from sparsam.errors import UserError
from sparsam.masks import SuffixMask
from sparsam.models import build_model
from sparsam.randomness import fork_rng
from sparsam.runs.build import usual_images
from sparsam.runs.directory import RunDirectory
from sparsam.runs.recipe import Recipe
from sparsam.runs.schema import RecipeError
from sparsam.settings import differences
from sparsam.training.build import build_ascent, build_schedule
from sparsam.training.over_time import ramp_of
from sparsam.training.trainer import total_steps

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
    for recipe in {(recipe.model, recipe.mask): recipe for recipe, _ in planned}.values():
        _check_cut(recipe)
    for recipe in {(recipe.schedule, recipe.ascent): recipe for recipe, _ in planned if recipe.sam.enabled}.values():
        _check_policies(recipe)
    for recipe in {
        recipe.name: recipe for recipe, _ in planned if recipe.sam.enabled and recipe.sam.ramp_epochs
    }.values():
        _check_ramp(recipe)
    for key in OF_THE_PROCESS:
        if at_once > 1 and len({getattr(recipe.train, key) for recipe, _ in planned}) > 1:
            raise RecipeError(f"runs at once must agree in train.{key}, which holds for the whole process")
    if len({path for _, path in planned}) < len(planned):
        raise RecipeError("the recipes must have different names, but two have the same")


def _check_cut(recipe: Recipe) -> None:
    """Refuse a cut that a network of ours does not have. Others (timm:NAME) may be slow to build."""
    if recipe.mask.cut is not None and ":" not in recipe.model.name:
        images = usual_images(recipe)
        with torch.device("meta"), fork_rng([]):
            model = build_model(recipe.model.name, images.classes, channels=images.channels, stem=recipe.model.stem)
        try:
            SuffixMask(model, recipe.mask.cut)
        except UserError as error:
            raise RecipeError(f"{recipe.name}: mask.{error}") from error


def _check_policies(recipe: Recipe) -> None:
    """Refuse a schedule or an ascent that cannot be built, however many steps a run has: only its data tell that."""
    try:
        build_schedule(recipe.schedule, total_steps=10**9)
        build_ascent(recipe.ascent)
    except UserError as error:
        raise RecipeError(f"{recipe.name}: {error}") from error


def _check_ramp(recipe: Recipe) -> None:
    """Refuse a ramp of rho that the run is too short for, as far as that is known without its data."""
    if recipe.data.name == "imagefolder" and recipe.train.max_steps is not None:
        return  # only the folder tells how many epochs these steps are
    epoch_steps = usual_epoch_steps(recipe)
    steps = total_steps(recipe, epoch_steps)
    try:
        schedule, ascent = build_schedule(recipe.schedule, steps), build_ascent(recipe.ascent)
        ramp_of(recipe, schedule, ascent, epoch_steps=epoch_steps, total_steps=steps)
    except UserError as error:
        raise RecipeError(f"{recipe.name}: {error}") from error


def usual_epoch_steps(recipe: Recipe) -> int:
    """Return the steps of an epoch without looking at the data. An image folder counts as ImageNet.

    Raises:
        RecipeError: There are fewer images than a batch has.
    """
    count, batch_size = TRAINING_IMAGES[recipe.data.name] - (recipe.data.validation or 0), recipe.data.batch_size
    images = max(0, min(count, recipe.data.limit or count))
    if batch_size > images:
        raise RecipeError(
            f"{recipe.name}: data.batch_size must be at most the number of training images, {images}, but is "
            f"{batch_size}"
        )
    return images // batch_size
