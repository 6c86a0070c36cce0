"""The runs of a table that are there already: `--only` says what is trained, and the table shows these beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from glob import escape
from pathlib import Path

from sparsam.reproduce.experiments import Experiment, Row
from sparsam.runs.directory import RunDirectory
from sparsam.runs.run import Run, read_run
from sparsam.runs.same import different_settings
from sparsam.runs.schema import RecipeError


def with_earlier_rows(experiment: Experiment, output: Path, overrides: Sequence[str]) -> Experiment:
    """Return a table with the rows that were chosen and those that have finished runs.

    A figure is returned as it is: further runs would have to be measured for it.

    Args:
        experiment: A table or a figure.
        output: Where the runs are, as NAME-seedN.
        overrides: `key=value` that the chosen rows are trained with.
    """
    if experiment.shows is not None:
        return experiment
    changed = {override.partition("=")[0] for override in overrides}

    def is_shown(row: Row) -> bool:
        own = {override.partition("=")[0] for override in row.overrides}
        return row in experiment.rows or bool(own.isdisjoint(changed) and _finished(row, output, overrides))

    return replace(experiment, rows=tuple(filter(is_shown, experiment.whole or experiment.rows)))


def read_finished(experiments: Sequence[Experiment], output: Path, overrides: Sequence[str]) -> list[Run]:
    """Read the finished runs of all rows, whatever their seeds."""
    rows = (row for experiment in experiments for row in experiment.rows)
    paths = dict.fromkeys(path for row in rows for path in _finished(row, output, overrides))
    return [read_run(path) for path in paths]


def _finished(row: Row, output: Path, overrides: Sequence[str]) -> list[Path]:
    try:
        recipe = row.recipe(overrides)
    except RecipeError:  # what the chosen rows are trained with need not suit this one
        return []
    runs = (RunDirectory(path) for path in sorted(output.glob(f"{escape(recipe.name)}-seed*")))
    settings = recipe.to_dict()
    return [
        run.path for run in runs if run.finished and not different_settings(settings, run.read("recipe.json").values)
    ]
