"""Accuracy against sparsity, ours beside the paper's, a panel for each network and data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sparsam.report.method import Statistic
from sparsam.report.plotting import new_figure, save_figure
from sparsam.report.styles import style

PLACES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99)  # side by side: the high sparsities lie too close for a true axis


class Point(NamedTuple):
    """One accuracy of the paper, in percent, and ours, as a fraction. Sparsity None: SGD."""

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
        for method in dict.fromkeys(point.method for point in points):
            _draw_method(ax, method, [point for point in points if point.method == method])
        ax.set(title=title, xlabel="sparsity", ylabel="accuracy, %")
        ax.set_xticks(range(len(PLACES)), [f"{place:g}" for place in PLACES])
        ax.legend(frameon=False, fontsize=7)
    return save_figure(figure, path)


def _draw_method(ax: object, method: str, points: Sequence[Point]) -> None:
    look = style(method).line
    paper = [(point.sparsity, point.paper) for point in points if point.paper is not None]
    ours = [(point.sparsity, 100 * point.ours.mean) for point in points if point.ours is not None]
    for values, label, width in ((paper, f"{method}, paper", 0.9), (ours, method, 1.8)):
        if len(points) == 1 and values:  # SGD and SAM have no sparsity to vary
            ax.axhline(values[0][1], label=label, linewidth=width, **look)  # type: ignore[attr-defined]
        elif values:
            places = [PLACES.index(sparsity) for sparsity, _ in values if sparsity is not None]
            heights = [accuracy for _, accuracy in values]
            ax.plot(places, heights, marker="o", markersize=3 * width, label=label, linewidth=width, **look)  # type: ignore[attr-defined]
