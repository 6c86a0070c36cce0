"""ImageNet and anything laid out like it: train/CLASS/*.JPEG and val/CLASS/*.JPEG, decoded in worker processes.

Training images are cropped at random and resized (Szegedy et al., 2015), and mirrored; test images are resized and
cropped at the centre. All randomness depends on (seed, epoch, image) alone: a run can be taken up anywhere, and the
number of workers changes nothing.

An image that cannot be decoded is an error that names the file, unless `skip_corrupt` is set; then the image after it,
in the order of the files, takes its place, with a warning that names the file.
"""

from __future__ import annotations

import io
import math
import os
import signal
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sparsam.checks import check_whole
from sparsam.data.augment import normalise
from sparsam.data.images import shuffled, validation_split
from sparsam.data.loaders import AUGMENT, ORDER, Batch
from sparsam.errors import UserError, UserValueError, need
from sparsam.randomness import random_generator

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # share of the area and width / height of a random crop
TRIES = 10  # to find a random crop that fits
IN_A_ROW = 100  # so many images that cannot be decoded are no accident

Pixels = Any  # a Pillow image; Pillow is imported only where image folders are used


class ImageFolderError(UserError):
    """An image folder that cannot be used; the message says which file or folder and what to do."""


@dataclass(frozen=True)
class ImageFiles:
    """Image files and their labels.

    Args:
        folder: train/ or val/.
        names: CLASS/FILE of each image, as bytes in one array: each worker would copy a list of a million strings.
        y: The labels.
    """

    folder: Path
    names: np.ndarray[Any, np.dtype[np.bytes_]]
    y: np.ndarray[Any, np.dtype[np.int64]]

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: np.ndarray[Any, Any]) -> ImageFiles:
        """Return some of the files."""
        return ImageFiles(self.folder, self.names[indices], self.y[indices])

    def path(self, index: int) -> Path:
        """Return where an image lies."""
        return self.folder / os.fsdecode(self.names[index])


class ImageFolder(NamedTuple):
    """A data set: which files to train on, which to evaluate on, and what the labels mean."""

    train: ImageFiles
    test: ImageFiles
    classes: tuple[str, ...]

    def with_validation(self, count: int, seed: int) -> ImageFolder:
        """Return the data with `count` training images, drawn at random, in place of the test images."""
        held_out, rest = validation_split(len(self.train), count, seed, "the image folder")
        return self._replace(train=self.train.take(rest.numpy()), test=self.train.take(held_out.numpy()))

    def limited(self, count: int) -> ImageFolder:
        """Return at most `count` images to train on and as many to evaluate on, the first of a fixed shuffle."""
        train, test = (files.take(shuffled(len(files))[:count].numpy()) for files in (self.train, self.test))
        return self._replace(train=train, test=test)


def load_image_folder(root: str | Path) -> ImageFolder:
    """List the images of root/train/CLASS/ and root/val/CLASS/; what starts with a dot is not looked at.

    Args:
        root: The folder that holds train/ and val/. The sorted folder names of train/ are the classes.
    """
    root = Path(root)
    for folder in (root, root / "train", root / "val"):
        if not folder.is_dir():
            raise ImageFolderError(
                f"there is no folder {folder}. data.root must hold train/CLASS/*.JPEG and val/CLASS/*.JPEG, one folder "
                "for each class"
            )
    names = _class_names(root / "train")
    unknown = sorted(set(_class_names(root / "val")) - set(names))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ImageFolderError(
            f"{root / 'val' / unknown[0]}{more} without a counterpart in {root / 'train'}: the classes in val/ must be "
            "among those in train/"
        )
    return ImageFolder(_list_images(root / "train", names), _list_images(root / "val", names), names)


def _class_names(folder: Path) -> tuple[str, ...]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise ImageFolderError(
            f"{folder} holds no class folders. Images must lie at {folder / 'CLASS'}/*.JPEG, one folder for each class"
        )
    return tuple(names)


def _list_images(folder: Path, names: tuple[str, ...]) -> ImageFiles:
    files: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        if not (folder / name).is_dir():
            continue  # of val/: a class without test images
        found = sorted(entry.name for entry in os.scandir(folder / name) if _is_image(entry))
        if not found:
            raise ImageFolderError(
                f"{folder / name} holds no images ({', '.join(sorted(SUFFIXES))}); fill it, or remove the class from "
                "train/ and val/"
            )
        files += [os.fsencode(f"{name}/{file}") for file in found]
        labels += [label] * len(found)
    return ImageFiles(folder, np.array(files, dtype=np.bytes_), np.array(labels, dtype=np.int64))


def _is_image(entry: os.DirEntry[str]) -> bool:
    suffix = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122 (a Path for each of a million files takes seconds)
    return suffix in SUFFIXES and not entry.name.startswith(".") and entry.is_file()


class FolderLoader:
    """Batches of images that are decoded by worker processes and normalised on the device.

    Every epoch is a new order, of which the last incomplete batch is left out, so that all batches have one shape.
    Workers start with the first batch and live as long as the loader; they serve training and evaluation.

    Args:
        root: The folder that holds train/CLASS/*.JPEG and val/CLASS/*.JPEG.
        batch_size: Images in a training batch.
        seed: Where the random numbers start.
        device: Where the batches are needed.
        image_size: Height and width of all batches.
        resize: The shorter side of a test image, before its centre is cropped out.
        workers: Processes that decode; 0: this one does.
        validation: Evaluate on so many training images, drawn at random, in place of val/; 0: on val/.
        validation_seed: Which ones.
        limit: At most so many images to train on, and as many to evaluate on; None: all.
        skip_corrupt: Take the next image, with a warning, where one cannot be decoded. In an evaluation too, where that
            image then counts twice.
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
    ) -> None:
        need("PIL.Image", "image folders", extra="train")  # here, and not only in a worker
        check_whole("data.batch_size", batch_size)
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
        self.mean, self.std = torch.tensor(MEAN, device=device), torch.tensor(STD, device=device)
        self.steps = len(data.train) // batch_size
        self.decoder = _Decoder(data, seed, image_size, resize, skip_corrupt)
        self.workers = _Workers(self.decoder, workers, pin_memory=device.type == "cuda")
        self._warned: set[str] = set()

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.data.classes)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the training batches of an epoch, from batch `start` on."""
        order = torch.randperm(len(self.data.train), generator=random_generator(self.seed, epoch, ORDER))
        chosen = order[: self.steps * self.batch_size].view(self.steps, self.batch_size)[start:]
        return self._batches(_Request("train", indices.tolist(), epoch) for indices in chosen)

    def evaluation(self, batch_size: int = 250) -> Iterator[Batch]:
        """Yield the images to evaluate on, in order and without augmentation."""
        chosen = torch.split(torch.arange(len(self.data.test)), batch_size)
        return self._batches(_Request("test", indices.tolist()) for indices in chosen)

    def samples(self) -> Dataset[Batch]:
        """Return the training images as a map-style data set, as an evaluation would see them."""
        return _Samples(self)

    def _batches(self, requests: Iterable[_Request]) -> Iterator[Batch]:
        for answer in self.workers(requests):
            x, y = self.take(answer)
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            yield normalise(x.permute(0, 3, 1, 2), self.mean, self.std), y

    def take(self, answer: _Decoded | ImageFolderError) -> Batch:
        """Return bytes (N, H, W, C) and labels; warn of what was skipped, once for each file."""
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
        x, y = self.loader.take(self.loader.decoder[_Request("train", [index])])
        return normalise(x[0].permute(2, 0, 1), torch.tensor(MEAN), torch.tensor(STD)), y[0]


class _Request(NamedTuple):
    """A batch that is wanted. It says all there is to know, so that workers need not be told when an epoch begins."""

    part: str
    indices: list[int]
    epoch: int | None = None  # none: as for an evaluation


class _Decoded(NamedTuple):
    """Bytes (N, H, W, C), labels, and the files in whose place others were taken, each with the reason."""

    x: Tensor
    y: Tensor
    skipped: list[tuple[str, str]]


class _Workers:
    """Decodes batches ahead of their use, in processes that live on between epochs.

    A loader that is done is kept for the next call. While it is in use, a call gets a new one, so that iterations do
    not disturb each other.
    """

    def __init__(self, decoder: _Decoder, count: int, *, pin_memory: bool) -> None:
        self.decoder, self.count, self.pin_memory = decoder, count, pin_memory
        self.loaders: dict[_Requests, DataLoader[Any]] = {}
        self.idle: list[_Requests] = []
        # Cyclic garbage collection takes a DataLoader's queues apart before the workers are told to end, and then waits
        # 5 seconds for each of them. This reference lets go of the loaders before.
        weakref.finalize(self, self.loaders.clear)

    def __call__(self, requests: Iterable[_Request]) -> Iterator[_Decoded | ImageFolderError]:
        queue = self.idle.pop() if self.idle else self._start()
        queue.requests = requests
        try:
            yield from self.loaders[queue]
        except GeneratorExit:  # an iteration that is broken off is as good as one that ended
            self.idle.append(queue)
            raise
        except BaseException:
            self.loaders.pop(queue, None)
            raise
        self.idle.append(queue)

    def _start(self) -> _Requests:
        queue = _Requests()
        self.loaders[queue] = DataLoader(
            self.decoder,
            batch_size=None,  # a request is a whole batch
            sampler=queue,
            num_workers=self.count,
            collate_fn=_as_it_is,
            pin_memory=self.pin_memory,
            worker_init_fn=_leave_interrupts,
            generator=torch.Generator(),  # a DataLoader draws a seed: not from the random numbers of the training
            persistent_workers=self.count > 0,
        )
        return queue


class _Requests:
    """What a DataLoader takes for its sampler."""

    requests: Iterable[_Request] = ()

    def __iter__(self) -> Iterator[_Request]:
        return iter(self.requests)


def _as_it_is(answer: Any) -> Any:
    return answer


def _leave_interrupts(worker: int) -> None:
    """Ignore Ctrl-C, which reaches all processes: the main one decides, and may need more batches until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Decoder(Dataset[Any]):
    """From requests to decoded, cropped and resized batches; runs in workers."""

    def __init__(self, data: ImageFolder, seed: int, image_size: int, resize: int, skip_corrupt: bool) -> None:
        self.data, self.seed, self.image_size, self.resize = data, seed, image_size, resize
        self.skip_corrupt = skip_corrupt

    def __getitem__(self, request: _Request) -> _Decoded | ImageFolderError:
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
            return error  # raised here, it would arrive wrapped in the worker's traceback
        return _Decoded(torch.stack(images), torch.tensor(labels), skipped)

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
    """A file that can be read but is no image; the message is Pillow's."""


def decode(path: Path) -> Pixels:
    """Return an image in RGB, whatever its colours are stored as."""
    try:
        content = path.read_bytes()  # by itself, so that a broken disk is not taken for a corrupt image and skipped
    except OSError as error:
        raise ImageFolderError(f"{path} cannot be read ({error.strerror})") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd EXIF data and the like do not concern the pixels
            image = _pillow().open(io.BytesIO(content))
            if image.mode[0] == "I":  # grey of 16 bits, of which Pillow would make white
                image = _pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
            return image.convert("RGB")
    except Exception as error:  # a corrupt image raises almost anything
        reason = "no image format that Pillow knows" if "cannot identify" in str(error) else str(error)
        raise CorruptImageError(reason or type(error).__name__) from error


def random_resized_crop(image: Pixels, size: int, generator: torch.Generator) -> Pixels:
    """Return a random part of the image, resized to size × size."""
    left, top, width, height = crop_box(image.width, image.height, generator)
    # Cropped first: Pillow's resize with a box lets the pixels around the box shine in.
    part = image.crop((left, top, left + width, top + height))
    return part.resize((size, size), _pillow().Resampling.BILINEAR)


def crop_box(width: int, height: int, generator: torch.Generator) -> tuple[int, int, int, int]:
    r"""Return left, top, width and height of a random crop.

    With :math:`a` uniform in [0.08, 1] and :math:`\log r` uniform in :math:`[\log 3/4, \log 4/3]`, a crop of an image
    of :math:`W \times H` pixels has :math:`\sqrt{a W H r} \times \sqrt{a W H / r}` pixels, rounded, and lies anywhere.
    Ten tries to find one that fits; then the largest centre crop with a ratio in [3/4, 4/3].
    """
    # All tries are drawn at once, so that what is drawn after them does not depend on how many were needed.
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
    """Return the centre, size × size, of the image whose shorter side was resized to `resize`."""
    shorter = min(image.width, image.height)
    width, height = resize * image.width // shorter, resize * image.height // shorter
    image = image.resize((width, height), _pillow().Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def _pillow() -> Any:
    return need("PIL.Image", "image folders", extra="train")
