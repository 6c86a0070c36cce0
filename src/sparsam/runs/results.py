"""Results of analyses of a run: small files in RUN/analysis, from which tables and figures are made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsam import __version__
from sparsam.errors import UserValueError
from sparsam.runs.directory import RunDirectory
from sparsam.runs.files import RunError, replace_file
from sparsam.runs.record import Record

SUFFIXES = (".json", ".npz")


def result_file(run: str | Path, name: str) -> Path:
    """Return where a result of a run is kept, such as RUN/analysis/hessian.json."""
    return Path(run) / "analysis" / name


def result_files(run: str | Path) -> list[Path]:
    """Return all results of a run, by name."""
    return sorted(file for file in (Path(run) / "analysis").glob("*.*") if file.suffix in SUFFIXES)


def write_result(run: str | Path, name: str, values: dict[str, Any]) -> Path:
    """Write plain values to RUN/analysis/NAME.json, with the versions that computed them.

    The file also says how many epochs the run has finished (:func:`outdated`). JSON has no infinity: a number that is
    not finite becomes null.
    """
    path = result_file(run, f"{name}.json")
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


def read_result(run: str | Path, name: str) -> dict[str, Any]:
    """Read what :func:`write_result` wrote. An error names the command that computes it."""
    path = result_file(run, f"{name}.json")
    if not path.is_file():
        raise RunError(f"there is no {path}; compute it with: sparsam {name} {run}")
    return Record.read(path).values


def check_shared(runs: Sequence[Path], results: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    """Refuse to compare results that were computed with different settings.

    A data set may have fewer samples than were asked for. Then what was asked for counts.
    """
    for run, result in zip(runs, results, strict=True):
        for key in keys:
            here, there = (r.get(f"{key}_asked", r.get(key)) for r in (result, results[0]))
            if here != there:
                raise UserValueError(
                    f"runs must have the same settings to be compared, but {key} is {there} for {runs[0]} and {here} "
                    f"for {run}"
                )


def outdated(run: str | Path, result: Mapping[str, Any]) -> str:
    """Return a warning if the run was continued after a result was computed, else an empty text."""
    now = len(RunDirectory(run).metrics())
    then = result.get("epochs", now)
    return f"{run} was measured after epoch {then}, but has {now} epochs now: measure it again" if then != now else ""
