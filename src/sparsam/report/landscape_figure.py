"""Landscapes as pictures: contours, surfaces and lines, runs side by side in one scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsam.analysis.landscape import Landscape
from sparsam.report.landscape_scale import HEIGHTS, Scale, view_azimuth
from sparsam.report.landscape_words import caption, labels, methods, numbers, title
from sparsam.report.plotting import new_figure, save_figure
from sparsam.report.styles import styles

INK, QUIET, RULE, GAP = "#1d2229", "#59626e", "#d9d9d4", "#e7e4df"
COLUMNS = 5  # panels in a row


def draw_figures(landscapes: Sequence[Landscape], directory: Path) -> list[Path]:
    """Draw all figures of some landscapes that share their settings; return the files."""
    if landscapes[0].losses.ndim == 1:
        return draw_lines(landscapes, directory / "landscape-line")
    return [
        *draw_contours(landscapes, directory / "landscape-contour"),
        *draw_surfaces(landscapes, directory / "landscape-surface"),
    ]


def draw_lines(landscapes: Sequence[Landscape], path: Path) -> list[Path]:
    """Draw the losses along one direction, a line for each run."""
    scale = Scale.of(landscapes)
    figure, ax = new_figure(6.8, 4.5)
    for shown, label, look in zip(landscapes, labels(landscapes), styles(methods(landscapes)), strict=True):
        colour = look.line["color"]
        middle = np.searchsorted(shown.axis, 0.0)  # the loss at w belongs to the line, also where no point is there
        along, losses = np.insert(shown.axis, middle, 0.0), np.insert(shown.losses, middle, shown.centre)
        losses = np.where(np.isfinite(losses), losses, np.nan)
        ax.plot(along, losses, linewidth=1.9, label=label, **look.line)
        ax.plot(0, shown.centre, "o", color=colour, markersize=5, markeredgecolor="white", zorder=3)
        if len(shown.path):
            ax.plot(
                shown.path[:, 0], np.full(len(shown.path), scale.low), "|", color=colour, markersize=9, clip_on=False
            )
    if scale.log:
        ax.set_yscale("log")
        ax.set_yticks(scale.ticks(), [f"{tick:g}" for tick in scale.ticks()])
        ax.minorticks_off()
    span = landscapes[0].axis[-1]
    ax.set(xlim=(-span, span), xticks=[-span, -span / 2, 0, span / 2, span])
    ax.xaxis.set_major_formatter("{x:g}")
    ax.grid(color=RULE, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(colors=QUIET, labelsize=9, length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("a, along the direction", color=QUIET, fontsize=9.5)
    ax.set_ylabel("loss", color=QUIET, fontsize=9.5)
    ax.set_title(title(landscapes), loc="left", fontsize=12, fontweight="bold", color=INK, pad=12)
    ax.legend(frameon=False, fontsize=9.5, labelcolor=INK, loc="best", handlelength=2.6)
    _caption(figure, landscapes, 6.8)
    return save_figure(figure, path)


def draw_contours(landscapes: Sequence[Landscape], path: Path) -> list[Path]:
    """Draw the losses over the plane as filled contours, a panel for each run."""
    scale = Scale.of(landscapes)
    figure, panels, width = _panels(landscapes, 2.75, 2.95)
    colours, normalize = _colours(scale)
    levels = np.linspace(*scale.ends, 81)
    for i, (ax, shown, label) in enumerate(zip(panels, landscapes, labels(landscapes), strict=True)):
        heights = scale.height(shown.losses)
        ax.set_facecolor(GAP)
        if np.isfinite(heights).any():
            filled = ax.contourf(shown.axis, shown.axis, heights, levels=levels, cmap=colours, norm=normalize)
            filled.set(edgecolor="face", linewidth=0.3)  # against hairlines between neighbours
            _isolines(ax, shown.axis, heights, scale)
        if len(shown.path):
            # Unclipped: the farthest checkpoints lie on the edge. Without lines, which would follow it.
            marks = {"markersize": 5, "markeredgecolor": INK, "zorder": 3, "clip_on": False}
            ax.plot(*shown.path.T, ".", color="white", **marks)
        ax.plot(0, 0, "o", color="white", markersize=5, markeredgecolor=INK, markeredgewidth=0.8, zorder=4)
        span = shown.axis[-1]
        ax.set(aspect="equal", xticks=[-span, 0, span], yticks=[-span, 0, span], xlim=(-span, span), ylim=(-span, span))
        ax.tick_params(colors=QUIET, labelsize=8, length=0)
        ax.spines[:].set_visible(False)
        ax.set_xlabel("a", color=QUIET, fontsize=9, labelpad=0)
        if i % COLUMNS == 0:
            ax.set_ylabel("b", color=QUIET, fontsize=9, labelpad=2, rotation=0, va="center")
        _name(ax, shown, label)
    _frame(figure, panels, landscapes, width, scale)
    return save_figure(figure, path)


def draw_surfaces(landscapes: Sequence[Landscape], path: Path) -> list[Path]:
    """Draw the losses over the plane as surfaces, a panel for each run."""
    scale = Scale.of(landscapes)
    figure, panels, width = _panels(landscapes, 3.0, 3.0, subplot_kw={"projection": "3d"})
    colours, normalize = _colours(scale)
    floor, top = scale.ends
    ticks, azimuth = scale.ticks(5), view_azimuth(landscapes)
    for ax, shown, label in zip(panels, landscapes, labels(landscapes), strict=True):
        heights = scale.height(shown.losses)
        a, b = np.meshgrid(shown.axis, shown.axis)
        colour = _lit(colours(normalize(heights)), heights / (top - floor), azimuth)
        ax.plot_surface(a, b, heights, facecolors=colour, rcount=200, ccount=200, linewidth=0.15, shade=False)
        ax.view_init(elev=36, azim=azimuth)
        ax.set_box_aspect((1, 1, 0.75), zoom=1.0)
        span = shown.axis[-1]
        ax.set(xlim=(-span, span), ylim=(-span, span), zlim=(floor, top))
        inner = [-span / 2, 0, span / 2]  # at the corners the numbers of two axes would touch
        ax.set(xticks=inner, yticks=inner)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.set_zticks(scale.height(ticks), [f"{tick:g}" for tick in ticks])
        for axis in (ax.xaxis, ax.yaxis, ax.zaxis):
            axis.set_pane_color((0.985, 0.985, 0.98, 1))
            axis.line.set_color(RULE)
            axis._axinfo["grid"].update(color=RULE, linewidth=0.5)
            axis._axinfo["tick"].update(inward_factor=0, outward_factor=0)
        ax.tick_params(colors=QUIET, labelsize=7, pad=-3)
        ax.zaxis.set_tick_params(pad=0)  # its numbers are wider, and stand beside the line
        ax.set_xlabel("a", color=QUIET, fontsize=8.5, labelpad=-4)
        ax.set_ylabel("b", color=QUIET, fontsize=8.5, labelpad=-4)
        _name(ax, shown, label)
    _frame(figure, panels, landscapes, width, scale, dot=False)
    with np.errstate(all="ignore"):  # beside gaps, matplotlib projects memory that nobody has written, and hides it
        return save_figure(figure, path)


def _panels(landscapes: Sequence[Landscape], wide: float, high: float, **options: Any) -> tuple[Any, list[Any], float]:
    """Return a figure, one axes for each landscape, and its width."""
    columns = min(COLUMNS, len(landscapes))
    rows = math.ceil(len(landscapes) / columns)
    larger = {1: 1.7, 2: 1.25}.get(columns, 1.0)  # where there is room
    width = larger * wide * columns + 0.8
    figure, grid = new_figure(width, larger * high * rows + 1.1, nrows=rows, ncols=columns, squeeze=False, **options)
    panels = list(grid.ravel())
    for unused in panels[len(landscapes) :]:
        unused.remove()
    return figure, panels[: len(landscapes)], width


def _colours(scale: Scale) -> tuple[Any, Any]:
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    colours = LinearSegmentedColormap.from_list("sparsam", HEIGHTS, N=512)
    return colours, Normalize(*scale.ends)


def _frame(
    figure: Any, panels: Sequence[Any], landscapes: Sequence[Landscape], width: float, scale: Scale, *, dot: bool = True
) -> None:
    """Add what stands around the panels: the title, the scale and the caption."""
    from matplotlib.cm import ScalarMappable

    figure.get_layout_engine().set(h_pad=0.09)

    colours, normalize = _colours(scale)
    bar = figure.colorbar(ScalarMappable(normalize, colours), ax=panels, shrink=0.8, aspect=28, pad=0.015)
    ticks = scale.ticks()
    bar.set_ticks(scale.height(ticks), labels=[f"{tick:g}" for tick in ticks])
    bar.ax.tick_params(colors=QUIET, labelsize=8, length=0)
    bar.ax.set_title("loss", fontsize=9, color=QUIET, loc="left", pad=7)
    bar.outline.set_visible(False)
    figure.suptitle(title(landscapes), x=0.012, ha="left", fontsize=12.5, fontweight="bold", color=INK)
    _caption(figure, landscapes, width, dot=dot)


def _caption(figure: Any, landscapes: Sequence[Landscape], width: float, *, dot: bool = True) -> None:
    figure.supxlabel(fill(caption(landscapes, dot=dot), int(width * 16.5)), x=0.012, ha="left", fontsize=8, color=QUIET)


def _name(ax: Any, shown: Landscape, label: str) -> None:
    ax.set_title(label, fontsize=11, fontweight="bold", color=INK, pad=18)
    write = ax.text2D if ax.name == "3d" else ax.text
    write(0.5, 1.025, numbers(shown), transform=ax.transAxes, ha="center", fontsize=8.5, color=QUIET)


def _isolines(ax: Any, axis: NDArray[np.float64], heights: NDArray[np.float64], scale: Scale) -> None:
    """Draw lines of equal loss; those with a name are a little stronger."""
    named = scale.ticks(4)
    finite = heights[np.isfinite(heights)]
    low, high = finite.min(), finite.max()
    for losses, width in ((scale.ticks(12), 0.45), (named, 0.9)):
        levels = [level for level in scale.height(losses) if low < level < high]
        if not levels:
            continue
        # White is not seen on the light end of the colours, nor ink on the dark one.
        colours = ["white" if level < sum(scale.ends) / 2 else INK for level in levels]
        drawn = ax.contour(axis, axis, heights, levels=levels, colors=colours, linewidths=width, linestyles="solid")
        drawn.set_alpha(0.65)
        if losses is named:
            names = {level: f"{loss:g}" for level, loss in zip(scale.height(named), named, strict=True)}
            ax.clabel(drawn, fmt=names, fontsize=7.5, inline_spacing=3)


def _lit(colours: NDArray[np.float64], heights: NDArray[np.float64], azimuth: float) -> NDArray[np.float64]:
    """Return the colours as light from the viewer's left shows them, so that slopes can be seen."""
    points = len(heights)
    along_b, along_a = np.nan_to_num(np.gradient(heights, 2 / points))  # beside a gap as if it were level
    normal = np.stack([-along_a, -along_b, np.ones_like(along_a)])
    normal /= np.linalg.norm(normal, axis=0)
    turn = math.radians(azimuth - 60)
    light = np.array([0.6 * math.cos(turn), 0.6 * math.sin(turn), 0.8])
    brightness = 0.80 + 0.28 * np.tensordot(light, normal, 1)[..., None]
    lit = np.clip(colours[..., :3] * brightness, 0, 1)
    return np.dstack([lit, np.where(np.isnan(heights), 0.0, 1.0)])
