"""Checkpoints: written whole or not at all, and read without executing anything."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import torch

from sparsam.runs.files import RunError, replace_file


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint. After a crash at any moment there is either the old one or the new one."""

    def write(file: IO[bytes]) -> None:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # such as a full disk, which torch's own error does not name
                raise error.__context__ from error
            raise

    replace_file(path, write)


def check_checkpoint(path: Path) -> None:
    """Refuse a checkpoint that does not exist."""
    if not path.is_file():
        raise RunError(f"there is no checkpoint at {path}")


def load_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """Read a checkpoint. It may hold tensors and plain values only."""
    check_checkpoint(path)
    try:
        content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    return content
