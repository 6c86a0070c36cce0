"""Images that fit into memory: kept as bytes on the training device, augmented there in batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsam.errors import UserValueError
from sparsam.randomness import random_generator

SPLIT, LIMIT = 2, 3  # streams of random numbers that no loader uses


@dataclass(frozen=True)
class Images:
    """Bytes (N, C, H, W) and labels (N)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: Tensor) -> Images:
        return Images(self.x[index], self.y[index])

    def to(self, device: torch.device) -> Images:
        """Return the same images on another device."""
        return Images(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class ImageData:
    """A data set: images to train on, images to evaluate on, and how to normalise them."""

    name: str
    train: Images
    test: Images
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.train.x.shape[1]

    def with_validation(self, count: int, seed: int) -> ImageData:
        """Return the data with `count` training images, drawn at random, in place of the test images."""
        held_out, rest = validation_split(len(self.train), count, seed, self.name)
        return replace(self, train=self.train[rest], test=self.train[held_out])

    def limited(self, count: int) -> ImageData:
        """Return at most `count` images to train on and as many to evaluate on, the first of a fixed shuffle."""
        train, test = (images[shuffled(len(images))[:count]] for images in (self.train, self.test))
        return replace(self, train=train, test=test)

    def to(self, device: torch.device) -> ImageData:
        """Return the same data on another device."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def validation_split(total: int, count: int, seed: int, name: str) -> tuple[Tensor, Tensor]:
    """Return the indices of `count` of `total` images, drawn at random, and of the rest, both sorted."""
    if not 0 < count < total:
        raise UserValueError(f"data.validation must be between 1 and {total - 1} for {name}, but is {count}")
    order = torch.randperm(total, generator=random_generator(seed, SPLIT))
    return order[:count].sort().values, order[count:].sort().values


def shuffled(total: int) -> Tensor:
    """Return indices in a fixed order, the same for every run."""
    return torch.randperm(total, generator=random_generator(0, LIMIT))
