"""The times in the tables: of a step, and of the Fisher information that a mask of SSAM-F is made from (Table 8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import default_collate

from sparsam.fisher import diagonal_fisher
from sparsam.randomness import random_generator
from sparsam.replay.clock import Clock
from sparsam.reproduce.experiments import Experiment
from sparsam.reproduce.table import FISHER_SECONDS
from sparsam.runs.build import build_loader, build_network
from sparsam.runs.directory import RunDirectory
from sparsam.runs.recipe import Recipe
from sparsam.training.environment import device_name
from sparsam.training.planned import PlannedRun
from sparsam.training.turns import time_steps

AT_ONCE = 4  # methods whose steps are timed in turn; each has a network of its own in memory
REPEATS = 3  # after one that is not counted


def measure_times(
    experiments: Sequence[Experiment],
    finished: Sequence[PlannedRun],
    overrides: Sequence[str],
    *,
    device: torch.device,
    rounds: int,
) -> list[str]:
    """Measure the times that finished runs lack. Runs of other devices are left out; return these devices.

    Args:
        experiments: Tables and figures.
        finished: Their runs.
        overrides: What the runs were trained with.
        device: Where.
        rounds: How often each method takes a step (:func:`~sparsam.training.turns.time_steps`); 0: steps are not timed.
    """
    places = {run.path: RunDirectory(run.path).read("environment.json").values["device"] for run in finished}
    here = [run for run in finished if places[run.path] == device_name(device)]
    rows = [row for experiment in experiments for row in experiment.rows if row.seconds is not None]
    timed = {row.recipe(overrides).name for row in rows}
    add_fisher_times([run for run in here if run.recipe.name in timed], device)
    methods: dict[str, list[PlannedRun]] = {}
    for run in here:
        methods.setdefault(run.recipe.name, []).append(run)
    groups = list(methods.values()) if rounds else []
    for start in range(0, len(groups), AT_ONCE):
        time_steps([run for group in groups[start : start + AT_ONCE] for run in group], device=device, rounds=rounds)
    return sorted(set(places.values()) - {device_name(device)})


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
