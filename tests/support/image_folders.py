"""An image folder of smooth pictures, and its loader."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsam.data.image_folder import MEAN, STD, FolderLoader

Image = pytest.importorskip("PIL.Image", reason="image folders need Pillow: pip install 'sparsam[train]'")
SIZE, RESIZE, BATCH = 16, 20, 4
TRAIN, VAL = {"ant": 5, "bee": 4, "cat": 6}, {"ant": 2, "cat": 3}
COUNT = sum(TRAIN.values())
REAL = Path(os.environ.get("SPARSAM_DATA", "")) / "imagefolder-mini"
real_images = pytest.mark.skipif(
    not (os.environ.get("SPARSAM_DATA") and REAL.is_dir()),
    reason="needs real JPEGs: SPARSAM_DATA names no folder that holds imagefolder-mini",
)


def picture(seed: int, width: int = 40, height: int = 30) -> np.ndarray:
    """A smooth picture, which JPEG keeps nearly as it is."""
    angles = np.random.default_rng(seed).uniform(1, 5, (3, 3))
    rows, columns = np.mgrid[0:height, 0:width] / 20
    waves = [np.sin(a * rows + b * columns + c) for a, b, c in angles]
    return np.uint8(127.5 + 120 * np.stack(waves, axis=2))


def make_folder(root: Path) -> Path:
    seed = 0
    for part, counts in (("train", TRAIN), ("val", VAL)):
        for name, count in counts.items():
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                seed += 1
                image = Image.fromarray(picture(seed, width=30 + 3 * i, height=40 - 2 * i))
                image.save(root / part / name / f"{i}{'.JPEG' if i % 2 else '.png'}")
    return root


def loader(root: Path, batch_size: int = BATCH, **options) -> FolderLoader:
    options = {"seed": 3, "image_size": SIZE, "resize": RESIZE, "workers": 0, **options}
    return FolderLoader(root, batch_size, device=torch.device("cpu"), **options)


def equal(one, other) -> bool:
    return len(one) == len(other) and all(a.equal(b) and c.equal(d) for (a, c), (b, d) in zip(one, other, strict=True))


def normalised(image) -> np.ndarray:
    """(x / 255 - mean) / std in float64, channels first."""
    x = np.asarray(image, dtype=np.float64)
    return np.stack([(x[..., c] / 255 - MEAN[c]) / STD[c] for c in range(3)])


def opened(path: Path):
    with Image.open(path) as image:
        image.load()
    return image


def files(root: Path, part: str) -> list[tuple[Path, int]]:
    """All files in order with their labels."""
    return [
        (path, label) for label, name in enumerate(sorted(TRAIN)) for path in sorted((root / part / name).glob("*.*"))
    ]
