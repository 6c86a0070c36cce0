"""The table of a comparison, as wide as the terminal allows."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from sparsam.report import Table
from sparsam.report.table import NONE

LONG_NAME = 20  # a name in the first column that is longer may be broken
NOTES = 118  # from this width on, cells have their notes
LEAST_WANTED = (
    "Training time",
    "Peak memory, MB",
    "Weight decay",
    "ρ",
    "FLOPs (theory)",
    "Seeds",
)  # left out first where room is short


def show_table(table: Table, console: Console) -> None:
    """Print the table: no column that is empty, and none that does not fit (the page has them all)."""
    columns = [i for i in range(len(table.columns)) if any(row[i].text != NONE for row in table.rows)]
    least = [_width(table, i) if i else min(_width(table, i), LONG_NAME) for i in range(len(table.columns))]
    for name in (*LEAST_WANTED, *reversed(table.columns[2:])):
        if sum(least[i] + 3 for i in columns) > console.width:
            columns = [i for i in columns if table.columns[i] != name]
    shown = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    notes = console.width >= NOTES
    tight = sum(max(_width(table, i), len(table.columns[i])) + 3 for i in columns) > console.width
    for i in columns:  # where not all fits in one line, headings are broken, numbers are not
        shown.add_column(
            table.columns[i],
            justify="right" if i else "left",
            width=least[i] if tight and i else None,
            min_width=least[i],
            overflow="fold",
        )
    for row in table.rows:
        cells = [row[i] for i in columns]
        shown.add_row(*(f"{c.text}\n[dim]{c.note}[/dim]" if notes and c.note else c.text for c in cells))
    console.print(shown)
    for row in table.rows:
        if row[0].note and not notes:
            console.print(f" {row[0].text}: {row[0].note}", style="dim")


def _width(table: Table, column: int) -> int:
    """Return the room that a column needs at least: its longest cell, and the longest word of its heading."""
    words = table.columns[column].split()
    return max(len(text) for text in (*words, *(row[column].text for row in table.rows)))
