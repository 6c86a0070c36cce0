"""Tests that need real images: SPARSAM_DATA names the folder that holds them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparsam.data.cifar import LAYOUTS

DATA = Path(os.environ.get("SPARSAM_DATA", "none"))


def needs_cifar(name: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test, saying so, where a CIFAR data set is not there."""
    folder = LAYOUTS[name].folder
    return pytest.mark.skipif(
        not (DATA / folder).is_dir(), reason=f"needs real images: SPARSAM_DATA names no folder that holds {folder}"
    )
