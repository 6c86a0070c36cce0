"""Hessian spectra as a picture: a panel for each run, all on the same axes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsam.analysis.hessian import Density
from sparsam.report.plotting import new_figure, save_figure
from sparsam.report.styles import style

ROW = 4  # panels side by side
FIRST, FIFTH, QUIET = "black", "#59626e", "#59626e"


def draw_spectra(runs: Sequence[tuple[str, str, dict[str, Any]]], path: Path) -> list[Path]:
    """Draw densities on a logarithmic scale, with λ1 and λ5.

    Args:
        runs: Of each its label, its method and what `sparsam hessian` has written.
        path: Where to, without a suffix.
    """
    results = [result for *_, result in runs]
    densities = [Density.from_dict(result["density"]) for result in results]
    low, high, width = _range(results, densities)
    grid = np.linspace(low, high, 3000)
    rows = math.ceil(len(results) / ROW)
    columns = math.ceil(len(results) / rows)
    inches = max(3.3 * columns, 5.0)
    figure, axes = new_figure(
        inches, 2.9 * rows + 0.8, nrows=rows, ncols=columns, sharex=True, sharey=True, squeeze=False
    )
    curves = [density.curve(grid, width)[1] for density in densities]
    singles = [1 / (density.size * width * math.sqrt(2 * math.pi)) for density in densities]
    floor, top = min(singles) / 20, max(curve.max() for curve in curves)
    for ax, (label, method, result), curve, single in zip(axes.flat, runs, curves, singles, strict=False):
        look = style(method).line
        ax.fill_between(grid, floor, np.maximum(curve, floor), color=look["color"], alpha=0.2, linewidth=0)
        ax.plot(grid, curve, linewidth=1.2, **look)
        ax.axhline(single, color=QUIET, linewidth=0.7, linestyle=(0, (1, 2)))
        _mark(ax, result)
        ax.set_title(label, fontsize=11, fontweight="bold", loc="left")
        ax.set(xlim=(low, high), ylim=(floor, 30 * top), yscale="log")
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8, color=QUIET, labelbottom=True)
    for ax in axes.flat[len(results) :]:
        ax.set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel("density", fontsize=9)
    for ax in axes.flat[len(results) - columns : len(results)]:
        ax.set_xlabel("eigenvalue", fontsize=9)
    gaps = [_widest_gap(grid, curve < floor) for curve in curves]
    widest = max(range(len(gaps)), key=lambda i: gaps[i][0])
    note = {"textcoords": "offset points", "ha": "center", "color": QUIET, "fontsize": 7}
    axes.flat[widest].annotate("one eigenvalue", (gaps[widest][1], singles[widest]), (0, 2), **note)
    caption = textwrap.fill(_caption(results, width), round(17 * inches))
    figure.supxlabel(caption, fontsize=7, color=QUIET)
    return save_figure(figure, path)


def _range(results: Sequence[dict[str, Any]], densities: Sequence[Density]) -> tuple[float, float, float]:
    """Return where the axis begins and ends, and the width of the kernel that belongs to it."""
    ends = [end for density in densities for end in density.range] + [r["eigenvalues"][0] for r in results]
    span = max(ends) - min(ends) or 1.0
    return min(ends) - 0.04 * span, max(ends) + 0.06 * span, 0.003 * span


def _widest_gap(grid: NDArray[np.float64], empty: NDArray[np.bool_]) -> tuple[float, float]:
    """Return the width and the middle of the widest empty part of a grid. Without one, it is 0 wide and in the middle.

    >>> _widest_gap(np.array([0.0, 1.0, 2.0, 3.0, 4.0]), np.array([True, False, True, True, True]))
    (2.0, 3.0)
    """
    if not empty.any():
        return 0.0, float(grid.mean())
    edges = np.flatnonzero(np.diff(np.concatenate(([False], empty, [False])).astype(int)))
    starts, ends = grid[edges[::2]], grid[edges[1::2] - 1]
    widest = int((ends - starts).argmax())
    return float(ends[widest] - starts[widest]), float(starts[widest] + ends[widest]) / 2


def _mark(ax: Any, result: dict[str, Any]) -> None:
    """Draw the eigenvalues as ticks on the axis, and λ1 and λ5 with their numbers."""
    values = result["eigenvalues"]
    ax.plot(
        values, [0] * len(values), "|", color=FIRST, markersize=9, transform=ax.get_xaxis_transform(), clip_on=False
    )
    lines = [(f"$\\lambda_1 = {_number(values[0])}$", FIRST)]
    ax.axvline(values[0], color=FIRST, linewidth=1, linestyle="--", ymax=0.62)
    if len(values) > 4:
        ax.axvline(values[4], color=FIFTH, linewidth=1, linestyle="--", ymax=0.62)
        lines.append((f"$\\lambda_5 = {_number(values[4])}$", FIFTH))
    if result["ratio"] is not None:
        lines.append((f"$\\lambda_1/\\lambda_5 = {result['ratio']:.2f}$", "black"))
    error = "" if result["trace_error"] is None else f" \\pm {result['trace_error']:.2g}"
    lines.append((f"$\\mathrm{{tr}}\\,H = {_number(result['trace'])}{error}$", "black"))
    for i, (text, colour) in enumerate(lines):
        ax.text(0.98, 0.97 - 0.085 * i, text, color=colour, transform=ax.transAxes, ha="right", va="top", fontsize=9)


def _caption(results: Sequence[dict[str, Any]], width: float) -> str:
    def of(key: str) -> str:
        return " or ".join(f"{value:,}" for value in sorted({result[key] for result in results}))

    weights = " or ".join(f"{size:,}" for size in sorted({result["density"]["size"] for result in results}))
    return (
        f"Hessian of the training loss over {of('samples')} images, {weights} weights, BatchNorm in eval mode. Lanczos "
        f"quadrature (probes × steps: {of('probes')} × {of('steps')}), every node widened by σ = {_number(width)}."
    )


def _number(value: float) -> str:
    """Return three digits.

    >>> _number(83.5509), _number(9.7), _number(1234.5), _number(0.01234)
    ('83.6', '9.70', '1234', '0.0123')
    """
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")
