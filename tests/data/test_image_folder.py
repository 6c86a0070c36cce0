"""Image folders: decoding, cropping and order against direct computation, and what happens to damaged folders."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
import warnings
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsam.data.decoding import crop_box, decode, random_resized_crop, resize_and_crop
from sparsam.data.image_files import ImageFolderError, load_image_folder
from sparsam.data.image_folder import MEAN, STD, FolderLoader
from sparsam.data.loaders import AUGMENT, ORDER
from sparsam.selection import random_generator

Image = pytest.importorskip("PIL.Image", reason="image folders need Pillow: pip install 'sparsam[train]'")

SIZE, RESIZE, BATCH = 16, 20, 4
TRAIN, VAL = {"ant": 5, "bee": 4, "cat": 6}, {"ant": 2, "cat": 3}
COUNT = sum(TRAIN.values())
REAL = Path(os.environ.get("SPARSAM_DATA", "")) / "imagefolder-mini"
real_images = pytest.mark.skipif(
    not (os.environ.get("SPARSAM_DATA") and REAL.is_dir()),
    reason="needs real JPEGs: SPARSAM_DATA names no folder that holds imagefolder-mini",
)


def picture(seed: int, width: int = 40, height: int = 30) -> np.ndarray:
    """A smooth picture, which JPEG keeps nearly as it is."""
    angles = np.random.default_rng(seed).uniform(1, 5, (3, 3))
    rows, columns = np.mgrid[0:height, 0:width] / 20
    waves = [np.sin(a * rows + b * columns + c) for a, b, c in angles]
    return np.uint8(127.5 + 120 * np.stack(waves, axis=2))


def make_folder(root: Path) -> Path:
    seed = 0
    for part, counts in (("train", TRAIN), ("val", VAL)):
        for name, count in counts.items():
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                seed += 1
                image = Image.fromarray(picture(seed, width=30 + 3 * i, height=40 - 2 * i))
                image.save(root / part / name / f"{i}{'.JPEG' if i % 2 else '.png'}")
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "images")


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("shared") / "images")


def loader(root: Path, batch_size: int = BATCH, **options) -> FolderLoader:
    options = {"seed": 3, "image_size": SIZE, "resize": RESIZE, "workers": 0, **options}
    return FolderLoader(root, batch_size, device=torch.device("cpu"), **options)


def equal(one, other) -> bool:
    return len(one) == len(other) and all(a.equal(b) and c.equal(d) for (a, c), (b, d) in zip(one, other, strict=True))


def normalised(image) -> np.ndarray:
    """(x / 255 - mean) / std in float64, channels first."""
    x = np.asarray(image, dtype=np.float64)
    return np.stack([(x[..., c] / 255 - MEAN[c]) / STD[c] for c in range(3)])


def opened(path: Path):
    with Image.open(path) as image:
        image.load()
    return image


def files(root: Path, part: str) -> list[tuple[Path, int]]:
    """All files in order with their labels."""
    return [
        (path, label) for label, name in enumerate(sorted(TRAIN)) for path in sorted((root / part / name).glob("*.*"))
    ]


# What is found


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


# Transforms


@pytest.mark.parametrize(("width", "height"), [(40, 30), (30, 40), (33, 33), (400, 16), (16, 400), (1, 1), (5, 2)])
def test_crops_are_inside_and_in_proportion(width, height):
    for seed in range(200):
        left, top, w, h = crop_box(width, height, random_generator(seed))
        assert 0 <= left <= width - w
        assert 0 <= top <= height - h
        assert w > 0
        assert h > 0
        if min(width, height) > 10 and max(width, height) < 2 * min(width, height):
            # Each side is rounded, by up to half a pixel.
            assert (w - 0.5) / (h + 0.5) <= 4 / 3
            assert (w + 0.5) / (h - 0.5) >= 3 / 4
            assert (w + 0.5) * (h + 0.5) >= 0.08 * width * height


def test_crops_by_the_formula():
    for seed in range(50):
        draws = torch.rand(10, 4, dtype=torch.float64, generator=random_generator(seed)).numpy()
        area, ratio = (0.08 + 0.92 * draws[:, 0]) * 500 * 375, (3 / 4) * (16 / 9) ** draws[:, 1]
        w, h = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
        first = ((w <= 500) & (h <= 375)).argmax()
        left, top = np.floor(draws[:, 2] * (501 - w)), np.floor(draws[:, 3] * (376 - h))
        assert crop_box(500, 375, random_generator(seed)) == (left[first], top[first], w[first], h[first])


def test_crops_have_the_distribution_they_should():
    n, width, height = 4000, 1000, 1000
    boxes = np.array([crop_box(width, height, random_generator(seed, 1)) for seed in range(n)], dtype=np.float64)
    left, _, w, h = boxes.T
    ratio = np.log(w / h)
    # On a square few tries fail, and whether they do depends on |log r| alone: the mean stays 0.
    assert abs(ratio.mean()) < 4 * math.log(4 / 3) / math.sqrt(3 * n)
    assert ratio.min() > math.log(3 / 4) - 0.01
    assert ratio.max() < math.log(4 / 3) + 0.01
    place = left[w < width] / (width - w[w < width])
    assert abs(place.mean() - 0.5) < 4 / math.sqrt(12 * len(place))
    share = w * h / (width * height)
    small = share < 0.7  # all of which fit, whatever their ratio: uniform there
    assert abs(share[small].mean() - (0.08 + 0.7) / 2) < 4 * (0.7 - 0.08) / math.sqrt(12 * small.sum())


@pytest.mark.parametrize(
    ("width", "height", "box"),
    [(1000, 10, (493, 0, 13, 10)), (10, 1000, (0, 493, 10, 13))],
)
def test_where_no_crop_fits_the_centre_is_taken(width, height, box):
    # The smallest crop, 8 % of the area, is taller or wider than these images at every allowed ratio.
    assert math.sqrt(0.08 * 1000 * 10 * 3 / 4) > 10
    assert crop_box(width, height, random_generator(0)) == box


def test_random_resized_crop_is_crop_and_resize():
    image = Image.fromarray(picture(5, 61, 47))
    for seed in range(10):
        left, top, width, height = crop_box(61, 47, random_generator(seed))
        part = Image.fromarray(picture(5, 61, 47)[top : top + height, left : left + width])
        wanted = part.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        assert random_resized_crop(image, SIZE, random_generator(seed)).tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("width", "height", "resized"),
    [(40, 30, (26, 20)), (30, 40, (20, 26)), (20, 20, (20, 20)), (7, 21, (20, 60)), (333, 500, (20, 30))],
)
def test_resize_and_crop(width, height, resized):
    x = picture(6, width, height)
    whole = np.asarray(Image.fromarray(x).resize(resized, Image.Resampling.BILINEAR))
    left, top = (resized[0] - SIZE) // 2, (resized[1] - SIZE) // 2
    wanted = whole[top : top + SIZE, left : left + SIZE]
    assert (np.asarray(resize_and_crop(Image.fromarray(x), RESIZE, SIZE)) == wanted).all()


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_greyscale_becomes_rgb(tmp_path, suffix):
    grey = picture(1)[..., 0]
    Image.fromarray(grey).save(tmp_path / f"a.{suffix}", quality=100)
    x = np.asarray(decode(tmp_path / f"a.{suffix}"))
    assert (x == x[..., :1]).all()
    assert np.abs(x[..., 0].astype(int) - grey).max() <= (0 if suffix == "png" else 3)


def test_grey_of_16_bits_keeps_its_shades(tmp_path):
    grey = picture(1)[..., 0]
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "a.png")
    assert (np.asarray(decode(tmp_path / "a.png")) == grey[..., None]).all()


def test_cmyk_becomes_rgb(tmp_path):
    # Without black, cyan, magenta and yellow are what is missing to white.
    x = picture(2)
    cmyk = np.concatenate([255 - x, np.zeros_like(x[..., :1])], axis=2)
    Image.frombytes("CMYK", (x.shape[1], x.shape[0]), cmyk.tobytes()).save(
        tmp_path / "a.jpg", quality=100, subsampling=0
    )
    assert opened(tmp_path / "a.jpg").mode == "CMYK"
    assert np.abs(np.asarray(decode(tmp_path / "a.jpg")).astype(int) - x).max() <= 6


@pytest.mark.parametrize("transparency", [None, bytes(range(8))])
def test_palettes_become_rgb(tmp_path, transparency):
    colours = np.random.default_rng(0).integers(0, 256, (8, 3), dtype=np.uint8)
    indices = np.random.default_rng(1).integers(0, 8, (9, 11), dtype=np.uint8)
    image = Image.fromarray(indices)
    image.putpalette(colours.tobytes())
    image.save(tmp_path / "a.png", **({} if transparency is None else {"transparency": transparency}))
    assert opened(tmp_path / "a.png").mode == "P"
    assert (np.asarray(decode(tmp_path / "a.png")) == colours[indices]).all()


def test_transparency_is_dropped(tmp_path):
    x = picture(3)
    Image.fromarray(np.concatenate([x, x[..., :1]], axis=2)).save(tmp_path / "a.png")
    assert (np.asarray(decode(tmp_path / "a.png")) == x).all()


# Batches


def test_an_epoch_by_hand(shared_root):
    seed, epoch = 3, 2
    wanted = files(shared_root, "train")
    order = torch.randperm(COUNT, generator=random_generator(seed, epoch, ORDER)).tolist()
    batches = list(loader(shared_root, seed=seed).epoch(epoch))
    assert len(batches) == COUNT // BATCH
    mirrored = 0
    for i, (x, y) in enumerate(batches):
        assert x.shape == (BATCH, 3, SIZE, SIZE)
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        for k, index in enumerate(order[i * BATCH : (i + 1) * BATCH]):
            path, label = wanted[index]
            generator = random_generator(seed, epoch, AUGMENT, index)
            image = np.asarray(random_resized_crop(opened(path), SIZE, generator))
            if torch.rand((), generator=generator) < 0.5:
                image, mirrored = image[:, ::-1], mirrored + 1
            np.testing.assert_allclose(x[k], normalised(image), atol=1e-6)
            assert y[k] == label
    assert 0 < mirrored < len(batches) * BATCH


def test_evaluation_by_hand(shared_root):
    wanted = files(shared_root, "val")
    batches = list(loader(shared_root).evaluation(batch_size=2))
    assert [len(y) for _, y in batches] == [2, 2, 1]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    for k, (path, label) in enumerate(wanted):
        np.testing.assert_allclose(x[k], normalised(resize_and_crop(opened(path), RESIZE, SIZE)), atol=1e-6)
        assert y[k] == label
    assert set(y.tolist()) == {0, 2}  # val/ has no bees; a cat is a 2 all the same


def test_samples_by_hand(shared_root):
    samples = loader(shared_root).samples()
    wanted = files(shared_root, "train")
    assert len(samples) == len(wanted)
    for k in (0, 7, COUNT - 1):
        x, y = samples[k]
        path, label = wanted[k]
        np.testing.assert_allclose(x, normalised(resize_and_crop(opened(path), RESIZE, SIZE)), atol=1e-6)
        assert (x.dtype, y.dtype, y.shape, y.item()) == (torch.float32, torch.int64, (), label)


def test_every_epoch_is_another_order_and_another_crop(shared_root):
    loading = loader(shared_root, batch_size=1)
    epochs = [list(loading.epoch(i)) for i in range(3)]
    labels = [[y.item() for _, y in epoch] for epoch in epochs]
    assert all(np.bincount(y).tolist() == list(TRAIN.values()) for y in labels)
    assert not any(equal(one, other) for one, other in pairwise(epochs))
    assert equal(epochs[1], list(loading.epoch(1)))
    pixels = {x.numpy().tobytes() for epoch in epochs for x, _ in epoch}
    assert len(pixels) == 3 * COUNT


def test_another_seed_is_another_epoch(shared_root):
    one, other = (list(loader(shared_root, seed=seed).epoch(0)) for seed in (3, 4))
    assert not equal(one, other)


def test_workers_change_nothing(shared_root):
    alone, together = loader(shared_root), loader(shared_root, workers=2)
    for epoch in range(2):  # the second with the workers of the first
        assert equal(list(alone.epoch(epoch)), list(together.epoch(epoch)))
        assert equal(list(alone.evaluation(2)), list(together.evaluation(2)))
    assert len(together.workers.idle) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_gives_the_same_batches(shared_root, workers):
    whole = list(loader(shared_root).epoch(1))
    loading = loader(shared_root, workers=workers)
    assert equal(list(islice(loading.epoch(1), 2)), whole[:2])  # broken off
    assert equal(list(loading.epoch(1, start=2)), whole[2:])
    assert len(loading.workers.loaders) == 1  # the workers lived on
    assert list(loading.epoch(1, start=len(whole))) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_iterations_do_not_disturb_each_other(shared_root, workers):
    loading = loader(shared_root, workers=workers)
    apart = list(loading.epoch(0)), list(loading.epoch(1)), list(loading.evaluation(2))
    together = list(zip(loading.epoch(0), loading.epoch(1), loading.evaluation(2), strict=True))
    assert all(equal(one, other) for one, other in zip(apart, zip(*together, strict=True), strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_torchs_random_numbers_are_left_alone(shared_root, workers):
    before = torch.get_rng_state()
    loading = loader(shared_root, workers=workers)
    list(loading.epoch(0))
    list(loading.evaluation())
    loading.samples()[0]
    assert torch.get_rng_state().equal(before)


# Damage


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
    with pytest.raises(ImageFolderError, match=r"0\.png cannot be decoded \(no image format that Pillow knows\)"):
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


def started_by(loading: FolderLoader) -> set[multiprocessing.Process]:
    """Return the workers of a loader, which has to begin an epoch for it."""
    gc.collect()  # ends the workers of other tests
    before = set(multiprocessing.active_children())
    list(loading.epoch(0))
    return set(multiprocessing.active_children()) - before


def test_workers_end_at_once_with_a_loader_in_a_cycle(shared_root):
    loading = loader(shared_root, workers=2)
    workers = started_by(loading)
    assert len(workers) == 2
    loading.itself = loading
    started = time.monotonic()
    del loading
    gc.collect()
    assert time.monotonic() - started < 4  # torch gives a worker that was not told to end 5 seconds
    assert not any(worker.is_alive() for worker in workers)


def test_workers_leave_interrupts_to_the_main_process(shared_root):
    loading = loader(shared_root, workers=1)
    [worker] = started_by(loading)
    os.kill(worker.pid, signal.SIGINT)
    assert equal(list(loading.epoch(1)), list(loader(shared_root).epoch(1)))
    assert worker.is_alive()


# Folders


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
        f"{root / 'val' / 'dog'}{more} without a counterpart in {root / 'train'}: the classes in val/ must be among those in "
        "train/"
    )
    with pytest.raises(ImageFolderError, match=f"^{re.escape(message)}$"):
        loader(root)


def test_a_batch_larger_than_the_data(shared_root):
    assert loader(shared_root, batch_size=COUNT).steps == 1
    message = f"data.batch_size must be at most the number of training images in {shared_root / 'train'}, {COUNT}, but is {COUNT + 1}"
    with pytest.raises(ImageFolderError, match=f"^{re.escape(message)}$"):
        loader(shared_root, batch_size=COUNT + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "data.batch_size must be a whole number >= 1, but is 0"),
        ({"image_size": 0}, "data.image_size must be a whole number >= 1, but is 0"),
        ({"workers": -1}, "data.workers must be a whole number >= 0, but is -1"),
        ({"resize": 15}, "data.resize must be at least data.image_size, 16, but is 15"),
    ],
)
def test_impossible_options(shared_root, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        loader(shared_root, **options)


def test_without_pillow(shared_root, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"^image folders need the package PIL: pip install 'sparsam\[train\]'$"):
        loader(shared_root)


# Real JPEGs


@real_images
def test_real_images():
    options = {"image_size": 56, "resize": 64, "seed": 0}
    loading = loader(REAL, batch_size=250, workers=2, **options)
    assert (loading.classes, len(loading.data.train), len(loading.data.test), loading.steps) == (20, 1200, 300, 4)
    x, _ = next(loading.epoch(0))
    assert x.shape == (250, 3, 56, 56)
    # ImageNet's mean and deviation fit these images, which are ImageNet's, within what 250 images can tell.
    assert x.mean((0, 2, 3)).abs().max() < 0.3
    assert (x.std((0, 2, 3)) - 1).abs().max() < 0.3
    labels = torch.cat([y for _, y in loading.evaluation(batch_size=77)])
    assert labels.bincount().tolist() == [15] * 20
    assert labels.equal(labels.sort().values)
    [first, *_] = loader(REAL, batch_size=250, **options).epoch(0, start=3)
    *_, last = loading.epoch(0)
    assert equal([first], [last])


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
