"""Images that say who they are, and their loader."""

from __future__ import annotations

import torch

from sparsam.data.augment import Augmentation
from sparsam.data.images import ImageData, Images
from sparsam.data.loaders import ResidentLoader
from sparsam.selection import random_generator

CPU = torch.device("cpu")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def pictures(n: int, channels: int = 3, height: int = 9, width: int = 7) -> torch.Tensor:
    return torch.randint(0, 256, (n, channels, height, width), dtype=torch.uint8, generator=random_generator(n))


def numbered(train: int = 23, test: int = 7, classes: int = 5) -> ImageData:
    """Images that say who they are: the first two bytes are the number."""

    def images(first: int, count: int) -> Images:
        x, numbers = pictures(count), torch.arange(first, first + count)
        x[:, 0, 0, 0], x[:, 0, 0, 1] = (numbers // 256).byte(), (numbers % 256).byte()
        return Images(x, numbers % classes)

    return ImageData("numbered", images(0, train), images(train, test), classes, MEAN, STD)


def loader(data: ImageData | None = None, batch_size: int = 4, augmentation=None, seed: int = 0) -> ResidentLoader:
    return ResidentLoader(data or numbered(), batch_size, augmentation or Augmentation(), seed=seed, device=CPU)


def numbers(x: torch.Tensor) -> list[int]:
    """Which images of `numbered` these normalised ones are."""
    first = ((x[:, 0, 0, :2] * STD[0] + MEAN[0]) * 255).round().long()
    return (first[:, 0] * 256 + first[:, 1]).tolist()


def equal(one, other) -> bool:
    return len(one) == len(other) and all(a.equal(b) and c.equal(d) for (a, c), (b, d) in zip(one, other, strict=True))


EVERYTHING = Augmentation(crop_padding=2, flip=True, cutout=4, cutout_probability=0.5)
