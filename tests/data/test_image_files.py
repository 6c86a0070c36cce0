"""Image folders: which files are found, with which labels, and what is refused."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
from image_folders import BATCH, COUNT, Image, files, loader, opened, picture

from sparsam.data.decoding import decode
from sparsam.data.image_files import ImageFolderError, load_image_folder


def test_the_sorted_folders_are_the_classes(shared_root):
    data = load_image_folder(shared_root)
    assert data.classes == ("ant", "bee", "cat")
    for part, found in (("train", data.train), ("val", data.test)):
        wanted = files(shared_root, part)
        assert [(found.path(i), found.y[i]) for i in range(len(found))] == wanted
    loading = loader(shared_root)
    assert (loading.classes, loading.channels, loading.steps) == (3, 3, COUNT // BATCH)


def test_validation_takes_training_images_in_place_of_val(shared_root):
    whole = loader(shared_root, 2)
    split = loader(shared_root, 2, validation=5, validation_seed=1)
    paths = [[data.path(i) for i in range(len(data))] for data in (split.data.train, split.data.test, whole.data.train)]
    rest, held_out, everything = map(set, paths)
    assert len(held_out) == 5
    assert rest | held_out == everything
    assert not rest & held_out
    assert split.steps == len(rest) // 2
    assert sum(len(y) for _, y in split.evaluation()) == 5
    other = loader(shared_root, 2, validation=5, validation_seed=2).data.test
    assert paths[1] != [other.path(i) for i in range(5)]
    with pytest.raises(ValueError, match=r"data\.validation must be between 1 and"):
        loader(shared_root, 2, validation=len(everything))


def test_other_files_and_hidden_ones_are_not_looked_at(root):
    before = load_image_folder(root)
    (root / "train" / "notes.txt").write_text("not a class")
    (root / "train" / ".cache").mkdir()
    (root / "train" / "ant" / "notes.txt").write_text("not an image")
    (root / "train" / "ant" / "._0.png").write_bytes(b"not an image")
    (root / "train" / "ant" / "folder.png").mkdir()
    after = load_image_folder(root)
    assert after.classes == before.classes
    assert (after.train.names == before.train.names).all()


def test_suffixes_in_any_case(root):
    for suffix in ("jpg", "JPG", "jpeg", "Png", "webp", "bmp"):
        Image.fromarray(picture(0)).save(root / "train" / "bee" / f"a.{suffix}")
    assert len(load_image_folder(root).train) == COUNT + 6


def test_odd_file_names(root):
    Image.fromarray(picture(0)).save(root / "train" / "ant" / "ä 漢 .png")
    wanted = np.asarray(opened(root / "train" / "ant" / "ä 漢 .png"))
    data = load_image_folder(root)
    found = [data.train.path(i) for i in range(len(data.train)) if "漢" in data.train.path(i).name]
    assert (np.asarray(decode(found[0])) == wanted).all()


@pytest.mark.parametrize("part", ["", "train", "val"])
def test_a_missing_folder(root, part):
    shutil.rmtree(root / part)
    message = (
        f"there is no folder {root / part}. data.root must hold train/CLASS/*.JPEG and val/CLASS/*.JPEG, one folder for "
        "each class"
    )
    with pytest.raises(ImageFolderError, match=f"^{re.escape(message)}$"):
        loader(root)


@pytest.mark.parametrize("part", ["train", "val"])
def test_no_class_folders(root, part):
    shutil.rmtree(root / part)
    (root / part).mkdir()
    Image.fromarray(picture(0)).save(root / part / "ILSVRC2012_val_00000001.JPEG")
    message = (
        f"{root / part} holds no class folders. Images must lie at {root / part / 'CLASS'}/*.JPEG, one folder for each "
        "class"
    )
    with pytest.raises(ImageFolderError, match=f"^{re.escape(message)}$"):
        loader(root)


@pytest.mark.parametrize("part", ["train", "val"])
def test_a_class_without_images(root, part):
    for path in (root / part / "cat").iterdir():
        path.rename(path.with_suffix(".txt"))
    message = (
        f"{root / part / 'cat'} holds no images (.bmp, .jpeg, .jpg, .png, .webp); fill it, or remove the class from train/ "
        "and val/"
    )
    with pytest.raises(ImageFolderError, match=f"^{re.escape(message)}$"):
        loader(root)


@pytest.mark.parametrize(("extra", "more"), [(["dog"], ""), (["emu", "dog", "fox"], " and 2 more")])
def test_a_class_only_in_val(root, extra, more):
    for name in extra:
        shutil.copytree(root / "val" / "ant", root / "val" / name)
    message = (
        f"{root / 'val' / 'dog'}{more} without a folder of that name in {root / 'train'}: the classes in val/ must be among those in "
        "train/"
    )
    with pytest.raises(ImageFolderError, match=f"^{re.escape(message)}$"):
        loader(root)
