"""What users are told: errors that they can mend, warnings, packages that are missing."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import Any

INTERNAL = frozenset({"sparsam", "torch", "contextlib"})  # packages between the user's line and a warning


class UserError(Exception):
    """An error that the user can mend. The command line shows its message without a traceback."""


class UserValueError(UserError, ValueError):
    """An argument with a value that is not allowed."""


class UserTypeError(UserError, TypeError):
    """An argument of a type that is not allowed."""


class UserRuntimeError(UserError, RuntimeError):
    """A call at the wrong time, or with a model or a device that does not allow it."""


class CaptureError(UserRuntimeError):
    """A step is being captured in a CUDA graph that has to run eagerly."""


class MissingPackageError(UserError, ImportError):
    """A package that an extra of sparsam installs is not there."""


def warn(text: str) -> None:
    """Warn, as from the innermost line of code that is neither sparsam's nor torch's."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in INTERNAL:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def need(module: str, purpose: str, *, extra: str | None = None, install: str | None = None) -> Any:
    """Import a package that only some parts of sparsam need; an error names the extra that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        remedy = install or f"pip install 'sparsam[{extra}]'"
        raise MissingPackageError(f"{purpose} need the package {module.partition('.')[0]}: {remedy}") from error
