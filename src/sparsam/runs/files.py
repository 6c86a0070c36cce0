"""How files of runs are read and written: an error names the file, and a file is written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from sparsam.errors import UserValueError


class RunError(UserValueError):
    """A run that cannot be read. The message names the file and the problem."""


def read_text(path: Path) -> str:
    """Read a text file of a run."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RunError(f"{path.parent} has no {path.name}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error


def replace_file(path: Path, content: str | Callable[[IO[bytes]], object]) -> None:
    """Write a file. After a crash at any moment there is either the old file or the new one.

    Args:
        path: The file. Its folder is created.
        content: The text, or a function that writes into an open binary file.
    """
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()  # it may have filled the disk
        raise _not_written(path, error) from error


def append_line(path: Path, line: str) -> None:
    """Write a line at the end of a text file. When this returns, it is on the disk."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} cannot be written: {error}")
