"""ImageNet and anything laid out like it: batches that worker processes decode.

All randomness depends on (seed, epoch, image) alone: a run can be resumed anywhere, and the number of workers changes
nothing.

An image that cannot be decoded is an error that names the file, unless `skip_corrupt` is set. Then the image after it,
in the order of the files, takes its place, and a warning names the file.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset

from sparsam.checks import check_whole
from sparsam.data.augment import normalise
from sparsam.data.decoding import Decoded, Decoder, Request
from sparsam.data.image_files import ImageFolderError, load_image_folder
from sparsam.data.loaders import ORDER, WHOLE, Batch, Part
from sparsam.data.workers import Workers
from sparsam.errors import UserValueError, need
from sparsam.randomness import random_generator

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


class FolderLoader:
    """Batches of images that worker processes decode and the device normalises.

    Every epoch has a new order. The last, incomplete batch is dropped, so that all batches have one shape. Workers
    start with the first batch and live as long as the loader. They serve training and evaluation.

    Args:
        root: The folder that holds train/CLASS/*.JPEG and val/CLASS/*.JPEG.
        batch_size: Images in a training batch.
        seed: The seed of order and augmentation.
        device: Where the batches are needed.
        image_size: Height and width of all images in batches.
        resize: The shorter side of a test image before its centre is cropped.
        workers: The number of processes that decode; 0: this process decodes.
        validation: Evaluate on so many training images, drawn at random, and not on val/; 0: on val/.
        validation_seed: The seed of that draw.
        limit: At most so many images to train on, and as many to evaluate on; None: all.
        skip_corrupt: If an image cannot be decoded, take the next one, with a warning. In an evaluation that image then
            counts twice.
        part: What this process gets of each batch. It decodes nothing else.
    """

    channels = 3

    def __init__(
        self,
        root: str | Path,
        batch_size: int,
        *,
        seed: int,
        device: torch.device,
        image_size: int = 224,
        resize: int = 256,
        workers: int = 4,
        validation: int = 0,
        validation_seed: int = 0,
        limit: int | None = None,
        skip_corrupt: bool = False,
        part: Part = WHOLE,
    ) -> None:
        need("PIL.Image", "image folders", extra="train")  # here, not only in a worker
        check_whole("data.batch_size", batch_size)
        part.check(batch_size)
        check_whole("data.image_size", image_size)
        check_whole("data.workers", workers, least=0)
        if resize < image_size:
            raise UserValueError(f"data.resize must be at least data.image_size, {image_size}, but is {resize}")
        data = load_image_folder(root)
        if validation:
            data = data.with_validation(validation, validation_seed)
        if limit is not None:
            data = data.limited(limit)
        if batch_size > len(data.train):
            raise ImageFolderError(
                f"data.batch_size must be at most the number of training images in {data.train.folder}, "
                f"{len(data.train)}, but is {batch_size}"
            )
        self.data, self.batch_size, self.seed, self.device = data, batch_size, seed, device
        # Of a row of pixels. A CPU is slow in steps of three channels.
        self.mean, self.std = (torch.tensor(t, device=device).repeat(image_size) for t in (MEAN, STD))
        self.steps = len(data.train) // batch_size
        self.decoder = Decoder(data, seed, image_size, resize, skip_corrupt)
        self.workers = Workers(self.decoder, workers, pin_memory=device.type == "cuda")
        self.part = part
        self._warned: set[str] = set()

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.data.classes)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the training batches of an epoch, from batch `start` on."""
        order = torch.randperm(len(self.data.train), generator=random_generator(self.seed, epoch, ORDER))
        chosen = order[: self.steps * self.batch_size].view(self.steps, self.batch_size)[
            start:, self.part.of(self.batch_size)
        ]
        return self._batches(Request("train", indices.tolist(), epoch) for indices in chosen)

    def evaluation(self, batch_size: int = 250) -> Iterator[Batch]:
        """Yield the images to evaluate on, in order and without augmentation."""
        chosen = torch.split(torch.arange(len(self.data.test))[self.part.of_all()], batch_size)
        return self._batches(Request("test", indices.tolist()) for indices in chosen if len(indices))

    def samples(self) -> Dataset[Batch]:
        """Return the training images as a map-style data set, as an evaluation would see them."""
        return _Samples(self)

    def _batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        for answer in self.workers(requests):
            x, y = self.take(answer)
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            n, height, width, channels = x.shape
            rows = normalise(x.view(n * height, width * channels, 1, 1), self.mean, self.std)
            yield rows.view(x.shape).permute(0, 3, 1, 2), y

    def take(self, answer: Decoded | ImageFolderError) -> Batch:
        """Return bytes (N, H, W, C) and labels. Warn once of each file that was skipped."""
        if isinstance(answer, ImageFolderError):
            raise answer
        for path, reason in answer.skipped:
            if path not in self._warned:
                self._warned.add(path)
                warnings.warn(f"{path} cannot be decoded ({reason}); the next image takes its place", stacklevel=3)
        return answer.x, answer.y


class _Samples(Dataset[Batch]):
    def __init__(self, loader: FolderLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader.data.train)

    def __getitem__(self, index: int) -> Batch:
        x, y = self.loader.take(self.loader.decoder[Request("train", [index])])
        return normalise(x[0].permute(2, 0, 1), torch.tensor(MEAN), torch.tensor(STD)), y[0]
