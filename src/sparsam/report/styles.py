"""How each method looks, in every figure and on every page: one order, one colour and one dash a method, SGD first.

The look depends on the name of the method alone, which comes from the run (:func:`sparsam.runs.run.read_method`), never
on a label or on the runs beside it. Only where two lines of one chart have the same method does the second get another
dash.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

# On a light and on a dark page. People with any kind of colour blindness tell them apart, and each has a contrast of at
# least 3:1 with the page.
COLOURS = {
    "ink": ("#2a3038", "#e8ecf2"),
    "blue": ("#2456d3", "#4f86f7"),
    "orange": ("#cc7722", "#f6ae4e"),
    "green": ("#2f9e8b", "#3cc0a5"),
    "red": ("#af2f02", "#d4522f"),
    "violet": ("#a97cf0", "#c9b3ff"),
    "plum": ("#7c5180", "#96609f"),
}
DASHES: dict[str, tuple[float, ...]] = {  # lengths of lines and gaps, for lines two pixels wide
    "solid": (),
    "dashed": (7, 3),
    "dotted": (2.5, 2.5),
    "dash-dotted": (9, 3, 2, 3),
    "long": (14, 4),
}


class Style(NamedTuple):
    """A colour and a dash, by name."""

    colour: str
    dash: str

    @property
    def classes(self) -> str:
        """The classes of an element on a page (:func:`style_sheet`)."""
        return f"colour-{self.colour} dash-{self.dash}"

    @property
    def line(self) -> dict[str, Any]:
        """The keywords of a line in matplotlib, which measures dashes in widths of the line."""
        lengths = tuple(length / 2 for length in DASHES[self.dash])
        return {"color": COLOURS[self.colour][0], "linestyle": (0, lengths) if lengths else "-"}


METHODS = {  # in the order in which they are listed
    "SGD": Style("ink", "solid"),
    "Adam": Style("ink", "dashed"),
    "AdamW": Style("ink", "dotted"),
    "SAM": Style("blue", "dashed"),
    "ASAM": Style("blue", "dotted"),
    "F-SAM": Style("blue", "long"),
    "SAM on a share": Style("blue", "solid"),
    "Momentum-SAM": Style("blue", "dash-dotted"),
    "SAM-ON": Style("plum", "dashed"),
    "SSAM-F": Style("orange", "dotted"),
    "SSAM-D": Style("green", "dash-dotted"),
    "SSAM-C": Style("red", "long"),
    "Thrifty SAM": Style("violet", "long"),
    "SSAM, random": Style("violet", "dashed"),
}
STYLES = [Style(colour, dash) for colour, dash in product(COLOURS, DASHES)]
OTHERS = [style for style in STYLES if style not in METHODS.values()]  # for methods that have no style of their own


def place(method: str) -> tuple[float, str]:
    """Return a key that sorts methods: known ones in the order of the table, then others by name.

    >>> sorted(["SSAM-F", "mine", "SAM", "ASSAM-F", "SGD"], key=place)
    ['SGD', 'SAM', 'SSAM-F', 'ASSAM-F', 'mine']
    """
    known = list(METHODS)
    if method in METHODS:
        return known.index(method), ""
    if _is_adaptive(method):
        return known.index(method[1:]) + 0.5, ""
    return len(known), method


def style(method: str) -> Style:
    """Return how a method looks.

    An adaptive variant has the colour of its method. Any other method that is not in the table has a style that depends
    on its name alone.

    >>> style("SGD"), style("SSAM-F").colour == style("ASSAM-F").colour
    (Style(colour='ink', dash='solid'), True)
    """
    if method in METHODS:
        return METHODS[method]
    if _is_adaptive(method):
        plain, dashes = METHODS[method[1:]], list(DASHES)
        return plain._replace(dash=dashes[(dashes.index(plain.dash) + 1) % len(dashes)])
    return OTHERS[zlib.crc32(method.encode()) % len(OTHERS)]


def _is_adaptive(method: str) -> bool:
    return method.startswith("A") and method[1:] in METHODS


def styles(methods: Sequence[str]) -> list[Style]:
    """Return how lines in one chart look, given the method of each.

    The first line of a method looks as the method does. Further ones have its colour and another dash.

    >>> [s.dash for s in styles(["SAM", "SAM", "SAM"])]
    ['dashed', 'solid', 'dotted']
    """
    own = {method: style(method) for method in methods}
    taken: list[Style] = []
    for at, method in enumerate(methods):
        same = [s for s in STYLES if s.colour == own[method].colour]
        reserved = {s for other, s in own.items() if other != method}
        choices = [own[method], *(s for s in (*same, *STYLES) if s not in reserved)]
        taken.append(next((s for s in choices if s not in taken), STYLES[at % len(STYLES)]))
    return taken


def style_sheet() -> str:
    """Return CSS: a class for each colour, which sets `--line`, and one for each dash, which sets `--dash`."""
    colours = [f".colour-{name} {{ --line: light-dark({light}, {dark}); }}" for name, (light, dark) in COLOURS.items()]
    dashes = [
        f".dash-{name} {{ --dash: {' '.join(f'{length:g}' for length in lengths)}; }}"
        for name, lengths in DASHES.items()
        if lengths
    ]
    return "\n".join([*colours, *dashes])
