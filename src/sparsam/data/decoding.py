"""From image files to pixels: decode, crop and resize, as worker processes do it.

Training images are cropped at random and resized (Szegedy et al., 2015), and mirrored. Test images are resized and
cropped at the centre. All randomness depends on (seed, epoch, image) alone.
"""

from __future__ import annotations

import io
import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sparsam.data.image_files import ImageFiles, ImageFolder, ImageFolderError
from sparsam.data.loaders import AUGMENT
from sparsam.errors import need
from sparsam.randomness import random_generator

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # share of the area and width / height of a random crop
TRIES = 10  # to find a random crop that fits
IN_A_ROW = 100  # so many corrupt images in a row are an error, even if corrupt ones are skipped

Pixels = Any  # a Pillow image; Pillow is imported only where image folders are used


class Request(NamedTuple):
    """A batch to decode. It holds all that a worker needs, so workers have no state of their own."""

    part: str
    indices: list[int]
    epoch: int | None = None  # None: as for an evaluation


class Decoded(NamedTuple):
    """Bytes (N, H, W, C), labels, and the files that were replaced by others, each with the reason."""

    x: Tensor
    y: Tensor
    skipped: list[tuple[str, str]]


class Decoder(Dataset[Any]):
    """Turns requests into decoded, cropped and resized batches. It runs in workers."""

    def __init__(self, data: ImageFolder, seed: int, image_size: int, resize: int, skip_corrupt: bool) -> None:
        self.data, self.seed, self.image_size, self.resize = data, seed, image_size, resize
        self.skip_corrupt = skip_corrupt

    def __getitem__(self, request: Request) -> Decoded | ImageFolderError:
        files = self.data.train if request.part == "train" else self.data.test
        labels: list[int] = []
        images: list[Tensor] = []
        skipped: list[tuple[str, str]] = []
        try:
            for index in request.indices:
                chosen, image = self._decode(files, index, skipped)
                images.append(torch.from_numpy(np.array(self._transform(image, index, request.epoch))))
                labels.append(int(files.y[chosen]))
        except ImageFolderError as error:
            return error  # if raised, it would arrive wrapped in the worker's traceback
        return Decoded(torch.stack(images), torch.tensor(labels), skipped)

    def _decode(self, files: ImageFiles, index: int, skipped: list[tuple[str, str]]) -> tuple[int, Pixels]:
        tries = min(IN_A_ROW, len(files)) if self.skip_corrupt else 1
        for k in range(tries):
            chosen = (index + k) % len(files)
            path = files.path(chosen)
            try:
                return chosen, decode(path)
            except CorruptImageError as error:
                if not self.skip_corrupt:
                    raise ImageFolderError(
                        f"{path} cannot be decoded ({error}). Replace or remove it, or set data.skip_corrupt = true to "
                        "take the next image in its place"
                    ) from error
                skipped.append((str(path), str(error)))
        raise ImageFolderError(f"{tries} images in a row cannot be decoded; the last of them is {path}")

    def _transform(self, image: Pixels, index: int, epoch: int | None) -> Pixels:
        if epoch is None:
            return resize_and_crop(image, self.resize, self.image_size)
        generator = random_generator(self.seed, epoch, AUGMENT, index)
        image = random_resized_crop(image, self.image_size, generator)
        mirrored = torch.rand((), generator=generator).item() < 0.5
        return image.transpose(_pillow().Transpose.FLIP_LEFT_RIGHT) if mirrored else image


class CorruptImageError(ImageFolderError):
    """A file that can be read but is not an image. The message is Pillow's."""


def decode(path: Path) -> Pixels:
    """Return an image in RGB, whatever its format."""
    try:
        content = path.read_bytes()  # apart from decoding: an unreadable file is not skipped as a corrupt image
    except OSError as error:
        raise ImageFolderError(f"{path} cannot be read ({error.strerror})") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd EXIF data and the like do not affect the pixels
            image = _pillow().open(io.BytesIO(content))
            if image.mode[0] == "I":  # 16-bit grey, which Pillow would convert to white
                image = _pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
            return image.convert("RGB")
    except Exception as error:  # a corrupt image raises almost anything
        reason = "not an image format that Pillow knows" if "cannot identify" in str(error) else str(error)
        raise CorruptImageError(reason or type(error).__name__) from error


def random_resized_crop(image: Pixels, size: int, generator: torch.Generator) -> Pixels:
    """Return a random part of the image, resized to size × size."""
    left, top, width, height = crop_box(image.width, image.height, generator)
    # Crop first: with a box, Pillow's resize would also read pixels around the box.
    part = image.crop((left, top, left + width, top + height))
    return part.resize((size, size), _pillow().Resampling.BILINEAR)


def crop_box(width: int, height: int, generator: torch.Generator) -> tuple[int, int, int, int]:
    r"""Return left, top, width and height of a random crop.

    With :math:`a` uniform in [0.08, 1] and :math:`\log r` uniform in :math:`[\log 3/4, \log 4/3]`, a crop of an image
    of :math:`W \times H` pixels has :math:`\sqrt{a W H r} \times \sqrt{a W H / r}` pixels, rounded, and a uniform
    position. If none of ten crops fits, it is the largest centre crop with a ratio in [3/4, 4/3].
    """
    # All tries are drawn at once, so later draws do not depend on how many tries were needed.
    draws = torch.rand(TRIES, 4, dtype=torch.float64, generator=generator).tolist()
    for area, ratio, x, y in draws:
        share = SCALE[0] + area * (SCALE[1] - SCALE[0])
        aspect = math.exp(math.log(RATIO[0]) + ratio * (math.log(RATIO[1]) - math.log(RATIO[0])))
        w = round(math.sqrt(share * width * height * aspect))
        h = round(math.sqrt(share * width * height / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(x * (width - w + 1)), int(y * (height - h + 1)), w, h
    w = min(width, round(height * RATIO[1]))
    h = min(height, round(width / RATIO[0]))
    return (width - w) // 2, (height - h) // 2, w, h


def resize_and_crop(image: Pixels, resize: int, size: int) -> Pixels:
    """Return the image with its shorter side resized to `resize`, cropped at the centre to size × size."""
    shorter = min(image.width, image.height)
    width, height = resize * image.width // shorter, resize * image.height // shorter
    image = image.resize((width, height), _pillow().Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def _pillow() -> Any:
    return need("PIL.Image", "image folders", extra="train")
