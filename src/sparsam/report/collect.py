"""Group run directories by method. Runs of one recipe are seeds of one method."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from sparsam.errors import UserValueError
from sparsam.report.method import Method
from sparsam.report.styles import place
from sparsam.runs.record import Record
from sparsam.runs.results import result_file
from sparsam.runs.run import Run, read_run
from sparsam.runs.same import PLACE, SEEDS, different_settings, settings_of
from sparsam.runs.schema import written

NOT_IN_ROWS = frozenset({"name", *SEEDS, *PLACE})  # precision and the like make rows of their own: rows have times
ABOUT = re.compile(r" \(\d+ images.*\)$")  # what a column of sharpness was measured over


def collect(directories: Iterable[Path]) -> list[Method]:
    """Read run directories and group them by method.

    Raises:
        RunError: A run cannot be read.
        UserValueError: There is no run.
    """
    runs = [read_run(directory) for directory in {Path(d).resolve(): Path(d) for d in directories}.values()]
    if not runs:
        raise UserValueError("there is no run to compare: give at least one run directory")
    return group_runs(_short_labels([_with_sharpness(run) for run in runs]))


def group_runs(runs: Iterable[Run], ignored: Collection[str] = NOT_IN_ROWS) -> list[Method]:
    """Group runs by name and recipe, in the order of :data:`sparsam.report.styles.METHODS`.

    Step times that were not taken in turn are relative to the first method without SAM that has the same network, data,
    batch size, image size, base optimizer, way to compute and device. Where there is none, `relative_step` is None.

    Args:
        runs: Of any kind.
        ignored: Settings in which the runs of one method may differ.
    """
    groups: dict[object, list[Run]] = {}
    for run in runs:
        groups.setdefault((run.name, settings_of(run.recipe, ignored)), []).append(run)
    methods = []
    for group in groups.values():
        method = next((run for run in group if run.finished), group[0]).method
        methods.append(Method(group[0].name, method, method, tuple(sorted(group, key=lambda run: run.seed))))
    methods.sort(key=lambda m: place(m.method))
    methods = [replace(m, label=_label(m, [o for o in methods if o.method == m.method], ignored)) for m in methods]
    return [replace(method, relative_step=_relative_step(method, methods)) for method in methods]


def _label(method: Method, alike: Sequence[Method], ignored: Collection[str]) -> str:
    """Return what a row is called: the method, the recipe's name if rows differ in it, and what else tells them apart.

    Args:
        method: What the row is about.
        alike: All rows of that method.
        ignored: Settings in which its own runs may differ.
    """
    own = [method.name] if len({other.name for other in alike}) > 1 else []
    recipes = [other.runs[0].recipe for other in alike if other.name == method.name]
    changed, at = different_settings(*recipes, ignored=ignored), recipes.index(method.runs[0].recipe)
    own += [f"{key}={written(values[at])}" for key, values in changed.items()]
    return f"{method.method} ({', '.join(own)})" if own else method.method


def _relative_step(method: Method, methods: Sequence[Method]) -> float | None:
    if method.step_ratio:
        return method.step_ratio.median
    for reference in methods:
        if not reference.sam and reference.runs[0].workload == method.runs[0].workload:
            own, plain = method.step_ms, reference.step_ms
            return own / plain if own and plain else None
    return None


def _with_sharpness(run: Run) -> Run:
    """Return a run with what `sparsam sharpness` measured after its last epoch, as further columns."""
    file, epochs = result_file(run.directory, "sharpness.json"), len(run.metrics)
    if not run.finished or not file.is_file():
        return run
    measured = Record.read(file)
    if measured.values.get("epochs", epochs) != epochs:
        return run
    best = ", best epoch" if measured.values.get("weights") == "best" else ""
    rise, about = f"Loss rise, ρ = {measured.number('rho'):g}", f" ({measured.whole('samples')} images{best})"
    found = {rise + about: measured.optional("worst_case"), f"λ1{about}": measured.optional("lambda1")}
    return replace(run, extra={**run.extra, **{label: value for label, value in found.items() if value is not None}})


def _short_labels(runs: list[Run]) -> list[Run]:
    """Leave the number of images out of labels if it is the same for all runs."""
    about = {match.group() for run in runs for label in run.extra if (match := ABOUT.search(label))}
    if len(about) != 1 or "best" in (suffix := about.pop()):
        return runs
    return [
        replace(run, extra={label.removesuffix(suffix): value for label, value in run.extra.items()}) for run in runs
    ]
