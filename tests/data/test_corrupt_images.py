"""Images that cannot be decoded: named, or skipped with a warning."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from image_folders import COUNT, REAL, SIZE, equal, files, loader, normalised, opened, real_images

from sparsam.data.decoding import random_resized_crop
from sparsam.data.image_files import ImageFolderError, load_image_folder
from sparsam.data.loaders import AUGMENT, ORDER
from sparsam.selection import random_generator


def damage(path: Path, how: str) -> Path:
    if how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.write_text("<html>404</html>")
    return path


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("how", ["truncated", "empty", "text"])
@pytest.mark.parametrize("name", ["train/bee/1.JPEG", "train/bee/2.png"])
def test_a_corrupt_image_is_named(root, name, how, workers):
    path = damage(root / name, how)
    with pytest.raises(ImageFolderError) as caught:
        list(loader(root, batch_size=COUNT, workers=workers).epoch(0))
    assert str(caught.value).startswith(f"{path} cannot be decoded (")
    assert str(caught.value).endswith(
        "). Replace or remove it, or set data.skip_corrupt = true to take the next image in its place"
    )
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_image_is_skipped_with_one_warning(root, workers):
    """The next image takes its place, cropped and mirrored as the corrupt one would have been."""
    bad = damage(root / "train" / "bee" / "3.JPEG", "truncated")  # the last bee: a cat takes its place
    wanted = files(root, "train")
    index = [path for path, _ in wanted].index(bad)
    loading = loader(root, batch_size=COUNT, workers=workers, skip_corrupt=True)
    with pytest.warns(UserWarning, match=re.escape(str(bad)) + ".*the next image takes its place") as caught:
        [(x, y)] = loading.epoch(0)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    place = torch.randperm(COUNT, generator=random_generator(3, 0, ORDER)).tolist().index(index)
    generator = random_generator(3, 0, AUGMENT, index)
    image = np.asarray(random_resized_crop(opened(wanted[index + 1][0]), SIZE, generator))
    if torch.rand((), generator=generator) < 0.5:
        image = image[:, ::-1]
    np.testing.assert_allclose(x[place], normalised(image), atol=1e-6)
    assert y[place] == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loading.epoch(1))  # the file is not named again
        loading.samples()[index]


def test_the_first_image_comes_after_the_last(root):
    damage(root / "val" / "cat" / "2.png", "text")
    with pytest.warns(UserWarning, match=r"2\.png cannot be decoded"):
        [(x, y)] = loader(root, skip_corrupt=True).evaluation()
    assert x[-1].equal(x[0])
    assert y.tolist() == [0, 0, 2, 2, 0]


def test_samples_name_and_skip_corrupt_images(root):
    damage(root / "train" / "ant" / "0.png", "text")
    with pytest.raises(ImageFolderError, match=r"0\.png cannot be decoded \(not an image format that Pillow knows\)"):
        loader(root).samples()[0]
    samples = loader(root, skip_corrupt=True).samples()
    with pytest.warns(UserWarning, match=r"0\.png"):
        x, y = samples[0]
    assert x.equal(samples[1][0])
    assert y == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_but_corrupt_images(root, workers):
    for path, _ in files(root, "val"):
        damage(path, "text")
    with pytest.raises(ImageFolderError, match=r"^5 images in a row cannot be decoded; the last of them is .*2\.png$"):
        list(loader(root, skip_corrupt=True, workers=workers).evaluation())


def test_a_file_that_cannot_be_read_is_never_skipped(root):
    loading = loader(root, batch_size=COUNT, skip_corrupt=True)
    gone = root / "train" / "cat" / "0.png"
    gone.unlink()
    with pytest.raises(ImageFolderError, match=re.escape(f"{gone} cannot be read (No such file or directory)")):
        list(loading.epoch(0))


def test_a_loader_works_after_an_error(root):
    good = list(loader(root).evaluation())
    path = root / "train" / "bee" / "0.png"
    damage(path, "text")
    loading = loader(root, batch_size=COUNT, workers=1)
    with pytest.raises(ImageFolderError):
        list(loading.epoch(0))
    assert equal(list(loading.evaluation()), good)


@real_images
def test_one_corrupt_image_among_real_ones(tmp_path):
    for part in ("train", "val"):
        for folder in sorted((REAL / part).iterdir())[:3]:
            shutil.copytree(folder, tmp_path / part / folder.name)
    bad = damage(sorted((tmp_path / "train").glob("*/*.JPEG"))[70], "truncated")
    options = {"image_size": 56, "resize": 64, "workers": 2}
    count = len(load_image_folder(tmp_path).train)
    with pytest.raises(ImageFolderError, match=re.escape(f"{bad} cannot be decoded")):
        list(loader(tmp_path, batch_size=count, **options).epoch(0))
    with pytest.warns(UserWarning, match=re.escape(str(bad))) as caught:
        list(loader(tmp_path, batch_size=count, skip_corrupt=True, **options).epoch(0))
    assert len(caught) == 1
