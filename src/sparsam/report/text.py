"""A table as Markdown."""

from __future__ import annotations

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


def _with_note(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text
