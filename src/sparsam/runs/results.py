"""Where results about a run are kept: small files in RUN/analysis, from which tables and figures are made again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsam import __version__
from sparsam.errors import UserValueError
from sparsam.runs.directory import RunDirectory, replace_file


def write_result(run: str | Path, name: str, values: dict[str, Any]) -> Path:
    """Write plain values, with the versions that made them, to RUN/analysis/NAME.json, whole or not at all.

    With them goes how many epochs the run has finished (:func:`outdated`). JSON has no infinity: a number that is not
    finite is null in the file.
    """
    path = Path(run) / "analysis" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    versions = {"sparsam": __version__, "torch": torch.__version__}
    about = {"epochs": len(RunDirectory(run).metrics()), "versions": versions}
    replace_file(path, json.dumps(_finite({**values, **about}), indent=1) + "\n")
    return path


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_shared(runs: Sequence[Path], results: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    """Refuse results of different settings, which do not compare; there may be fewer samples than were asked for."""
    for run, result in zip(runs, results, strict=True):
        for key in keys:
            here, there = (r.get(f"{key}_asked", r.get(key)) for r in (result, results[0]))
            if here != there:
                raise UserValueError(
                    f"runs must have the same settings to stand side by side, but {key} is {there} for {runs[0]} and "
                    f"{here} for {run}"
                )


def read_result(run: str | Path, name: str) -> dict[str, Any]:
    """Read what :func:`write_result` wrote; an error says which command makes it."""
    path = Path(run) / "analysis" / f"{name}.json"
    if not path.is_file():
        raise UserValueError(f"there is no {path}; make it with: sparsam {name} {run}")
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise UserValueError(f"{path} cannot be read: {error}; make it anew with: sparsam {name} {run}") from error
    return values


def outdated(run: str | Path, result: Mapping[str, Any]) -> str:
    """Return what to say of a result from before the run was continued; nothing where there is nothing to say."""
    now = len(RunDirectory(run).metrics())
    then = result.get("epochs", now)
    return f"{run} was measured after epoch {then} and has {now} by now: measure it again" if then != now else ""
