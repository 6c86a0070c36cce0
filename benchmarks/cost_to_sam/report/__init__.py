"""The page and the picture: scores.py has the arithmetic, tables.py the page, picture.py the picture."""

from __future__ import annotations

from pathlib import Path

from pictures import THEMES

from ..workloads import WORKLOADS
from . import picture, tables
from .scores import Result, Workbook


def files(found: list[Result], root: Path) -> dict[Path, str]:
    """Return what the report writes: a text for each file. There is no picture without a workload on which SAM helps.

    Args:
        found: All runs.
        root: The root of the repository.
    """
    books = [Workbook(name, found) for name in WORKLOADS]
    texts = {root / "results" / "cost-to-sam" / "README.md": tables.page(books)}
    if any(book.helped for book in books):
        for theme in THEMES:
            texts[root / "docs" / "images" / f"cost-to-sam-{theme}.svg"] = picture.picture(books, theme)
    return texts
