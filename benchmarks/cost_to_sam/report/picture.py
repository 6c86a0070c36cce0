"""The picture: for a few methods their extra cost, and on each workload their share of SAM's gain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import isfinite
from statistics import median
from typing import Any

from pictures import Picture, draw

from .scores import Row, Score, Workbook

PLAIN, OURS, SAM = "SGD", "Thrifty SAM", "SAM"  # kinds of methods, which have a colour
DRAWN = {  # the rows from top to bottom: a name and a kind
    "average": ("mean of weights", PLAIN),
    "decay-10": ("10 × weight decay", PLAIN),
    "share-8": ("SAM on 1/8 of batch", OURS),
    "thrifty-1.15": ("thrifty SAM, 1.15", OURS),
    "share-4": ("SAM on 1/4 of batch", OURS),
    "base-2": ("twice the epochs", PLAIN),
    "sam": ("SAM", SAM),
}
TASKS = {"resnet": "ResNet", "vit": "ViT", "noise": "wrong labels", "forecast": "forecast", "text": "text"}
LEAST, MOST = -60, 200  # what of the scores is drawn, in percent

HEIGHT = 350  # pixels
BOTTOM, TOP = 0.09, 0.82  # of the panels, as fractions of the picture
COSTS, SHARES, RIGHT, GAP = 0.225, 0.365, 0.99, 0.014  # where the panels begin and end, and what is between them
LARGE, MEDIUM, SMALL = 14, 13, 11.5  # sizes of letters


def picture(books: Sequence[Workbook], theme: str) -> str:
    """Return the picture as SVG, for a light or a dark page."""
    return draw(theme, HEIGHT, partial(_draw, books=[book for book in books if book.helped]))


def _draw(page: Picture, books: Sequence[Workbook]) -> None:
    shares = [_shares(book) for book in books]
    found = [share for each in shares for share in each.values()]
    seeds = {share.seeds for share in found}
    title = "Share of SAM's gain over the base optimizer in %, mean of {} seeds, 95 % interval"
    number = " to ".join(map(str, sorted({min(seeds), max(seeds)})))
    page.figure.text(0.012, 0.945, title.format(number), color=page.grey, size=LARGE)

    # Draw the costs, and beside them a panel for each workload, all with the same axis.
    _draw_costs(page, books)
    ends = [end for share in found for end in (share.gain, *(share.interval or ())) if isfinite(end)]
    limits = max(LEAST, min(-20, *ends) - 10), min(MOST, max(120, *ends) + 10)
    width = (RIGHT - SHARES + GAP) / len(books)
    for i, (book, each) in enumerate(zip(books, shares, strict=True)):
        _draw_shares(page, TASKS[book.name], each, (SHARES + i * width, width - GAP), limits)


def _row(book: Workbook, name: str) -> Row:
    return book.sam if name == "sam" else Row(name)


def _shares(book: Workbook) -> dict[str, Score]:
    return {name: share for name in DRAWN if (share := book.share(_row(book, name)))}


def _panel(page: Picture, title: str, place: tuple[float, float]) -> Any:
    """Add axes with a height for each method."""
    axes = page.axes((place[0], BOTTOM, place[1], TOP - BOTTOM))
    axes.set_title(title, color=page.ink, size=LARGE, weight="bold", pad=8)
    axes.set(ylim=(len(DRAWN) - 0.4, -0.6))
    axes.set_yticks([])
    return axes


def _write(
    page: Picture, axes: Any, text: str, place: tuple[float, float], away: tuple[float, float], **look: Any
) -> None:
    """Write a text some points away from a place, on a patch of the page's colour."""
    patch = {"facecolor": page.page, "edgecolor": "none", "pad": 0.5}
    look = {"color": page.ink, "va": "center", "bbox": patch, **look}
    axes.annotate(text, place, away, textcoords="offset points", **look)


def _draw_costs(page: Picture, books: Sequence[Workbook]) -> None:
    """Draw the name of each method, and its extra cost as a bar."""
    axes = _panel(page, "extra cost", (COSTS, SHARES - COSTS - 2 * GAP))
    axes.set(xlim=(0, 2.1), xticks=[])
    for height, (name, (label, kind)) in enumerate(DRAWN.items()):
        weight = "normal" if kind == PLAIN else "bold"
        _write(page, axes, label, (0, height), (-8, 0), ha="right", weight=weight, size=MEDIUM)
        costs = [cost for book in books if (cost := book.counted(_row(book, name)))]
        if costs:
            extra = median(costs) - 1
            axes.barh(height, extra, 0.36, color=page.colour(kind))
            _write(page, axes, f"+{100 * extra:.0f} %", (extra, height), (5, 0), size=MEDIUM)


def _draw_shares(
    page: Picture, title: str, shares: dict[str, Score], place: tuple[float, float], limits: tuple[float, float]
) -> None:
    """Draw each method's share on a workload with its interval, and the base optimizer and SAM as lines."""
    axes = _panel(page, title, place)
    axes.set(xlim=limits)
    axes.set_xticks([0, 100], ["base", "SAM"], size=MEDIUM)
    axes.hlines(range(len(DRAWN)), *limits, color=page.faint, linewidth=1, zorder=0)
    for level, kind in ((0, PLAIN), (100, SAM)):
        axes.axvline(level, color=page.colour(kind), linewidth=1, dashes=(4, 4), alpha=0.6, zorder=0)
    for height, (name, (_, kind)) in enumerate(DRAWN.items()):
        share, colour = shares.get(name), page.colour(kind)
        if share is None:
            continue
        if not isfinite(share.gain):
            _write(page, axes, "diverges", (50, height), (0, 0), ha="center", size=SMALL)
            continue
        if share.interval:
            axes.plot(share.interval, [height, height], color=colour, linewidth=2.5)
        inside = min(max(share.gain, limits[0] + 10), limits[1] - 10)  # an arrow stands for a point outside
        marker = "o" if inside == share.gain else "<" if share.gain < inside else ">"
        axes.plot(inside, height, marker, color=colour, markersize=8)
        number = f"{share.gain:z.0f}".replace("-", "−")
        _write(page, axes, number, (inside, height), (0, 12), ha="center", size=SMALL)
