"""The part of the page about the minima of runs: results of analyses and figures.

Pictures are within the page, data files beside it. The page holds the PNG: the SVG of a landscape of 50 × 50 points is
four times as large, and the page's policy forbids the styles in it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from sparsam.errors import UserValueError
from sparsam.report.embedding import data_uri
from sparsam.report.figures import Figure
from sparsam.report.result_summaries import Result

SIGNATURE = b"\x89PNG\r\n\x1a\n"
SCALE = 96 / 160  # figures have 160 dots an inch, a browser has 96


def results_html(results: Sequence[Result], page: Path) -> str:
    """List the results of one run: a link to each file, and its numbers. Without results the text is empty."""
    sections = "\n".join(
        f"<section><h3>{_link(result.file, page, f'analysis/{result.file.name}')}</h3><dl>"
        + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in result.numbers.items())
        + "</dl></section>"
        for result in results
    )
    return f'<div class="settings results">{sections}</div>' if results else ""


def figures_html(figures: Sequence[Figure], page: Path) -> str:
    """Show figures in a section of their own. Without figures the text is empty."""
    if not figures:
        return ""
    shared = "\n".join(_figure(figure, page) for figure in figures if not figure.own)
    own = "\n".join(
        f"<details><summary><span>{escape(figure.title)}</span></summary>{_figure(figure, page)}</details>"
        for figure in figures
        if figure.own
    )
    return (
        '<section class="card drawn" id="minima" aria-labelledby="minima-title">\n'
        '<h2 id="minima-title">The minima</h2>\n'
        '<p class="remark">The figures as they were drawn last. A figure names the runs that it shows; they may differ '
        "from those of this page. The numbers behind the figures are listed with each run below.</p>\n"
        f"{shared}\n{own}\n</section>"
    )


def _figure(figure: Figure, page: Path) -> str:
    title = "" if figure.own else f"<h3>{escape(figure.title)}</h3>"
    links = " ".join(_link(file, page, file.name) for file in figure.files)
    picture = "".join(_picture(file, figure.title) for file in figure.files if file.suffix == ".png")
    return f"<figure><figcaption>{title}<span>{links}</span></figcaption>{picture}</figure>"


def _picture(file: Path, title: str) -> str:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserValueError(f"{file} cannot be read: {error}") from error
    if not data.startswith(SIGNATURE) or len(data) < 24:
        raise UserValueError(f"{file} is not a PNG picture")
    width, height = (round(SCALE * size) for size in struct.unpack(">2I", data[16:24]))
    return f'<img alt="{escape(title)}" width="{width}" height="{height}" src="{data_uri(data, "image/png")}">'


def _link(file: Path, page: Path, text: str) -> str:
    try:
        address = quote(os.fsencode(Path(os.path.relpath(file, page.parent)).as_posix()))
    except ValueError:  # on another drive
        address = file.absolute().as_uri()
    return f'<a href="{escape(address)}">{escape(text)}</a>'
