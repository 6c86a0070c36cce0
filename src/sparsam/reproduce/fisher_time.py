"""How long the Fisher information takes that a mask of SSAM-F is made from: the times of the paper's Table 8."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
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

REPEATS = 3  # after one that is not counted


def add_fisher_times(runs: Iterable[Path], device: torch.device) -> None:
    """Measure the time for the masks of runs of SSAM-F that lack it, and write it into their summaries.

    It is the median of three, over newly drawn images, and does not depend on the weights.
    """
    for path in runs:
        directory = RunDirectory(path)
        summary = directory.summary()
        if FISHER_SECONDS not in summary["extra"]:
            seconds = fisher_seconds(directory, device)
            directory.write_summary({**summary, "extra": {**summary["extra"], FISHER_SECONDS: seconds}})


def fisher_seconds(directory: RunDirectory, device: torch.device) -> float:
    """Return the seconds that the Fisher information of a run's mask takes, once its images are on the device."""
    recipe = directory.recipe()
    loader = build_loader(recipe, device)
    model = build_network(recipe, loader.classes, loader.channels, device)
    images: Any = loader.samples()
    clock = Clock(device)

    def seconds(repeat: int) -> float:
        chosen = torch.randperm(len(images), generator=random_generator(repeat))[: recipe.mask.samples].tolist()
        inputs, targets = (part.to(device) for part in default_collate([images[i] for i in chosen]))
        return clock.time(lambda: diagonal_fisher(model, F.cross_entropy, inputs, targets, method="signs"))

    return median([seconds(repeat) for repeat in range(REPEATS + 1)][1:])
