"""Consoles that print text as it is."""

from __future__ import annotations

from rich.console import Console


def plain_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console for text with paths and names of users: brackets and colons in them are no markup."""
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)
