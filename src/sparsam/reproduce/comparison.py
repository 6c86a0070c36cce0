"""Results beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sparsam.report.collect import group_runs
from sparsam.report.method import Method
from sparsam.reproduce.experiments import Experiment, Row
from sparsam.runs.recipe import Recipe
from sparsam.runs.run import Run, read_run
from sparsam.runs.same import different_settings

EPOCHS = "train.epochs"


@dataclass(frozen=True)
class Result:
    """A row and what was found for it."""

    row: Row
    recipe: Recipe
    method: Method | None
    """The finished runs; None: there is none."""

    @property
    def difference(self) -> float | None:
        """Our accuracy minus the paper's, in percent."""
        accuracy = self.method.accuracy if self.method else None
        return None if accuracy is None or self.row.paper is None else 100 * accuracy.mean - self.row.paper


def find_runs(folder: Path) -> list[Run]:
    """Read all finished runs in a folder and its sub-folders."""
    directories = sorted(file.parent for file in folder.rglob("recipe.json"))
    return [read_run(path) for path in directories if (path / "summary.json").is_file()]


def compare(experiment: Experiment, runs: Sequence[Run], overrides: Iterable[str] = ()) -> list[Result]:
    """Find the runs of each row by their settings.

    Args:
        experiment: A table or a figure.
        runs: Finished runs of any kind.
        overrides: `key=value` of a scaled-down reproduction.
    """
    overrides = list(overrides)
    wanted = [(row, row.recipe(overrides)) for row in experiment.rows]
    found = [
        replace(run, name=recipe.name)
        for recipe in {recipe.name: recipe for _, recipe in wanted}.values()
        for run in runs
        if not different_settings(recipe.to_dict(), run.recipe)
    ]
    methods = {method.name: method for method in group_runs(found)}
    return [Result(row, recipe, methods.get(recipe.name)) for row, recipe in wanted]


def other_epochs(experiment: Experiment, runs: Sequence[Run]) -> Iterator[int]:
    """Yield the numbers of epochs, the largest first, of runs that are shorter or longer than the paper's."""
    recipes = [row.recipe().to_dict() for row in experiment.rows]
    found = {
        epochs[1]
        for run in runs
        for recipe in recipes
        if (changed := different_settings(recipe, run.recipe)).keys() == {EPOCHS}
        for epochs in changed.values()
    }
    yield from sorted(found, reverse=True)
