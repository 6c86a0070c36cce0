"""Running means of squared gradient norms and the bounds of the theorems, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsam.analysis.convergence import Bounds
from sparsam.report.plotting import new_figure, save_figure
from sparsam.report.styles import style

ROWS = ("SAM, Theorem 1", "SSAM, Theorem 2")
BOUND, SHARPER = "0.15", "0.5"  # greys: colours belong to methods
METHODS = {"dense": "SAM", "random": "SSAM, random", "dynamic": "SSAM-D"}


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw a column for each problem: SAM above, SSAM below.

    Args:
        result: What :func:`sparsam.analysis.convergence.measure_all` returned.
        path: Where to, without a suffix.
    """
    problems = result["problems"]
    size = 3.6 * len(problems) + 2.4, 6.4
    figure, axes = new_figure(*size, nrows=2, ncols=len(problems), sharex=True, sharey="col", squeeze=False)
    for column, (name, problem) in zip(axes.T, problems.items(), strict=True):
        curves = [curve for curve in result["curves"] if curve["problem"] == name]
        for ax, sparse in zip(column, (False, True), strict=True):
            chosen = [curve for curve in curves if (curve["mask"] != "dense") == sparse]
            _bounds(ax, problem, chosen[0])
            _curves(ax, chosen)
        column[0].set_title(f"{name}\n{problem['about']}", fontsize=9)
        column[-1].set_xlabel("T")
    for row, theorem in zip(axes, ROWS, strict=True):
        row[0].set_ylabel(f"{theorem}\n" + r"$T^{-1}\,\sum_{t\leq T}\,E\,\|\nabla f(w_t)\|^2$")
        entries = {label: line for ax in row for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        place = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5)}
        row[-1].legend(entries.values(), entries.keys(), frameon=False, fontsize=8, **place)
    figure.suptitle(_caption(result, ";  " if len(problems) > 1 else "\n"), fontsize=10)
    return save_figure(figure, path)


def _bounds(ax: Any, problem: dict[str, Any], curve: dict[str, Any]) -> None:
    """Draw the bounds of one curve. Those of the other curves differ only in the measured decrease of f."""
    ax.set(xscale="log", yscale="log")
    ax.grid(alpha=0.25, linewidth=0.6)
    trivial = r"$G^2$: bounds above it say nothing"
    ax.axhline(problem["G"] ** 2, color="0.6", linestyle=":", linewidth=1.2, label=trivial)
    T, decrease = (np.array(curve[key], dtype=float) for key in ("T", "decrease"))
    constants = (problem["L"], problem["G"], problem["sigma"], curve["eta_0"], curve["rho_0"])
    bounds = Bounds(*constants, sparse=curve["mask"] != "dense")
    printed = bounds.printed(T, decrease)
    ax.plot(T, bounds.corrected(T, decrease), color=BOUND, linewidth=1.6, label="corrected bound")
    ax.plot(T, np.where(printed > 0, printed, np.nan), "--", color=BOUND, linewidth=1.2, label="printed bound")
    ax.plot(T, bounds.sharper(T, decrease), color=SHARPER, linewidth=1.2, label="sharper bound")


def _curves(ax: Any, curves: Sequence[dict[str, Any]]) -> None:
    """Draw what was measured, each method in its colour, paler where the mask is less sparse.

    Most curves lie on one another: hence lines within lines, and marks that take turns.
    """
    sparsities = sorted({curve["sparsity"] for curve in curves})
    for curve in curves:
        place = sparsities.index(curve["sparsity"])
        look = style(METHODS[curve["mask"]]).line
        look["color"] = _paler(look["color"], 0.6 * (1 - (place + 1) / len(sparsities)))
        look["linewidth"] = 1.4 + 1.2 * (len(sparsities) - 1 - place)
        if curve["mask"] == "dynamic":
            look |= {"linewidth": 0.8, "marker": "o", "markersize": 4.5, "zorder": 3}
            look |= {"markevery": (2 * place, 2 * len(sparsities)), "markeredgecolor": "white", "markeredgewidth": 0.6}
        label = f"{curve['mask']} mask, s = {curve['sparsity']:g}" if curve["mask"] != "dense" else "SAM"
        ax.plot(curve["T"], curve["mean"], label=label, **look)
        ax.fill_between(curve["T"], curve["lowest"], curve["highest"], color=look["color"], alpha=0.12, linewidth=0)
        failing = [i for i, t in enumerate(curve["T"]) if t in curve["printed_fails_at"]]
        if failing:
            at = [curve["T"][i] for i in failing], [curve["mean"][i] for i in failing]
            ax.plot(*at, "x", color="tab:red", markersize=7, zorder=4, label="above the printed bound")


def _paler(colour: str, share: float) -> tuple[float, ...]:
    """Return a colour mixed with so much white.

    >>> _paler("#000000", 0.5)
    (0.5, 0.5, 0.5)
    """
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(channel + share * (1 - channel) for channel in channels)


def _caption(result: dict[str, Any], then: str) -> str:
    most = r"$\eta_0$ and $\rho_0$ the largest that the theorem allows"
    shares = rf"$\eta_0$ = {result['eta']:g} and $\rho_0$ = {result['rho']:g} of the largest that the theorem allows"
    return (
        r"$\eta_t = \eta_0/\sqrt{t}$,  $\rho_t = \rho_0/\sqrt{t}$"
        f"{then}{most if result['eta'] == result['rho'] == 1 else shares}{then}"
        f"mean and range of {result['seeds']} seeds"
    )
