"""Accuracy against sparsity, ours beside the paper's, a panel for each network and data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sparsam.report.method import Statistic
from sparsam.report.plotting import new_figure, save_figure
from sparsam.report.styles import style


class Point(NamedTuple):
    """One accuracy of the paper, in percent, and ours, as a fraction. Sparsity None: SGD or SAM."""

    method: str
    sparsity: float | None
    paper: float | None
    ours: Statistic | None


def draw_sparsity(panels: Mapping[str, Sequence[Point]], path: Path) -> list[Path]:
    """Draw a panel for each title: lines for sparse methods, SGD and SAM across the whole width.

    Args:
        panels: The points by title.
        path: Where to, without a suffix.
    """
    figure, axes = new_figure(4.6 * len(panels), 3.8, ncols=len(panels), squeeze=False)
    for ax, (title, points) in zip(axes[0], panels.items(), strict=True):
        # side by side: high sparsities lie too close for a true axis
        places = sorted({point.sparsity for point in points if point.sparsity is not None})
        for method in dict.fromkeys(point.method for point in points):
            _draw_method(ax, method, [point for point in points if point.method == method], places)
        ax.set(title=title, xlabel="sparsity", ylabel="accuracy, %")
        ax.set_xticks(range(len(places)), [f"{place:g}" for place in places])
        ax.legend(frameon=False, fontsize=7)
    return save_figure(figure, path)


def _draw_method(ax: Any, method: str, points: Sequence[Point], places: Sequence[float]) -> None:
    look = style(method).line
    for label, width in ((f"{method}, paper", 0.9), (method, 1.8)):
        of_paper = label != method
        found = [(p.sparsity, p.paper if of_paper else p.ours and 100 * p.ours.mean) for p in points]
        heights = [accuracy for sparsity, accuracy in found if accuracy is not None and sparsity is not None]
        lines = [accuracy for sparsity, accuracy in found if accuracy is not None and sparsity is None]
        for i, height in enumerate(lines):  # SGD and SAM have no sparsity
            ax.axhline(height, label=None if i else label, linewidth=width, **look)
        if heights:
            at = [places.index(s) for s, accuracy in found if accuracy is not None and s is not None]
            ax.plot(at, heights, marker="o", markersize=3 * width, label=label, linewidth=width, **look)
