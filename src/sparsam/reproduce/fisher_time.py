"""How long the Fisher information takes that a mask of SSAM-F is made from: the times of the paper's Table 8."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import default_collate

from sparsam.fisher import diagonal_fisher
from sparsam.randomness import random_generator
from sparsam.replay.clock import Clock
from sparsam.reproduce.table import FISHER_SECONDS
from sparsam.runs.build import build_loader, build_network
from sparsam.runs.directory import RunDirectory
from sparsam.runs.recipe import Recipe
from sparsam.training.turns import PlannedRun

REPEATS = 3  # after one that is not counted


def add_fisher_times(planned: Iterable[PlannedRun], device: torch.device) -> None:
    """Measure the time for the masks of finished runs of SSAM-F that lack it, and write it into their summaries.

    It is the median of three, over newly drawn images. It does not depend on the weights, so seeds share it.
    """
    seconds: dict[str, float] = {}
    for recipe, path in planned:
        directory = RunDirectory(path)
        if FISHER_SECONDS not in directory.summary()["extra"]:
            if recipe.name not in seconds:
                seconds[recipe.name] = fisher_seconds(recipe, device)
            directory.add_to_summary({"extra": {FISHER_SECONDS: seconds[recipe.name]}})


def fisher_seconds(recipe: Recipe, device: torch.device) -> float:
    """Return the seconds that the Fisher information of a mask takes, once its images are on the device."""
    loader = build_loader(recipe, device)
    model = build_network(recipe, loader.classes, loader.channels, device)
    images: Any = loader.samples()
    clock = Clock(device)

    def seconds(repeat: int) -> float:
        chosen = torch.randperm(len(images), generator=random_generator(repeat))[: recipe.mask.samples].tolist()
        inputs, targets = (part.to(device) for part in default_collate([images[i] for i in chosen]))
        return clock.time(lambda: diagonal_fisher(model, F.cross_entropy, inputs, targets, method="signs"))

    return median([seconds(repeat) for repeat in range(REPEATS + 1)][1:])
