"""Warnings that point to the user's line."""

from __future__ import annotations

import sys
import warnings

BETWEEN = frozenset({"sparsam", "torch", "contextlib"})  # what may lie between the user's call and a warning


def warn(text: str) -> None:
    """Warn, as from the innermost line of code that is neither sparsam's nor torch's."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
