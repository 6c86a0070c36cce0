"""The results in RUN/analysis, each in a few numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparsam.analysis.landscape import Landscape
from sparsam.report.table import NONE
from sparsam.runs.record import Record
from sparsam.runs.results import result_files


@dataclass(frozen=True)
class Result:
    """A file, and its most important numbers. A file that is not from a command of sparsam has none."""

    file: Path
    numbers: dict[str, str]


def read_results(run: Path) -> list[Result]:
    """Return the results of a run, by the name of the file.

    Raises:
        RunError: A file cannot be read, or lacks a number.
    """
    return [Result(file, READERS[file.name](file) if file.name in READERS else {}) for file in result_files(run)]


def _sharpness(file: Path) -> dict[str, str]:
    found = Record.read(file)
    return {
        f"loss rise, ρ = {found.number('rho'):g}": _shown(found.optional("worst_case")),
        "λ1": _shown(found.optional("lambda1")),
        **_images(found.values.get("samples")),
        **_of_the_best(found.values.get("weights")),
    }


def _shown(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def _hessian(file: Path) -> dict[str, str]:
    found = Record.read(file)
    values, ratio, error = found.numbers("eigenvalues"), found.optional("ratio"), found.optional("trace_error")
    return {
        "λ1": f"{values[0]:.4g}",
        "λ5": f"{values[4]:.4g}" if len(values) > 4 else NONE,
        "λ1/λ5": NONE if ratio is None else f"{ratio:.2f}",
        "trace": f"{found.number('trace'):.4g}" + ("" if error is None else f" ± {error:.2g}"),
        **({} if found.flag("converged") else {"converged": "no"}),
        **_images(found.values.get("samples")),
        **_of_the_best(found.values.get("weights")),
    }


def _gradients(file: Path) -> dict[str, str]:
    found = Record.read(file)
    below = found.number("below_zero.")  # the layers' shares have names, that of all weights has none
    share = {f"weights with r < 0, ρ = {found.number('rho'):g}": f"{100 * below:.1f} %"}
    return {**share, **_images(found.values.get("samples")), **_of_the_best(found.values.get("weights"))}


def _landscape(file: Path) -> dict[str, str]:
    found = Landscape.load(file)
    # The median of a part of the grid does not compare with others.
    whole = found.complete and math.isfinite(found.median)
    return {
        "loss at w": f"{found.centre:.4g}",
        "median": f"{found.median:.4g}" if whole else NONE,
        **({} if found.complete else {"points": f"{found.finished} of {found.losses.size}"}),
        "within": f"± {found.settings['range']:g}",
        **_images(found.settings.get("samples")),
        **_of_the_best(found.about.get("weights")),
    }


def _images(samples: object) -> dict[str, str]:
    """Say how many images a number is measured over: numbers over other images do not compare."""
    return {"images": f"{samples:,}"} if isinstance(samples, int) else {}


def _of_the_best(weights: object) -> dict[str, str]:
    """Say so if the weights are not those of the last epoch."""
    return {"weights": "of the best epoch"} if weights == "best" else {}


READERS: dict[str, Callable[[Path], dict[str, str]]] = {
    "sharpness.json": _sharpness,
    "hessian.json": _hessian,
    "gradients.json": _gradients,
    "landscape.npz": _landscape,
    "landscape-line.npz": _landscape,
}
