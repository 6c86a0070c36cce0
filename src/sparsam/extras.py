"""Packages that only some parts need, imported where they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def need(module: str, purpose: str, *, extra: str | None = None, install: str | None = None) -> Any:
    """Import a package, or say which part needs it and how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        remedy = install or f"pip install 'sparsam[{extra}]'"
        raise ImportError(f"{purpose} need the package {module.partition('.')[0]}: {remedy}") from error
