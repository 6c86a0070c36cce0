"""Crop, flip, cutout and normalisation, against the same computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numbered_images import EVERYTHING, MEAN, STD, pictures

from sparsam.data.augment import Augmentation, normalise, random_crop, random_cutout, random_flip
from sparsam.selection import random_generator


@pytest.mark.parametrize("padding", [1, 4, 12])
@pytest.mark.parametrize("shape", [(3, 9, 7), (1, 8, 8)])
def test_crop(shape, padding):
    n = 40
    channels, height, width = shape
    x = pictures(n, *shape)
    cropped = random_crop(x, padding, random_generator(5))
    top, left = torch.randint(0, 2 * padding + 1, (2, n, 1), generator=random_generator(5)).squeeze(2).tolist()
    assert cropped.dtype == torch.uint8
    for i in range(n):
        padded = np.zeros((channels, height + 2 * padding, width + 2 * padding), dtype=np.uint8)
        padded[:, padding : padding + height, padding : padding + width] = x[i].numpy()
        wanted = padded[:, top[i] : top[i] + height, left[i] : left[i] + width]
        assert (cropped[i].numpy() == wanted).all()


def test_all_shifts_are_equally_likely():
    n, padding = 18_000, 1
    x = torch.zeros(1, 1, 5, 5, dtype=torch.uint8)
    x[0, 0, 2, 2] = 1
    cropped = random_crop(x.expand(n, -1, -1, -1), padding, random_generator(0))
    share = cropped.double().mean((0, 1))[1:4, 1:4]
    assert share.sum() == pytest.approx(1)
    assert (share - 1 / 9).abs().max() < 4.5 * math.sqrt(1 / 9 * 8 / 9 / n)


def test_flip():
    n = 1000
    x = pictures(n)
    flipped = random_flip(x, random_generator(6))
    mirrored = [bool((flipped[i].numpy() == x[i].numpy()[:, :, ::-1]).all()) for i in range(n)]
    kept = [bool((flipped[i].numpy() == x[i].numpy()).all()) for i in range(n)]
    assert all(a != b for a, b in zip(mirrored, kept, strict=True))
    assert mirrored == (torch.rand(n, 1, 1, 1, generator=random_generator(6)) < 0.5).flatten().tolist()
    assert abs(sum(mirrored) / n - 0.5) < 4 * math.sqrt(0.25 / n)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16, 40])
@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_cutout(size, probability):
    """A square of `size` pixels from `size // 2` before its centre on; what sticks out of the image is cut off."""
    n, height, width = 50, 9, 7
    x = torch.randn(n, 3, height, width).abs() + 1  # no zeros of its own
    cut = random_cutout(x, size, probability, random_generator(7))
    place = torch.rand(3, n, 1, generator=random_generator(7)).squeeze(2).numpy()
    for i in range(n):
        wanted = x[i].numpy().copy()
        if place[2, i] < probability:
            top, left = int(place[0, i] * height) - size // 2, int(place[1, i] * width) - size // 2
            for row in range(top, top + size):
                for column in range(left, left + size):
                    if 0 <= row < height and 0 <= column < width:
                        wanted[:, row, column] = 0
        assert (cut[i].numpy() == wanted).all()


@pytest.mark.parametrize("probability", [0.25, 0.5, 1.0])
def test_the_share_and_the_place_of_cutouts(probability):
    n, side, size = 20_000, 8, 4
    cut = random_cutout(torch.ones(n, 1, side, side), size, probability, random_generator(8)) == 0
    share = cut.flatten(1).any(1).double().mean().item()
    assert abs(share - probability) <= 4 * math.sqrt(probability * (1 - probability) / n)
    # Pixel r is cut where the centre c satisfies c - 2 <= r < c + 2: r - 1, ..., r + 2, as far as they are in the image.
    hits = np.array([len([c for c in range(side) if c - 2 <= r < c + 2]) / side for r in range(side)])
    wanted = probability * np.outer(hits, hits)
    deviation = np.sqrt(wanted * (1 - wanted) / n)
    assert (np.abs(cut.double().mean((0, 1)).numpy() - wanted) <= 4.5 * deviation).all()


def test_the_whole_of_a_cutout_is_the_mean_colour():
    """After normalisation 0 is the mean."""
    x = pictures(3)
    augment = Augmentation(cutout=40)
    assert augment(x, torch.tensor(MEAN), torch.tensor(STD), random_generator(0)).eq(0).all()


def test_normalise():
    x = pictures(20)
    got = normalise(x, torch.tensor(MEAN), torch.tensor(STD))
    assert got.dtype == torch.float32
    for i in range(20):
        for c in range(3):
            wanted = (x[i, c].numpy().astype(np.float64) / 255 - MEAN[c]) / STD[c]
            np.testing.assert_allclose(got[i, c].numpy(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_normalise_leaves_its_input_alone_and_keeps_its_layout(dtype):
    x = pictures(20).to(dtype).contiguous(memory_format=torch.channels_last)
    before = x.clone()
    got = normalise(x, torch.tensor(MEAN), torch.tensor(STD))
    assert x.equal(before)
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_augmentation_is_crop_flip_normalise_cutout_in_this_order():
    x, mean, std = pictures(30), torch.tensor(MEAN), torch.tensor(STD)
    generator = random_generator(9)
    wanted = random_flip(random_crop(x, 2, generator), generator)
    wanted = random_cutout(normalise(wanted, mean, std), 4, 0.5, generator)
    assert EVERYTHING(x, mean, std, random_generator(9)).equal(wanted)


def test_no_augmentation_is_normalise():
    x, mean, std = pictures(5), torch.tensor(MEAN), torch.tensor(STD)
    generator = random_generator(0)
    before = generator.get_state()
    assert Augmentation()(x, mean, std, generator).equal(normalise(x, mean, std))
    assert generator.get_state().equal(before)
