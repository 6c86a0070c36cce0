"""CIFAR in the official layouts: read without executing anything, and refused with its own message for each kind of damage."""

from __future__ import annotations

import builtins
import os
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from real_images import DATA, needs_cifar

from sparsam.data import cifar
from sparsam.data.cifar import LAYOUTS, CifarError, load_cifar
from sparsam.data.images import ImageData

SMALL = {"cifar10": (50, 20), "cifar100": (200, 100)}  # images to train and to test on, in place of 50,000 and 10,000
NAMES = sorted(SMALL)
FILE = {"cifar10": "data_batch_3", "cifar100": "train"}  # one to damage


REAL = [pytest.param(name, marks=needs_cifar(name)) for name in NAMES]


def python2(value: object) -> bytes:
    """What Python 2 and the NumPy of its time wrote by protocol 2, as in the official files; here strings are bytes."""

    def write(value: object) -> bytes:
        match value:
            case None:
                return b"N"
            case bool():
                return b"\x88" if value else b"\x89"
            case int():
                return b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)
            case bytes():
                return (
                    b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<i", len(value))
                ) + value
            case tuple():
                return b"(" + b"".join(map(write, value)) + b"t"
            case list():
                return b"](" + b"".join(map(write, value)) + b"e"
            case dict():
                return b"}(" + b"".join(write(key) + write(item) for key, item in value.items()) + b"u"
            case np.ndarray():
                dtype = b"cnumpy\ndtype\n" + write((value.dtype.str[1:].encode(), 0, 1)) + b"R"
                dtype += write((3, b"|", None, None, None, -1, -1, 0)) + b"b"
                empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + write((0,)) + write(b"b") + b"tR"
                return (
                    empty + b"(" + write(1) + write(value.shape) + dtype + write(False) + write(value.tobytes()) + b"tb"
                )
        raise TypeError(type(value))

    return b"\x80\x02" + write(value) + b"."


FORMATS: dict[str, Callable[[object], bytes]] = {
    "python 2": python2,
    "protocol 2": lambda value: pickle.dumps(value, protocol=2),
    "protocol 4": lambda value: pickle.dumps(value, protocol=4),
}


def contents(name: str) -> dict[str, dict[bytes, object]]:
    """What the files hold, all classes equally often."""
    layout, random = LAYOUTS[name], np.random.default_rng(0)
    files: dict[str, dict[bytes, object]] = {}
    for part, count in zip((layout.train, layout.test), SMALL[name], strict=True):
        labels = random.permutation(np.arange(count) % layout.classes).reshape(len(part), -1).tolist()
        for file, y in zip(part, labels, strict=True):
            data = random.integers(0, 256, (len(y), 3072), dtype=np.uint8)
            names = [b"image_%d.png" % i for i in range(len(y))]
            files[file] = {b"batch_label": file.encode(), layout.labels: y, b"data": data, b"filenames": names}
            if name == "cifar100":
                files[file][b"coarse_labels"] = [label // 5 for label in y]
    return files


@pytest.fixture
def small(name, monkeypatch):
    monkeypatch.setattr(cifar, "TRAIN", SMALL[name][0])
    monkeypatch.setattr(cifar, "TEST", SMALL[name][1])


def for_each(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with small files of CIFAR-10 and of CIFAR-100."""
    return pytest.mark.usefixtures("small")(pytest.mark.parametrize("name", NAMES)(test))


def write(
    root: Path, name: str, files: dict[str, dict[bytes, object]], dump: Callable[[object], bytes] = python2
) -> Path:
    folder = root / LAYOUTS[name].folder
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_bytes(dump(content))
    return folder


def check_same(data: ImageData, name: str) -> None:
    layout, files = LAYOUTS[name], contents(name)
    for part, images in ((layout.train, data.train), (layout.test, data.test)):
        rows = [row for file in part for row in files[file][b"data"]]
        assert images.x.shape == (len(rows), 3, 32, 32)
        assert images.x.dtype == torch.uint8
        for image, row in zip(images.x.numpy(), rows, strict=True):
            for colour in range(3):  # 1024 reds, 1024 greens, 1024 blues, each from left to right and top to bottom
                assert (image[colour] == row[1024 * colour : 1024 * (colour + 1)].reshape(32, 32)).all()
        assert images.y.tolist() == [label for file in part for label in files[file][layout.labels]]
        assert images.y.dtype == torch.int64


# Loading


@pytest.mark.parametrize("form", FORMATS)
@for_each
def test_loading(tmp_path, name, form):
    folder = write(tmp_path, name, contents(name), FORMATS[form])
    for root in (tmp_path, str(tmp_path), folder, str(folder)):
        data = load_cifar(name, root)
        check_same(data, name)
    layout = LAYOUTS[name]
    assert (data.name, data.classes, data.channels, data.mean, data.std) == (
        name,
        layout.classes,
        3,
        layout.mean,
        layout.std,
    )


@for_each
def test_loading_from_inside_the_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(write(tmp_path, name, contents(name)))
    check_same(load_cifar(name, "."), name)


def test_the_python_2_files_of_these_tests_are_what_python_reads():
    content = contents("cifar10")["test_batch"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)  # NumPy has renamed numpy.core
        read = pickle.loads(python2(content), encoding="bytes")
    assert list(read) == list(content)
    assert (read.pop(b"data") == content.pop(b"data")).all()
    assert read == content


# Refusing


def refused(root: Path, name: str, message: str) -> None:
    with pytest.raises(CifarError, match=f"^{message}$"):
        load_cifar(name, root)


@for_each
def test_a_missing_folder(tmp_path, name):
    layout = LAYOUTS[name]
    message = (
        f"{name} is not at {tmp_path / layout.folder}. Download {layout.archive} from "
        f"https://www.cs.toronto.edu/~kriz/cifar.html, unpack it, and name the folder that holds "
        f"{layout.folder}: --set data.root=DIR"
    )
    refused(tmp_path, name, re.escape(message))
    refused(tmp_path / layout.folder, name, re.escape(message))


@for_each
def test_a_missing_file(tmp_path, name):
    path = write(tmp_path, name, contents(name)) / FILE[name]
    path.unlink()
    refused(tmp_path, name, re.escape(f"{path} is missing; unpack {LAYOUTS[name].archive} again"))


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.99, "last byte"])
@pytest.mark.parametrize("form", FORMATS)
@for_each
def test_a_truncated_file(tmp_path, name, form, share):
    path = write(tmp_path, name, contents(name), FORMATS[form]) / FILE[name]
    content = path.read_bytes()
    path.write_bytes(content[:-1] if share == "last byte" else content[: int(share * len(content))])
    refused(
        tmp_path, name, re.escape(f"{path} is damaged (") + ".+" + re.escape(f"); unpack {LAYOUTS[name].archive} again")
    )


class Calls:
    """A pickle that calls a function when it is read."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("asked", "attack"),
    [
        (f"{os.system.__module__}.system", lambda path: Calls(os.system, f"touch '{path}'")),
        ("builtins.eval", lambda path: Calls(builtins.eval, f"open({str(path)!r}, 'w').close()")),
        ("numpy.savetxt", lambda path: Calls(np.savetxt, str(path), [1])),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
@for_each
def test_a_pickle_that_calls_is_not_executed(tmp_path, name, protocol, asked, attack):
    sentinel = tmp_path / "sentinel"
    files = contents(name)
    files[FILE[name]][b"filenames"] = attack(sentinel)
    path = write(tmp_path, name, files, lambda content: pickle.dumps(content, protocol=protocol)) / FILE[name]
    asked = asked.replace("builtins", "__builtin__") if protocol < 3 else asked  # as Python 2 called them
    refused(tmp_path, name, re.escape(f"{path} is not a CIFAR file: it asks for {asked}. It was not executed"))
    assert not sentinel.exists()
    pickle.loads(path.read_bytes())  # nor was it harmless
    assert sentinel.exists()


@for_each
def test_methods_of_what_is_allowed_are_not(tmp_path, name):
    folder = write(tmp_path, name, contents(name))
    dotted = b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93."
    assert pickle.loads(dotted) is np.ndarray.tofile
    (folder / FILE[name]).write_bytes(dotted)
    message = f"{folder / FILE[name]} is not a CIFAR file: it asks for numpy.ndarray.tofile. It was not executed"
    refused(tmp_path, name, re.escape(message))


def label_count(content, labels):
    content[labels].pop()


def label_missing(content, labels):
    del content[labels]


def label_high(content, labels):
    content[labels][0] = {b"labels": 10, b"fine_labels": 100}[labels]


def label_negative(content, labels):
    content[labels][0] = -1


def label_text(content, labels):
    content[labels][0] = b"7"


def unbalanced(content, labels):
    content[labels][:] = [3 if label == 5 else label for label in content[labels]]


def columns(content, labels):
    content[b"data"] = content[b"data"][:, :-1].copy()


def unfolded(content, labels):
    content[b"data"] = content[b"data"].reshape(-1, 3, 32, 32)


def words(content, labels):
    content[b"data"] = content[b"data"].astype(np.uint16)


def data_missing(content, labels):
    del content[b"data"]


def data_list(content, labels):
    content[b"data"] = content[b"data"].tolist()


def too_few(content, labels):
    content[b"data"] = content[b"data"][1:].copy()
    content[labels].pop(0)


LABELS = "{path} should hold {rows} labels in '{labels}', but does not"
RANGE = "{path} holds a label that is not a whole number from 0 to {highest}"
ARRAY = "{path} should hold an array 'data' of bytes with 3072 columns, but does not"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (label_count, LABELS),
        (label_missing, LABELS),
        (label_high, RANGE),
        (label_negative, RANGE),
        (label_text, RANGE),
        (columns, ARRAY),
        (unfolded, ARRAY),
        (words, ARRAY),
        (data_missing, ARRAY),
        (data_list, ARRAY),
        (too_few, "{files} in {folder} hold {fewer} images, but should hold {count}"),
        (unbalanced, "{files} in {folder} hold {more} images of class 3, but should hold {each} of each class"),
    ],
)
@for_each
def test_wrong_content(tmp_path, name, damage, message):
    layout, files = LAYOUTS[name], contents(name)
    content = files[FILE[name]]
    rows, each = len(content[b"data"]), SMALL[name][0] // layout.classes
    more = each + content[layout.labels].count(5)
    damage(content, layout.labels)
    folder = write(tmp_path, name, files, FORMATS["protocol 4"])
    values = {
        "path": folder / FILE[name],
        "folder": folder,
        "files": ", ".join(layout.train),
        "labels": layout.labels.decode(),
        "rows": rows,
        "highest": layout.classes - 1,
        "count": SMALL[name][0],
        "fewer": SMALL[name][0] - 1,
        "each": each,
        "more": more,
    }
    assert more > each
    refused(tmp_path, name, re.escape(message.format(**values)))


@pytest.mark.parametrize("content", [[], None, 3, np.zeros((2, 3072), dtype=np.uint8)])
@for_each
def test_something_else_than_a_dictionary(tmp_path, name, content):
    folder = write(tmp_path, name, {**contents(name), FILE[name]: content}, FORMATS["protocol 4"])
    refused(tmp_path, name, re.escape(ARRAY.format(path=folder / FILE[name])))


def test_the_other_data_set_is_not_taken_for_this_one(tmp_path):
    write(tmp_path, "cifar100", contents("cifar100")).rename(tmp_path / LAYOUTS["cifar10"].folder)
    refused(tmp_path, "cifar10", re.escape(f"{tmp_path / 'cifar-10-batches-py' / 'data_batch_1'} is missing") + ".*")


# Real images


@pytest.fixture(scope="module")
def loaded() -> dict[str, ImageData]:
    return {}


def load_once(name: str, loaded: dict[str, ImageData]) -> ImageData:
    if name not in loaded:
        loaded.clear()  # one at a time: 180 MB each
        loaded[name] = load_cifar(name, DATA)
    return loaded[name]


@pytest.mark.parametrize("name", REAL)
def test_real_counts(name, loaded):
    data, classes = load_once(name, loaded), LAYOUTS[name].classes
    assert data.train.x.shape == (50_000, 3, 32, 32)
    assert data.test.x.shape == (10_000, 3, 32, 32)
    assert data.train.y.bincount().tolist() == [50_000 // classes] * classes
    assert data.test.y.bincount().tolist() == [10_000 // classes] * classes


@pytest.mark.parametrize("name", REAL)
def test_real_mean_and_deviation(name, loaded):
    data, shades = load_once(name, loaded), np.arange(256) / 255
    for colour in range(3):
        # Counts of the 256 shades are whole numbers, so that the sums below are those of float64 over all pixels.
        counts = np.bincount(data.train.x[:, colour].numpy().ravel(), minlength=256)
        mean = (counts * shades).sum() / counts.sum()
        std = np.sqrt((counts * (shades - mean) ** 2).sum() / counts.sum())
        assert (round(mean, 4), round(std, 4)) == (data.mean[colour], data.std[colour])
