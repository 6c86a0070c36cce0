"""Runs that were really trained: small networks on the digits, an epoch or two."""

from __future__ import annotations

from pathlib import Path

import torch
from commands import ROOT

from sparsam.training import load_recipe, train


def recipe_file(method: str) -> Path:
    """Return the recipe of a method for the digits."""
    return ROOT / "recipes" / f"digits-{method}.toml"


def train_digits(path: Path, method: str, *settings: str, epochs: int = 1) -> Path:
    """Train a method on the digits, on the CPU; return the run's directory."""
    recipe = load_recipe(recipe_file(method), [f"train.epochs={epochs}", *settings])
    train(recipe, path, device=torch.device("cpu"))
    return path
