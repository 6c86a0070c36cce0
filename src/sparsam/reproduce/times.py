"""The times in the tables: of a step, and of the Fisher information that a mask of SSAM-F is made from (Table 8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import default_collate

from sparsam.errors import UserValueError
from sparsam.fisher import diagonal_fisher
from sparsam.randomness import random_generator
from sparsam.reproduce.comparison import compare
from sparsam.reproduce.experiments import Experiment
from sparsam.reproduce.table import FISHER_SECONDS
from sparsam.runs.build import build_loader, build_network
from sparsam.runs.directory import RunDirectory
from sparsam.runs.recipe import Recipe
from sparsam.runs.run import Run
from sparsam.runs.same import INCIDENTAL, different_settings
from sparsam.step_cost import Clock
from sparsam.training.environment import device_name, measured_with
from sparsam.training.planned import PlannedRun
from sparsam.training.turns import time_steps, without_seed

AT_ONCE = 4  # methods whose steps are timed in turn; each has a network of its own in memory
REPEATS = 3  # after one that is not counted
OF_THE_DATA = ("data.root", "data.workers")  # settings that may differ from those of a run whose steps are timed


def measure_times(
    experiments: Sequence[Experiment],
    finished: Sequence[PlannedRun],
    overrides: Sequence[str],
    *,
    device: torch.device,
    rounds: int,
) -> list[str]:
    """Measure the times that finished runs lack. Runs of other devices are left out; return these devices.

    All seeds of a method share its times. So if one seed lacks them, they are measured anew for all.

    Args:
        experiments: Tables and figures.
        finished: Their runs.
        overrides: `key=value` of a scaled-down reproduction.
        device: Where.
        rounds: How often each method takes a step (:func:`~sparsam.training.turns.time_steps`); 0: steps are not timed.
    """
    about = measured_with(device)
    places = {run.path: RunDirectory(run.path).read("environment.json").values["device"] for run in finished}
    here = [run for run in finished if places[run.path] == device_name(device)]
    rows = [row for experiment in experiments for row in experiment.rows if row.seconds is not None]
    timed = {recipe.name: recipe.to_dict() for recipe in (row.recipe(overrides) for row in rows)}
    add_fisher_times(
        [run for run in here if any(not different_settings(r, run.recipe.to_dict()) for r in timed.values())],
        device,
        about,
    )
    methods: dict[Recipe, list[PlannedRun]] = {}
    for run in here:
        methods.setdefault(without_seed(run.recipe), []).append(run)
    groups = [runs for runs in methods.values() if any("step_ratio" not in _summary(run) for run in runs)]
    for start in range(0, len(groups) if rounds else 0, AT_ONCE):
        runs = [run for group in groups[start : start + AT_ONCE] for run in group]
        time_steps(runs, device=device, rounds=rounds, about=about)
    return sorted(set(places.values()) - {device_name(device)})


def runs_to_time(experiments: Sequence[Experiment], runs: Sequence[Run], overrides: Sequence[str]) -> list[PlannedRun]:
    """Return the runs that tables and figures show, with the recipes that their steps are timed by.

    These are the runs' own: precision and the like are as they were. Only the data may lie elsewhere now.

    Args:
        experiments: Tables and figures.
        runs: Finished runs of any kind.
        overrides: `key=value` of a scaled-down reproduction, and :data:`OF_THE_DATA`.

    Raises:
        UserValueError: An override neither chooses runs nor says where the data is.
    """
    moved = [key for key in (override.partition("=")[0] for override in overrides) if key in INCIDENTAL]
    for key in moved:
        if key not in OF_THE_DATA:
            raise UserValueError(
                f"steps are timed as the runs took them, so --set must choose runs or be one of "
                f"{', '.join(OF_THE_DATA)}, but is {key}"
            )
    planned: dict[Path, PlannedRun] = {}
    for result in (result for experiment in experiments for result in compare(experiment, runs, overrides)):
        for run in result.method.runs if result.method else ():
            own = RunDirectory(run.directory).recipe()
            data = {key: getattr(result.recipe.data, key) for key in (key.partition(".")[2] for key in moved)}
            recipe = replace(own, name=result.recipe.name, data=replace(own.data, **data))
            planned.setdefault(run.directory, PlannedRun(recipe, run.directory))
    return list(planned.values())


def _summary(run: PlannedRun) -> dict[str, Any]:
    return RunDirectory(run.path).summary()


def add_fisher_times(planned: Iterable[PlannedRun], device: torch.device, about: dict[str, str | None]) -> None:
    """Measure the time for the masks of finished runs of SSAM-F that lack it, and write it into their summaries.

    It is the median of three, over newly drawn images. It does not depend on the weights, so seeds share it.
    """
    seconds: dict[str, float] = {}
    for recipe, path in planned:
        directory = RunDirectory(path)
        if FISHER_SECONDS not in directory.summary()["extra"]:
            if recipe.name not in seconds:
                seconds[recipe.name] = fisher_seconds(recipe, device)
            found = {"extra": {FISHER_SECONDS: seconds[recipe.name]}, "measured": {FISHER_SECONDS: about}}
            directory.add_to_summary(found)


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
