"""Which layers a mask perturbs, and how it moves, as a picture of a run's metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsam.errors import UserValueError
from sparsam.report.plotting import new_figure, save_figure


def draw_masks(runs: Sequence[tuple[str, list[dict[str, Any]]]], path: Path) -> list[Path]:
    """Draw for each run the share of perturbed weights by layer and epoch, and below it how much of the mask is kept.

    Args:
        runs: Labels and the metrics of the runs' epochs.
        path: Where to, without a suffix.
    """
    runs = [(label, [m for m in metrics if m["mask_density"]]) for label, metrics in runs]
    empty = [label for label, metrics in runs if not metrics]
    if empty:
        why = "it is not of a kind of SAM, or has no finished epoch"
        raise UserValueError(f"a run must have a mask to draw, but {', '.join(empty)} has none: {why}")
    figure, axes = new_figure(
        1.2 + 4.2 * len(runs), 5.4, nrows=2, ncols=len(runs), squeeze=False, sharey="row", height_ratios=(2.4, 1)
    )
    image = None
    for (label, metrics), (above, below) in zip(runs, axes.T, strict=True):
        layers, epochs = list(metrics[0]["mask_density"]), [m["epoch"] for m in metrics]
        density = np.array([[m["mask_density"][layer] for m in metrics] for layer in layers])
        extent = (epochs[0] - 0.5, epochs[-1] + 0.5, len(layers) - 0.5, -0.5)
        image = above.imshow(density, aspect="auto", extent=extent, vmin=0, vmax=1, cmap="Blues")
        above.set_yticks(range(len(layers)), layers, fontsize=8)
        above.set_title(label)
        for key, words in (("mask_kept", "the epoch before"), ("mask_kept_since_start", "the first epoch")):
            points = [(m["epoch"], m[key]) for m in metrics if m.get(key) is not None]
            if points:
                below.plot(*zip(*points, strict=True), marker=".", label=words)
        below.set(xlabel="epoch", ylim=(0, 1.03), xlim=extent[:2])
        if not below.lines:
            told = "the mask comes and goes" if np.ptp(density, axis=1).any() else "the mask does not move"
            below.text(0.5, 0.5, told, transform=below.transAxes, ha="center", va="center")
    axes[1][0].set_ylabel("in the mask of …")
    figure.colorbar(image, ax=axes[0].tolist(), label="share of perturbed weights")
    for ax in axes[1]:
        if ax.lines:
            ax.legend(frameon=False, fontsize=8)
            break
    return save_figure(figure, path)
