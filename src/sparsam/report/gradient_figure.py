"""The distribution of r as a picture: all weights of several runs, or one run layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsam.report.plotting import new_figure, save_figure
from sparsam.report.styles import styles


def draw_runs(runs: Sequence[tuple[str, str, dict[str, Any]]], path: Path) -> list[Path]:
    """Draw the distribution over all weights, a line for each run.

    Args:
        runs: Of each its label, its method and what `sparsam gradients` has written.
        path: Where to, without a suffix.
    """
    figure, ax = new_figure(6.4, 4.0)
    for (label, _, result), look in zip(runs, styles([method for _, method, _ in runs]), strict=True):
        edges, counts = np.array(result["edges"]), np.array(result["counts"][""], dtype=float)
        below = 100 * result["below_zero"][""]
        density, name = counts / counts.sum() / np.diff(edges), f"{label}: {below:.1f} % below 0"
        ax.stairs(density, edges, label=name, linewidth=1.6, **look.line)
    ax.axvline(0, color="0.4", linewidth=0.8)
    rhos, sizes = {r["rho"] for *_, r in runs}, {r["samples"] / r["batches"] for *_, r in runs}
    title = f"ρ = {_or(rhos)}, batches of {_or(sizes)}; the outermost bins hold all values beyond"
    ax.set(xlabel=r"$r = \log\,|(g_{SAM} - g_{SGD})\,/\,g_{SGD}|$", ylabel="density of weights")
    ax.set_title(title, fontsize=10)
    ax.set_ylim(0, ax.get_ylim()[1] * (1 + 0.08 * len(runs)))  # room for the legend above the curves
    ax.legend(frameon=False, fontsize=9, loc="upper left")
    return save_figure(figure, path)


def draw_layers(label: str, result: dict[str, Any], path: Path) -> list[Path]:
    """Draw the distribution of each layer of one run as a row of a map.

    Args:
        label: The run's.
        result: What `sparsam gradients` has written.
        path: Where to, without a suffix.
    """
    layers = [name for name in result["counts"] if name]
    edges = np.array(result["edges"])
    rows = np.array([result["counts"][name] for name in layers], dtype=float)
    rows /= rows.sum(1, keepdims=True)
    figure, ax = new_figure(7.6, 1.4 + 0.18 * len(layers))
    extent = (edges[0], edges[-1], len(layers) - 0.5, -0.5)
    image = ax.imshow(100 * rows, aspect="auto", extent=extent, cmap="Blues")
    figure.colorbar(image, ax=ax, label="% of a layer's weights, in bins of r")
    ax.axvline(0, color="0.4", linewidth=0.8)
    ax.set_yticks(range(len(layers)), [f"{n}  {100 * result['below_zero'][n]:.0f} %" for n in layers], fontsize=7)
    ax.set_title(f"{label}: r by layer, and the share below 0; ρ = {result['rho']:g}", fontsize=10)
    ax.set_xlabel(r"$r = \log\,|(g_{SAM} - g_{SGD})\,/\,g_{SGD}|$")
    return save_figure(figure, path)


def _or(values: set[Any]) -> str:
    return " or ".join(f"{value:g}" for value in sorted(values))
