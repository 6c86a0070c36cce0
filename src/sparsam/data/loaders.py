"""Batches of images that live on the training device.

All randomness depends on (seed, epoch, batch) alone, so a run can be resumed anywhere without any saved state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from sparsam.data.augment import Augmentation, normalise
from sparsam.data.images import ImageData
from sparsam.errors import UserValueError
from sparsam.randomness import random_generator

ORDER, AUGMENT = range(2)  # two streams of random numbers
Batch = tuple[Tensor, Tensor]


class Part(NamedTuple):
    """What one of several processes gets of each batch: the same number of images, other ones than the others."""

    rank: int = 0
    size: int = 1

    def check(self, batch_size: int) -> None:
        """Refuse a batch that cannot be divided evenly."""
        if batch_size % self.size:
            raise UserValueError(
                f"data.batch_size must be a multiple of the number of processes, {self.size}, but is {batch_size}"
            )

    def of(self, batch_size: int) -> slice:
        """Return where in a training batch this part lies."""
        images = batch_size // self.size
        return slice(self.rank * images, (self.rank + 1) * images)

    def of_all(self) -> slice:
        """Return which images this part has of those that are evaluated on: each is in one part."""
        return slice(self.rank, None, self.size)


WHOLE = Part()


class ResidentLoader:
    """Shuffles, augments and normalises images on the device that holds them.

    Every epoch has a new order. The last, incomplete batch is dropped, so that all batches have one shape.

    Args:
        data: The images.
        batch_size: Images in a training batch.
        augmentation: How training images are augmented.
        seed: The seed of order and augmentation.
        device: Where images are kept and batches are made.
        part: What this process gets of each batch. It augments the whole batch, so that random numbers are the same.
    """

    def __init__(
        self,
        data: ImageData,
        batch_size: int,
        augmentation: Augmentation,
        *,
        seed: int,
        device: torch.device,
        part: Part = WHOLE,
    ) -> None:
        part.check(batch_size)
        if batch_size > len(data.train):
            raise UserValueError(
                f"data.batch_size must be at most the number of training images, {len(data.train)}, but is {batch_size}"
            )
        self.data, self.batch_size, self.augmentation, self.seed = data.to(device), batch_size, augmentation, seed
        self.device, self.part = device, part
        self.mean, self.std = torch.tensor(data.mean, device=device), torch.tensor(data.std, device=device)
        self.steps = len(data.train) // batch_size

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.data.classes

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.data.channels

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the training batches of an epoch, from batch `start` on."""
        train = self.data.train
        order = torch.randperm(len(train), generator=random_generator(self.seed, epoch, ORDER)).to(self.device)
        for i in range(start, self.steps):
            chosen = order[i * self.batch_size : (i + 1) * self.batch_size]
            generator = random_generator(self.seed, epoch, AUGMENT, i, device=self.device)
            own = self.part.of(self.batch_size)
            yield self.augmentation(train.x[chosen], self.mean, self.std, generator)[own], train.y[chosen[own]]

    def evaluation(self, batch_size: int = 1000) -> Iterator[Batch]:
        """Yield the images to evaluate on, in order and without augmentation."""
        test, own = self.data.test, self.part.of_all()
        for x, y in zip(torch.split(test.x[own], batch_size), torch.split(test.y[own], batch_size), strict=True):
            yield normalise(x, self.mean, self.std), y

    def samples(self) -> Dataset[Batch]:
        """Return the training images as a map-style data set, without augmentation."""
        return _Samples(self)


class _Samples(Dataset[Batch]):
    def __init__(self, loader: ResidentLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader.data.train)

    def __getitem__(self, index: int | Tensor) -> Batch:
        train = self.loader.data.train
        return normalise(train.x[index], self.loader.mean, self.loader.std), train.y[index]

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        """Return several samples at once, as a DataLoader asks for them: a few kernels for all, not for each."""
        x, y = self[torch.as_tensor(indices, dtype=torch.long, device=self.loader.data.train.x.device)]
        return list(zip(x, y, strict=True))
