"""The table of a comparison, as wide as the terminal allows."""

from __future__ import annotations

import re
from collections.abc import Mapping

import rich
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from sparsam.report import Table
from sparsam.report.table import NONE

LONG_NAME = 20  # a name in the first column that is longer may be broken
NOTES = 118  # from this width on, cells have their notes
LEAST_WANTED = (
    "Training time",
    "Peak memory, MB",
    "Weight decay",
    "ρ",
    "Training loss",
    "FLOPs (theory)",
    "Seeds",
)  # left out first where room is short


def show_table(table: Table, console: Console) -> tuple[list[str], list[str]]:
    """Print the table: no column that is empty, and none that does not fit.

    Return the headings of the columns that are shown, and of those that are left out because they do not fit.
    """
    filled = [i for i in range(len(table.columns)) if any(row[i].text != NONE for row in table.rows)]
    columns = filled
    least = [_width(table, i) if i else min(_width(table, i), LONG_NAME) for i in range(len(table.columns))]
    for heading in (*LEAST_WANTED, *reversed(table.columns[2:])):
        if sum(least[i] + 3 for i in columns) > console.width:
            columns = [i for i in columns if table.columns[i] != heading]
    names = [row[0] for row in table.rows]
    room = console.width - 2 - sum(least[i] + 2 for i in columns if i)  # for names, if all else is tight
    beside = all(len(f"{name.text} ({name.note})") <= room for name in names if name.note)
    longest = max(
        (len(f"{name.text} ({name.note})" if beside and name.note else name.text) for name in names), default=0
    )
    wanted = [longest, *(max(_width(table, i), len(table.columns[i])) for i in columns if i)]
    tight = sum(width + 3 for width in wanted) > console.width
    shown = RichTable(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=tight)
    for i in columns:  # where not all fits in one line, headings are broken, numbers are not
        shown.add_column(
            Text(table.columns[i]),
            justify="right" if i else "left",
            width=least[i] if tight and i else None,
            min_width=least[i],
            overflow="fold",
        )
    roomy = console.width >= NOTES
    for name, *others in ([row[i] for i in columns] for row in table.rows):
        note = f" ({name.note})" if beside and name.note else ""
        first = "\n".join(_broken(name.text, room)) if len(name.text) > room else name.text
        numbers = (Text.assemble(c.text, (f"\n{c.note}" if c.note and roomy else "", "dim")) for c in others)
        shown.add_row(Text.assemble(first, (note, "dim")), *numbers)
    console.print(shown)
    if not beside:
        for note in dict.fromkeys(name.note for name in names if name.note):
            those = ", ".join(name.text for name in names if name.note == note)
            console.print(Padding(Text(f"{those}: {note}", "dim"), (0, 0, 0, 1)))
    return [table.columns[i] for i in columns], [table.columns[i] for i in filled if i not in columns]


def print_table(title: str, table: Table, notes: Mapping[str, str] | None = None, whole: str = "") -> None:
    """Print the table below its title, and below it the notes on its columns, and which of them do not fit.

    Args:
        title: In bold; may be empty.
        table: What to print.
        notes: What columns mean, by their headings. Those that are left out need none.
        whole: What else shows all columns, in words; empty: nothing does.
    """
    console = rich.get_console()
    if title:
        print_title(title)
    shown, left_out = show_table(table, console)
    texts = [note for heading, note in (notes or {}).items() if heading in shown]
    if texts:
        console.print(Text(" ".join(texts), "dim"))
    if left_out:
        them, places = "it" if len(left_out) == 1 else "them", " or ".join(filter(None, ["a wider terminal", whole]))
        text = f"Left out for width: {', '.join(left_out)}; {places} shows {them}."
        console.print(Text(text, "dim"))


def print_title(title: str) -> None:
    """Print a title in bold, below an empty line."""
    rich.get_console().print(Text(f"\n{title}", "bold"))


def _broken(name: str, width: int) -> list[str]:
    """Return a name in lines, broken after a hyphen or a space."""
    lines = [""]
    for piece in re.findall(r"[^-\s]+[-\s]?|[-\s]", name):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return lines


def _width(table: Table, column: int) -> int:
    """Return the room that a column needs at least: its longest cell, and the longest word of its heading."""
    words = table.columns[column].split()
    return max(len(text) for text in (*words, *(row[column].text for row in table.rows)))
