"""Images, and batches of them where they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch.utils.data import Dataset

from sparsam.data.augment import Augmentation
from sparsam.data.cifar import load_cifar
from sparsam.data.digits import load_digits
from sparsam.data.image_folder import FolderLoader
from sparsam.data.loaders import WHOLE, Batch, Part, ResidentLoader


class Loader(Protocol):
    """What a trainer needs of data."""

    steps: int
    part: Part

    @property
    def classes(self) -> int:
        """The number of classes."""

    @property
    def channels(self) -> int:
        """Channels of an image."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the training batches of an epoch, from batch `start` on."""

    def evaluation(self, batch_size: int = 1000) -> Iterator[Batch]:
        """Yield the images to evaluate on, without augmentation."""

    def samples(self) -> Dataset[Batch]:
        """Return the training images as a map-style data set, without augmentation."""


__all__ = [
    "WHOLE",
    "Augmentation",
    "Batch",
    "FolderLoader",
    "Loader",
    "Part",
    "ResidentLoader",
    "load_cifar",
    "load_digits",
]
