"""Results beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from sparsam.errors import need
from sparsam.report.collect import group_runs
from sparsam.report.method import Method, Statistic
from sparsam.reproduce.experiments import Experiment, Row
from sparsam.runs.directory import RunDirectory, directories_in
from sparsam.runs.recipe import Recipe
from sparsam.runs.run import Run, read_run
from sparsam.runs.same import INCIDENTAL, settings_of

EPOCHS = "train.epochs"
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """A mean accuracy minus another, in percent, with the interval that holds the true one with 95 % confidence."""

    value: float
    interval: tuple[float, float] | None
    """By Welch's t-test; None where a side has a single run, or no side varies."""

    @classmethod
    def of(cls, ours: Sequence[float], others: Sequence[float]) -> Difference:
        """Return the difference of two samples of accuracies, which are fractions.

        >>> Difference.of([0.5, 1.0], [0.5])
        Difference(value=25.0, interval=None)
        """
        value = 100 * (fmean(ours) - fmean(others))
        if min(len(ours), len(others)) < 2:
            return cls(value, None)
        sides = [(variance(side) / len(side), len(side)) for side in (ours, others)]
        error = sum(square for square, _ in sides)  # squared, of the difference
        if error == 0:
            return cls(value, None)
        stats = need("scipy.stats", "intervals of differences", extra="train")
        freedom = error**2 / sum(square**2 / (n - 1) for square, n in sides)  # Welch and Satterthwaite
        half = 100 * float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error**0.5
        return cls(value, (value - half, value + half))


@dataclass(frozen=True)
class Result:
    """A row and what was found for it."""

    row: Row
    recipe: Recipe
    method: Method | None
    """The finished runs; None: there is none."""
    other: Method | None = None
    """The finished runs that they are set against; None: there are none, or they are these."""

    @property
    def accuracy(self) -> Statistic | None:
        """Our accuracy, as a fraction."""
        return self.method.accuracy if self.method else None

    @property
    def train_loss(self) -> Statistic | None:
        """Our training loss."""
        return self.method.train_loss if self.method else None

    @property
    def difference(self) -> float | None:
        """Our accuracy minus the paper's, in percent; None if it is not that of the test images."""
        if self.accuracy is None or self.row.paper is None or self.recipe.evaluated_on != "test":
            return None
        return 100 * self.accuracy.mean - self.row.paper

    @property
    def advantage(self) -> Difference | None:
        """Our accuracy minus that of the row that the table is set against."""
        if self.method is None or self.other is None:
            return None
        ours, others = ([run.accuracy for run in method.counted] for method in (self.method, self.other))
        return Difference.of([a for a in ours if a is not None], [a for a in others if a is not None])

    @property
    def flops(self) -> float | None:
        """The theoretical cost relative to SGD: of our runs, else the paper's."""
        found = self.method.theoretical_flops if self.method else None
        return found.mean if found else self.row.flops

    @property
    def time(self) -> float | None:
        """What a step takes in steps of SGD, where the two were timed in turn."""
        ratio = self.method.step_ratio if self.method else None
        return ratio.median if ratio else None

    def further(self, label: str) -> float | None:
        """Return a further number of our runs."""
        found = self.method.extra.get(label) if self.method else None
        return found.mean if found else None


def find_runs(folder: Path) -> list[Run]:
    """Read all finished runs in a folder and its sub-folders."""
    return [read_run(path) for path in directories_in(folder) if RunDirectory(path).finished]


def compare(experiment: Experiment, runs: Sequence[Run], overrides: Iterable[str] = ()) -> list[Result]:
    """Find the runs of each row by their settings.

    Args:
        experiment: A table or a figure.
        runs: Finished runs of any kind. The first of each seed counts.
        overrides: `key=value` of a scaled-down reproduction.
    """
    overrides = list(overrides)
    wanted = [(row, row.recipe(overrides)) for row in experiment.rows]
    against = experiment.against and experiment.against.recipe(overrides)
    recipes = {recipe.name: recipe for recipe in (*(recipe for _, recipe in wanted), against) if recipe}
    found: dict[tuple[str, int], Run] = {}  # a seed counts once
    settings = [settings_of(run.recipe) for run in runs]
    for recipe in recipes.values():
        own = settings_of(recipe.to_dict())
        for run, other in zip(runs, settings, strict=True):
            if own == other:
                found.setdefault((recipe.name, run.seed), replace(run, name=recipe.name))
    methods = {method.name: method for method in group_runs(found.values(), INCIDENTAL)}
    others = {name: methods.get(against.name) for name in recipes if name != against.name} if against else {}
    return [Result(row, recipe, methods.get(recipe.name), others.get(recipe.name)) for row, recipe in wanted]


def other_epochs(experiment: Experiment, runs: Sequence[Run], overrides: Iterable[str] = ()) -> Iterator[int]:
    """Yield the numbers of epochs, the largest first, of runs that differ from the rows in nothing else."""
    overrides = list(overrides)
    ignored = INCIDENTAL | {EPOCHS}
    rows: dict[frozenset[tuple[str, Any]], set[int]] = {}
    for row in experiment.rows:
        recipe = row.recipe(overrides)
        rows.setdefault(settings_of(recipe.to_dict(), ignored), set()).add(recipe.train.epochs)
    found = {
        run.recipe["train"]["epochs"]
        for run in runs
        if rows.get(settings_of(run.recipe, ignored), set()) - {run.recipe["train"]["epochs"]}
    }
    yield from sorted(found, reverse=True)
