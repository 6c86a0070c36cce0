"""Numbers on pages: what claims about them look like, and how a page is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any, NamedTuple


class Sentence(NamedTuple):
    """A part of a sentence with measured numbers.

    Args:
        page: The file.
        text: The words as a reader sees them, with {} for each measured number.
        values: A function that computes these numbers from the files, not rounded.
    """

    page: str
    text: str
    values: Callable[[], Sequence[float]]


class TableOf(NamedTuple):
    """A whole table.

    Args:
        page: The file.
        heading: The heading of the section with the table.
        rows: For each row, by its first cell, the argument of the columns' functions.
        columns: For each column but the first, by its heading, a function that computes the numbers in a cell.
    """

    page: str
    heading: str
    rows: dict[str, Any]
    columns: dict[str, Callable[[Any], Sequence[float]]]


class Number(NamedTuple):
    """A number on a page."""

    text: str
    line: int
    start: int
    end: int

    def agrees(self, value: float) -> bool:
        """Whether a value, rounded to the printed digits, is this number."""
        number = Decimal(self.text.replace("−", "-").replace(",", ""))
        half = Decimal(1).scaleb(number.as_tuple().exponent) / 2
        return abs(number - Decimal(value)) <= half + Decimal("1e-9")


class Found(NamedTuple):
    """A phrase on a page, and its numbers."""

    start: int
    end: int
    numbers: list[Number]


NUMBER = r"[+−-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?"
# A number stands alone: it is no part of a name (layer3, WRN-28-10, 29728f0) or of a version (2.11.0).
ALONE = re.compile(rf"(?<![\w.,/])(?<![A-Za-z]-){NUMBER}(?=x\b|(?!\w))(?!\.\d)")
UNIT = re.compile(r"\s?(?:%|×|x\b|ms\b|s\b|min\b|seconds\b|minutes\b|MB\b|GB\b|points?\b)")
CODE = re.compile(r"`[^`]*`")
# Markup that a reader does not see. Code blocks count as a space.
MARKUP = re.compile(
    r"(?P<space>^```.*?^```$|^    .*?$|<!--.*?-->|\s+)|(?P<nothing>\]\([^)]*\)|[\[\]]|\*\*)|.", re.DOTALL | re.MULTILINE
)


class Page:
    """A page as a reader sees it.

    Args:
        text: The page in Markdown.
        generated: The text between two lines that a program writes and another test compares, if there is one.
    """

    def __init__(self, text: str, generated: tuple[str, str] | None = None) -> None:
        if generated:
            start, end = map(re.escape, generated)
            text = re.sub(f"{start}.*?{end}", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
        self.text, self.lines = "", []
        line = 1
        for found in MARKUP.finditer(text):
            seen = " " if found["space"] else "" if found["nothing"] else found[0]
            self.text += seen
            self.lines += [line] * len(seen)
            line += found[0].count("\n")
        self.tables = list(_tables(text.splitlines()))

    def numbers(self) -> list[Number]:
        """Return all numbers."""
        return [Number(m[0], self.lines[m.start()], *m.span()) for m in ALONE.finditer(self.text)]

    def find(self, phrase: str) -> list[Found]:
        """Return where a phrase is; {} in it stands for a number."""
        text = re.escape(phrase).replace(r"\{\}", f"({NUMBER})").replace(r"\ ", r"\s+")
        matches = re.finditer(rf"(?<![\w.]){text}(?!\w)(?!\.\d)", self.text)
        return [
            Found(*m.span(), [Number(n, self.lines[m.start(i)], *m.span(i)) for i, n in enumerate(m.groups(), 1)])
            for m in matches
        ]

    def measured(self) -> Iterator[Number]:
        """Yield the numbers that need a file: those with a decimal point or a unit, and all in the cells of tables."""
        code = [m.span() for m in CODE.finditer(self.text)]
        rows = {row.line for table in self.tables for row in table.rows}
        for number in self.numbers():
            in_code = any(start <= number.start < end for start, end in code)
            unit = UNIT.match(self.text, number.end)
            if not in_code and ("." in number.text or unit or number.line in rows):
                yield number


class TableRow(NamedTuple):
    """A row of a table: the number of its line, and its cells without markup."""

    line: int
    cells: list[str]


class PageTable(NamedTuple):
    """A table of a page."""

    heading: str
    columns: list[str]
    rows: list[TableRow]


def numbers_in(cell: str) -> list[Number]:
    """Return the numbers in a cell of a table."""
    return Page(cell).numbers()


def _tables(lines: Sequence[str]) -> Iterator[PageTable]:
    heading, table = "", None
    for number, line in enumerate([*lines, ""], start=1):
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|"):
            cells = [Page(cell.strip()).text for cell in line.strip().strip("|").split("|")]
            if table is None:
                table = PageTable(heading, cells, [])
            elif set(line) - set("|-: "):
                table.rows.append(TableRow(number, cells))
        elif table is not None:
            yield table
            table = None
