"""Checkpoints that are whole or not there, and that are read without executing anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from sparsam.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be read; the message names it."""


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint: after a crash at any moment there is either the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """Read a checkpoint: tensors and plain values only."""
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint at {path}")
    try:
        content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return content
