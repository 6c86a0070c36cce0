"""One HTML page with landscapes to turn and to read off. It asks for nothing from outside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from sparsam.analysis.landscape import Landscape
from sparsam.report.embedding import write_page
from sparsam.report.landscape_scale import HEIGHTS, Scale, view_azimuth
from sparsam.report.landscape_words import caption, labels, methods, numbers, title
from sparsam.report.styles import styles

SCRIPTS = (
    "elements.js",
    "landscape_state.js",
    "landscape_scale.js",
    "landscape_surface.js",
    "landscape_map.js",
    "landscape_line.js",
    "landscape_page.js",
)


def write_landscapes(landscapes: Sequence[Landscape], destination: Path) -> Path:
    """Write one self-contained page with landscapes that share their settings. Return its path."""
    turn = "Drag a surface to turn all of them; point at one to read the loss of every run at the same place."
    read = "Point at the chart to read the loss of every run at the same place."
    write_page(
        destination,
        "landscape_page.html",
        styles=["page.css", "landscape_page.css"],
        scripts=SCRIPTS,
        data=_data(landscapes),
        title=escape(title(landscapes)),
        lead=turn if landscapes[0].losses.ndim == 2 else read,
        caption=escape(caption(landscapes)),
    )
    return destination


def _data(landscapes: Sequence[Landscape]) -> dict[str, Any]:
    scale = Scale.of(landscapes)
    plane = landscapes[0].losses.ndim == 2
    return {
        "axis": [float(f"{a:.6g}") for a in landscapes[0].axis],
        "log": scale.log,
        "positive": scale.low > 0,
        "colours": HEIGHTS,
        "azimuth": view_azimuth(landscapes) if plane else 0,
        "runs": [
            {
                "label": label,
                "style": look.classes,
                "numbers": numbers(shown),
                "centre": _short(shown.centre),
                "losses": [_short(loss) for loss in shown.losses.ravel().tolist()],
                "path": [[_short(x) for x in at] for at in shown.path.tolist()],
            }
            for shown, label, look in zip(landscapes, labels(landscapes), styles(methods(landscapes)), strict=True)
        ],
    }


def _short(value: float) -> float | None:
    """Return six digits, which is more than can be seen; JSON has no NaN, and the page draws a gap."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
