"""Find the figures and pages that commands have drawn of runs.

A figure does not say which runs it shows. It is listed if one of the runs has the result that it is drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsam.errors import UserValueError
from sparsam.runs.results import result_file
from sparsam.runs.run import Run

SUFFIXES = (".html", ".png", ".svg")


@dataclass(frozen=True)
class Figure:
    """Files of one name in several formats. `own`: of one run, not of several side by side."""

    title: str
    files: tuple[Path, ...]
    own: bool = False


def find_figures(runs: Sequence[Run], page: Path, folder: Path | None = None) -> list[Figure]:
    """Return the figures of some runs.

    Args:
        runs: The runs.
        page: Where the page about them will be.
        folder: Where the figures are. Default: the first folder `analysis` that has any: beside the page, beside the
            runs, or one level above them, which is where the commands draw if runs are in runs/NAME.

    Raises:
        UserValueError: There is no such folder.
    """
    if folder is not None:
        if not folder.is_dir():
            raise UserValueError(f"figures must be a folder, but {folder} is not")
        return _figures(folder, runs)
    homes = [run.directory.resolve() for run in runs]
    shared = [place for place in homes[0].parents if all(place in home.parents for home in homes)]
    for place in (page.parent, *shared[:2]):
        if found := _figures(place / "analysis", runs):
            return found
    return []


def _figures(folder: Path, runs: Sequence[Run]) -> list[Figure]:
    names = [(name, title, False) for name, title, has in FIGURES if any(map(has, runs))]
    measured = dict.fromkeys(run.directory.resolve().name for run in runs if _has("gradients.json")(run))
    names += [(f"gradients-{run}", f"Gradients by layer: {run}", True) for run in measured]
    figures = []
    for name, title, own in names:
        files = tuple(file for suffix in SUFFIXES if (file := folder / f"{name}{suffix}").is_file())
        if files:
            figures.append(Figure(title, files, own))
    return figures


def _has(result: str) -> Callable[[Run], bool]:
    return lambda run: result_file(run.directory, result).is_file()


def _masked(run: Run) -> bool:
    return any(epoch.mask_density for epoch in run.metrics)


FIGURES: tuple[tuple[str, str, Callable[[Run], bool]], ...] = (
    ("landscape", "Loss around the weights, to turn and read off", _has("landscape.npz")),
    ("landscape-contour", "Loss over a plane through the weights", _has("landscape.npz")),
    ("landscape-surface", "Loss over the plane, as surfaces", _has("landscape.npz")),
    ("landscape-line", "Loss along a line through the weights", _has("landscape-line.npz")),
    ("hessian", "Eigenvalues of the Hessian", _has("hessian.json")),
    ("gradients", "How SAM’s gradients differ from SGD’s", _has("gradients.json")),
    ("masks", "Masks by layer, and how they move", _masked),
)
