"""CIFAR-10 and CIFAR-100 from the usual folders (the "python version" of the authors' page).

The files are pickles. They are read without executing code: only NumPy arrays and plain values are allowed.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from sparsam.data.images import ImageData, Images
from sparsam.errors import UserError


class Layout(NamedTuple):
    """The files of a data set and what they hold."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: bytes
    classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    archive: str


# Mean and standard deviation of the training images, channel by channel (tests compute them again).
LAYOUTS = {
    "cifar10": Layout(
        "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        ("test_batch",),
        b"labels",
        10,
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        "cifar-10-python.tar.gz",
    ),
    "cifar100": Layout(
        "cifar-100-python",
        ("train",),
        ("test",),
        b"fine_labels",
        100,
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
        "cifar-100-python.tar.gz",
    ),
}
TRAIN, TEST, PIXELS = 50_000, 10_000, 3 * 32 * 32


class CifarError(UserError):
    """A CIFAR folder that is missing or damaged. The message names the file and what to do."""


def load_cifar(name: str, root: str | Path) -> ImageData:
    """Read CIFAR-10 or CIFAR-100.

    Args:
        name: "cifar10" or "cifar100".
        root: The folder that holds `cifar-10-batches-py` or `cifar-100-python`, or that folder itself.
    """
    layout = LAYOUTS[name]
    root = Path(root).absolute()  # so that '.' has a name
    folder = root if root.name == layout.folder else root / layout.folder
    if not folder.is_dir():
        raise CifarError(
            f"{name} is not at {folder}. Download {layout.archive} from https://www.cs.toronto.edu/~kriz/cifar.html, "
            f"unpack it, and name the folder that holds {layout.folder}: --set data.root=DIR"
        )
    train = _read(folder, layout.train, layout, TRAIN)
    test = _read(folder, layout.test, layout, TEST)
    return ImageData(name, train, test, layout.classes, layout.mean, layout.std)


def _read(folder: Path, files: tuple[str, ...], layout: Layout, count: int) -> Images:
    images, labels = zip(*(_read_file(folder / file, layout) for file in files), strict=True)
    x, y = np.concatenate(images), np.concatenate(labels)
    if len(x) != count:
        raise CifarError(f"{', '.join(files)} in {folder} hold {len(x)} images, but should hold {count}")
    found = np.bincount(y, minlength=layout.classes)
    if (found != count // layout.classes).any():
        label = int((found != count // layout.classes).argmax())
        raise CifarError(
            f"{', '.join(files)} in {folder} hold {found[label]} images of class {label}, but should hold "
            f"{count // layout.classes} of each class"
        )
    return Images(torch.from_numpy(x.reshape(-1, 3, 32, 32)), torch.from_numpy(y))


def _read_file(path: Path, layout: Layout) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    if not path.is_file():
        raise CifarError(f"{path} is missing; unpack {layout.archive} again")
    try:
        with path.open("rb") as file:
            content = ArrayUnpickler(file).load()
    except ForbiddenError as error:
        raise CifarError(f"{path} is not a CIFAR file: {error}. It was not executed") from error
    except Exception as error:  # a truncated pickle raises almost anything
        raise CifarError(f"{path} is damaged ({error}); unpack {layout.archive} again") from error
    x, y = (content.get(b"data"), content.get(layout.labels)) if isinstance(content, dict) else (None, None)
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != PIXELS:
        raise CifarError(f"{path} should hold an array 'data' of bytes with {PIXELS} columns, but does not")
    if not isinstance(y, list) or len(y) != len(x):
        raise CifarError(f"{path} should hold {len(x)} labels in {layout.labels.decode()!r}, but does not")
    if not all(isinstance(label, int) and 0 <= label < layout.classes for label in y):
        raise CifarError(f"{path} holds a label that is not a whole number from 0 to {layout.classes - 1}")
    return x, np.array(y, dtype=np.int64)


class ForbiddenError(pickle.UnpicklingError):
    """A pickle asked for something that is not data."""


class ArrayUnpickler(pickle.Unpickler):
    """Builds NumPy arrays and plain values, and refuses anything else."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        """Return one of NumPy's constructors. Their places differ between versions of NumPy."""
        if module == "_codecs" and name == "encode":  # how protocol 2 writes bytes
            return lambda text, encoding: text.encode(encoding)
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":  # protocol 5
            return lambda buffer, dtype, shape, order: np.frombuffer(buffer, dtype).reshape(shape, order=order)
        raise ForbiddenError(f"it asks for {module}.{name}")
