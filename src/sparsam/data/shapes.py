"""The shapes and sizes of the data sets that recipes name, for what needs no images."""

from __future__ import annotations

from typing import NamedTuple


class Images(NamedTuple):
    """What a network is built for."""

    channels: int
    size: int
    classes: int


SHAPES = {
    "digits": Images(1, 8, 10),
    "cifar10": Images(3, 32, 10),
    "cifar100": Images(3, 32, 100),
    "imagefolder": Images(3, 224, 1000),
}

TRAINING_IMAGES = {"digits": 1200, "cifar10": 50_000, "cifar100": 50_000, "imagefolder": 1_281_167}  # ImageNet's folder
