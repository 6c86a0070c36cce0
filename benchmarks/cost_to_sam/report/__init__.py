"""The page and the picture: scores.py has the arithmetic, tables.py the page, picture.py the picture."""

from __future__ import annotations

from pathlib import Path

from pictures import THEMES

from ..workloads import WORKLOADS
from . import picture, tables
from .scores import Result, Workbook

MACHINE = "cpu"  # whose times stand beside the scores


def files(found: list[Result], times: dict[str, Result], root: Path) -> dict[Path, str]:
    """Return what the report writes: a text for each file. There is no picture without a workload on which SAM helps.

    Args:
        found: All runs.
        times: What the methods' steps took, by the machine's name.
        root: The root of the repository.
    """
    books = [Workbook(name, found, times.get(MACHINE)) for name in WORKLOADS]
    texts = {root / "results" / "cost-to-sam" / "README.md": tables.page(books, times)}
    if any(book.helped for book in books):
        for theme in THEMES:
            texts[root / "docs" / "images" / f"cost-to-sam-{theme}.svg"] = picture.picture(books, theme)
    return texts
