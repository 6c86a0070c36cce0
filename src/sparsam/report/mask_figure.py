"""Which layers a mask perturbs, and how the mask changes from epoch to epoch, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparsam.errors import UserValueError
from sparsam.report.plotting import new_figure, save_figure
from sparsam.report.styles import style

FEW = 50  # epochs; dots of more would hide the dashes
KEPT = {"mask_kept": "the epoch before", "mask_kept_since_start": "the first epoch"}


class RunMasks(NamedTuple):
    """The masks of one run: its label, its method and the metrics of its epochs."""

    label: str
    method: str
    metrics: list[dict[str, Any]]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The metrics of the epochs that have a mask."""
        return [m for m in self.metrics if m["mask_density"]]


def draw_masks(runs: Sequence[RunMasks], path: Path) -> list[Path]:
    """Draw for each run the share of perturbed weights by layer and epoch, and below it how much of the mask is kept.

    Args:
        runs: The runs.
        path: Where to, without a suffix.
    """
    empty = [run.label for run in runs if not run.epochs]
    if empty:
        reason = "it does not use SAM, or has no finished epoch"
        raise UserValueError(f"a run must have a mask to draw, but {', '.join(empty)} has none: {reason}")
    figure, axes = new_figure(
        1.2 + 4.2 * len(runs), 5.4, nrows=2, ncols=len(runs), squeeze=False, sharey="row", height_ratios=(2.4, 1)
    )
    image = None
    for run, (above, below) in zip(runs, axes.T, strict=True):
        layers, epochs = list(run.epochs[0]["mask_density"]), [m["epoch"] for m in run.epochs]
        density = np.array([[m["mask_density"][layer] for m in run.epochs] for layer in layers])
        extent = (epochs[0] - 0.5, epochs[-1] + 0.5, len(layers) - 0.5, -0.5)
        image = above.imshow(density, aspect="auto", extent=extent, vmin=0, vmax=1, cmap="Blues")
        above.set_yticks(range(len(layers)), layers, fontsize=8)
        above.set_title(run.label)
        looks = (style(run.method).line | {"zorder": 3}, {"color": "0.6", "linestyle": "-"})
        for (key, words), look in zip(KEPT.items(), looks, strict=True):
            points = [(m["epoch"], m[key]) for m in run.epochs if m.get(key) is not None]
            if points:
                marker = "." if len(points) <= FEW else ""
                below.plot(*zip(*points, strict=True), marker=marker, label=words, **look)
        below.set(xlabel="epoch", ylim=(0, 1.03), xlim=extent[:2])
        if below.lines:
            below.legend(frameon=False, fontsize=8)
        else:
            text = "the mask comes and goes" if np.ptp(density, axis=1).any() else "the mask does not change"
            below.text(0.5, 0.5, text, transform=below.transAxes, ha="center", va="center")
    axes[1][0].set_ylabel("in the mask of …")
    figure.colorbar(image, ax=axes[0].tolist(), label="share of perturbed weights")
    return save_figure(figure, path)
