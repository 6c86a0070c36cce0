"""From rows to runs: a run for each recipe and seed, however many tables have it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparsam.reproduce.experiments import Experiment
from sparsam.runs.run import Run
from sparsam.runs.same import settings_of
from sparsam.runs.schema import RecipeError
from sparsam.training.comparison import check_used, with_seeds
from sparsam.training.planned import PlannedRun


def plan_runs(
    experiments: Sequence[Experiment], seeds: int, output: Path, overrides: Sequence[str] = ()
) -> list[PlannedRun]:
    """Return the runs that tables and figures need.

    Args:
        experiments: Tables and figures.
        seeds: How many runs of each row, with seeds 0, 1, ...
        output: Where they are written, as NAME-seedN.
        overrides: `key=value`, for all rows that they have a meaning for.
    """
    planned: dict[Path, PlannedRun] = {}
    rows = [row for experiment in experiments for row in experiment.rows]
    check_used(overrides, {override for row in rows for override in row.relevant(overrides)})
    own = {override.partition("=")[0] for row in rows for override in row.overrides}
    for key in (override.partition("=")[0] for override in overrides):
        if key in own:
            raise RecipeError(f"{key} is what rows differ in; choose rows with --only in place of --set {key}")
    for row in rows:
        for run in with_seeds(row.recipe(overrides), seeds, output):
            if planned.setdefault(run.path, run) != run:
                raise RecipeError(f"two rows are both named {row.name}, but their recipes differ")
    return list(planned.values())


def without_known(planned: Sequence[PlannedRun], known: Sequence[Run]) -> tuple[list[PlannedRun], list[Run]]:
    """Return the runs that are still to be trained, and the known ones that stand for the rest.

    Args:
        planned: What tables need.
        known: Finished runs of any kind.
    """
    missing, found = [], []
    finished = {(run.seed, settings_of(run.recipe)): run for run in reversed(known)}  # the first of each counts
    for run in planned:
        other = finished.get((run.recipe.train.seed, settings_of(run.recipe.to_dict())))
        if other is None:
            missing.append(run)
        else:
            found.append(other)
    return missing, found


def part_of(planned: Sequence[PlannedRun], part: str | None) -> list[PlannedRun]:
    """Return every n-th run, so that n jobs have all of them between each other.

    Args:
        planned: All runs.
        part: K/N, with K from 0 to N - 1; None: all runs.
    """
    if part is None:
        return list(planned)
    k, slash, n = part.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and int(k) < int(n)):
        raise RecipeError(f"--part must be K/N with K from 0 to N - 1, such as 0/4, but is {part!r}")
    if int(k) >= len(planned):
        raise RecipeError(f"--part {part} has no run: there are {len(planned)} in all")
    return list(planned[int(k) :: int(n)])
