"""A table as Markdown and as comma-separated values."""

from __future__ import annotations

import csv
import io

from sparsam.report.table import Cell, Table


def markdown(table: Table) -> str:
    """Return a table as Markdown.

    >>> print(markdown(Table(("Method", "n"), ((Cell("SAM"), Cell("3", "one unfinished")),))))
    | Method | n |
    | --- | --- |
    | SAM | 3 (one unfinished) |
    """
    lines = [table.columns, tuple("---" for _ in table.columns), *(tuple(map(_with_note, row)) for row in table.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def comma_separated(table: Table) -> str:
    r"""Return a table as comma-separated values, notes in brackets.

    >>> comma_separated(Table(("Method", "n"), ((Cell("SSAM, random"), Cell("3")),)))
    'Method,n\n"SSAM, random",3\n'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([_with_note(cell) for cell in row] for row in table.rows)
    return text.getvalue()


def _with_note(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text
