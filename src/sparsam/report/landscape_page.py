"""One HTML page with landscapes to turn and to read off. It asks for nothing from outside, as the report's page.

The page is `landscape_page.html` with the report's style, `landscape_page.css`, `landscape_page.js` and the losses
written into it. Its policy names the hashes of that style and that script, so nothing else in the page can run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from sparsam.analysis.landscape import Landscape
from sparsam.report.embedding import content_hash, embedded
from sparsam.report.landscape_figure import COLOURS, Scale, caption, labels, numbers, title, view_azimuth

STYLES = 7, 5  # .m0 to .m6 and .d0 to .d4 in the report's page.css


def write_page(landscapes: Sequence[Landscape], destination: Path) -> Path:
    """Write one self-contained page with landscapes that share their settings; return its path."""
    here, report = files(__package__), files("sparsam.report")
    style = "\n".join(
        place.joinpath(name).read_text(encoding="utf-8")
        for place, name in ((report, "page.css"), (here, "landscape_page.css"))
    )
    script = here.joinpath("landscape_page.js").read_text(encoding="utf-8")
    plane = landscapes[0].losses.ndim == 2
    page = Template(here.joinpath("landscape_page.html").read_text(encoding="utf-8")).substitute(
        policy=escape(
            f"default-src 'none'; style-src '{content_hash(style)}'; script-src '{content_hash(script)}'; "
            f"base-uri 'none'; form-action 'none'"
        ),
        title=escape(title(landscapes)),
        lead=escape(
            "Drag a surface to turn all of them; point at one to read the loss of every run at the same place."
            if plane
            else "Point at the chart to read the loss of every run at the same place."
        ),
        caption=escape(caption(landscapes)),
        data=embedded(_data(landscapes)),
        style=style,
        script=script,
    )
    destination.parent.mkdir(parents=True, exist_ok=True)
    destination.write_text(page, encoding="utf-8", newline="\n")
    return destination


def _data(landscapes: Sequence[Landscape]) -> dict[str, Any]:
    scale = Scale.of(landscapes)
    plane = landscapes[0].losses.ndim == 2
    return {
        "axis": [float(f"{a:.6g}") for a in landscapes[0].axis],
        "log": scale.log,
        "positive": scale.low > 0,
        "colours": COLOURS,
        "azimuth": view_azimuth(landscapes) if plane else 0,
        "runs": [
            {
                "label": label,
                "style": f"m{i % STYLES[0]} d{i % STYLES[1]}",
                "numbers": numbers(shown),
                "centre": _short(shown.centre),
                "losses": [_short(loss) for loss in shown.losses.ravel().tolist()],
                "path": [[_short(x) for x in at] for at in shown.path.tolist()],
            }
            for i, (shown, label) in enumerate(zip(landscapes, labels(landscapes), strict=True))
        ],
    }


def _short(value: float) -> float | None:
    """Return six digits, which is more than can be seen; JSON has no NaN, and the page draws a gap."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
