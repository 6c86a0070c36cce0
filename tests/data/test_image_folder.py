"""Batches of an image folder, against the same computed by hand."""

from __future__ import annotations

import re
import sys
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from image_folders import (
    BATCH,
    COUNT,
    REAL,
    RESIZE,
    SIZE,
    TRAIN,
    equal,
    files,
    loader,
    normalised,
    opened,
    real_images,
)

from sparsam.data.decoding import random_resized_crop, resize_and_crop
from sparsam.data.image_files import ImageFolderError
from sparsam.data.loaders import AUGMENT, ORDER, Part
from sparsam.errors import UserValueError
from sparsam.selection import random_generator


def test_parts_of_several_processes_make_up_the_whole(shared_root):
    whole, parts = loader(shared_root, 4, seed=3), [loader(shared_root, 4, seed=3, part=Part(r, 2)) for r in range(2)]
    for (x, y), *own in zip(whole.epoch(1, 1), *(part.epoch(1, 1) for part in parts), strict=True):
        assert torch.equal(x, torch.cat([images for images, _ in own]))
        assert torch.equal(y, torch.cat([labels for _, labels in own]))
    test = torch.cat([x for x, _ in whole.evaluation()])
    for rank, part in enumerate(parts):
        assert torch.equal(torch.cat([x for x, _ in part.evaluation(3)]), test[rank::2])
    with pytest.raises(
        UserValueError, match=r"^data.batch_size must be a multiple of the number of processes, 3, but "
    ):
        loader(shared_root, 4, seed=3, part=Part(0, 3))


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
        assert x.is_contiguous(memory_format=torch.channels_last)  # as convolutions want it: nothing is left to copy
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


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_gives_the_same_batches(shared_root, workers):
    whole = list(loader(shared_root).epoch(1))
    loading = loader(shared_root, workers=workers)
    assert equal(list(islice(loading.epoch(1), 2)), whole[:2])  # broken off
    assert equal(list(loading.epoch(1, start=2)), whole[2:])
    assert len(loading.workers.loaders) == 1  # the workers lived on
    assert list(loading.epoch(1, start=len(whole))) == []


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
