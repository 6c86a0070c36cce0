"""The files of an image folder: train/CLASS/*.JPEG and val/CLASS/*.JPEG, and their labels."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparsam.data.images import shuffled, validation_split
from sparsam.errors import UserError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})


class ImageFolderError(UserError):
    """An image folder that cannot be used. The message names the file or folder and what to do."""


@dataclass(frozen=True)
class ImageFiles:
    """Image files and their labels.

    Args:
        folder: train/ or val/.
        names: CLASS/FILE of each image, as bytes in one array. Each worker would copy a list of a million strings.
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
    """A data set: the files to train on, the files to evaluate on, and the names of the classes."""

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
    """List the images of root/train/CLASS/ and root/val/CLASS/. Names that start with a dot are left out.

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
            f"{root / 'val' / unknown[0]}{more} without a folder of that name in {root / 'train'}: the classes in val/ "
            "must be among those in train/"
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
            continue  # in val/: a class without test images
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
