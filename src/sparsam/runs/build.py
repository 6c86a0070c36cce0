"""From a recipe to what every user of a run needs: the data, the network, the loss."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from sparsam.data import WHOLE, Augmentation, FolderLoader, Loader, Part, ResidentLoader, load_cifar, load_digits
from sparsam.data.shapes import SHAPES, Images
from sparsam.models import build_model
from sparsam.runs.recipe import Recipe


def usual_images(recipe: Recipe) -> Images:
    """Return the shape of the images without looking at the data. A folder counts as ImageNet, in its own size."""
    images = SHAPES[recipe.data.name]
    return images if recipe.data.image_size is None else images._replace(size=recipe.data.image_size)


def build_network(recipe: Recipe, classes: int, channels: int, device: torch.device) -> nn.Module:
    """Build the network, where and as it will train.

    Args:
        recipe: What to build.
        classes: How many outputs it has.
        channels: How many its images have.
        device: Where it will train.
    """
    model = build_model(recipe.model.name, classes, channels=channels, stem=recipe.model.stem).to(device)
    if recipe.train.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if recipe.train.compile:
        _compile_blocks(model)
    return model


def _compile_blocks(model: nn.Module) -> None:
    """Compile each block by itself: a cut may lie between any two."""
    # Blocks of all widths, trained and evaluated, are versions of one function. torch keeps 8, and runs others as is.
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 64)
    for stage in model.children():
        for block in stage.children() if isinstance(stage, nn.Sequential) else [stage]:
            block.compile(dynamic=False)


def build_loader(recipe: Recipe, device: torch.device, part: Part = WHOLE) -> Loader:
    """Open the data; `part` is what this process gets of each batch."""
    build = _folder_loader if recipe.data.name == "imagefolder" else _resident_loader
    return build(recipe, device, part)


def _folder_loader(recipe: Recipe, device: torch.device, part: Part) -> Loader:
    settings: Any = recipe.data  # what has a meaning for a folder is not None
    return FolderLoader(
        settings.root,
        settings.batch_size,
        image_size=settings.image_size,
        resize=settings.resize,
        workers=settings.workers,
        validation=settings.validation or 0,
        validation_seed=settings.validation_seed,
        limit=settings.limit,
        skip_corrupt=settings.skip_corrupt,
        seed=recipe.train.seed,
        device=device,
        part=part,
    )


def _resident_loader(recipe: Recipe, device: torch.device, part: Part) -> Loader:
    settings: Any = recipe.data
    data = load_digits() if settings.name == "digits" else load_cifar(settings.name, settings.root)
    if settings.validation is not None:
        data = data.with_validation(settings.validation, settings.validation_seed)
    if settings.limit is not None:
        data = data.limited(settings.limit)
    augmentation = Augmentation(settings.crop_padding, settings.flip, settings.cutout, settings.cutout_probability)
    return ResidentLoader(data, settings.batch_size, augmentation, seed=recipe.train.seed, device=device, part=part)


def build_loss(recipe: Recipe) -> Any:
    """Return the training loss."""
    return functools.partial(F.cross_entropy, label_smoothing=recipe.train.label_smoothing)
