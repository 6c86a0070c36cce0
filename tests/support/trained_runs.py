"""Runs that were really trained: small networks on the digits, an epoch or two."""

from __future__ import annotations

from pathlib import Path

import torch

from sparsam.training import load_recipe, train


def train_digits(path: Path, method: str, *settings: str, epochs: int = 1) -> Path:
    """Train a method on the digits, on the CPU; return the run's directory."""
    recipe = load_recipe(f"digits-{method}", [f"train.epochs={epochs}", *settings])
    train(recipe, path, device=torch.device("cpu"))
    return path
