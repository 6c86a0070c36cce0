"""Images in memory: augmentation against loops over single images, and batches that depend on seed, epoch and place alone."""

from __future__ import annotations

import math
import re
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from sparsam.data.augment import Augmentation, normalise, random_crop, random_cutout, random_flip
from sparsam.data.digits import load_digits
from sparsam.data.images import ImageData, Images
from sparsam.data.loaders import AUGMENT, ORDER, ResidentLoader
from sparsam.selection import random_generator

CPU = torch.device("cpu")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def pictures(n: int, channels: int = 3, height: int = 9, width: int = 7) -> torch.Tensor:
    return torch.randint(0, 256, (n, channels, height, width), dtype=torch.uint8, generator=random_generator(n))


def numbered(train: int = 23, test: int = 7, classes: int = 5) -> ImageData:
    """Images that say who they are: the first two bytes are the number."""

    def images(first: int, count: int) -> Images:
        x, numbers = pictures(count), torch.arange(first, first + count)
        x[:, 0, 0, 0], x[:, 0, 0, 1] = (numbers // 256).byte(), (numbers % 256).byte()
        return Images(x, numbers % classes)

    return ImageData("numbered", images(0, train), images(train, test), classes, MEAN, STD)


def loader(data: ImageData | None = None, batch_size: int = 4, augmentation=None, seed: int = 0) -> ResidentLoader:
    return ResidentLoader(data or numbered(), batch_size, augmentation or Augmentation(), seed=seed, device=CPU)


def numbers(x: torch.Tensor) -> list[int]:
    """Which images of `numbered` these normalised ones are."""
    first = ((x[:, 0, 0, :2] * STD[0] + MEAN[0]) * 255).round().long()
    return (first[:, 0] * 256 + first[:, 1]).tolist()


def equal(one, other) -> bool:
    return len(one) == len(other) and all(a.equal(b) and c.equal(d) for (a, c), (b, d) in zip(one, other, strict=True))


EVERYTHING = Augmentation(crop_padding=2, flip=True, cutout=4, cutout_probability=0.5)

# Augmentation


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


# Batches


def test_every_epoch_is_a_new_permutation():
    loading = loader(batch_size=1)
    orders = [[numbers(x)[0] for x, _ in loading.epoch(epoch)] for epoch in range(4)]
    assert all(sorted(order) == list(range(23)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert orders[2] == torch.randperm(23, generator=random_generator(0, 2, ORDER)).tolist()


def test_labels_go_with_their_images():
    for x, y in loader(augmentation=Augmentation()).epoch(0):
        assert y.tolist() == [number % 5 for number in numbers(x)]
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)


def test_the_incomplete_batch_is_dropped():
    loading = loader(batch_size=4)
    batches = list(loading.epoch(0))
    assert loading.steps == len(batches) == 5
    assert all(x.shape == (4, 3, 9, 7) and y.shape == (4,) for x, y in batches)
    seen = [number for x, _ in batches for number in numbers(x)]
    assert len(set(seen)) == 20
    left_out = [{*range(23)} - {number for x, _ in loading.epoch(epoch) for number in numbers(x)} for epoch in range(3)]
    assert any(one != other for one, other in pairwise(left_out))


def test_batches_are_augmented_by_a_generator_of_their_own():
    data = numbered()
    order = torch.randperm(23, generator=random_generator(3, 1, ORDER))
    for i, (x, y) in enumerate(loader(data, augmentation=EVERYTHING, seed=3).epoch(1)):
        chosen = order[4 * i : 4 * i + 4]
        generator = random_generator(3, 1, AUGMENT, i)
        assert x.equal(EVERYTHING(data.train.x[chosen], torch.tensor(MEAN), torch.tensor(STD), generator))
        assert y.equal(data.train.y[chosen])


@pytest.mark.parametrize("start", [0, 1, 3, 5])
def test_resuming_gives_the_same_batches(start):
    whole = list(loader(augmentation=EVERYTHING).epoch(6))
    torch.rand(3)  # nothing depends on torch's own random numbers
    assert equal(list(loader(augmentation=EVERYTHING).epoch(6, start=start)), whole[start:])


def test_the_seed_decides():
    one, again, other = (list(loader(augmentation=EVERYTHING, seed=seed).epoch(0)) for seed in (1, 1, 2))
    assert equal(one, again)
    assert not equal(one, other)


def test_torchs_random_numbers_are_left_alone():
    before = torch.get_rng_state()
    list(loader(augmentation=EVERYTHING).epoch(0))
    numbered().with_validation(6, seed=0)
    assert torch.get_rng_state().equal(before)


def test_evaluation_is_in_order_and_complete():
    data = numbered()
    batches = list(loader(data, augmentation=EVERYTHING).evaluation(batch_size=3))
    assert [len(y) for _, y in batches] == [3, 3, 1]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert numbers(x) == list(range(23, 30))
    assert x.equal(normalise(data.test.x, torch.tensor(MEAN), torch.tensor(STD)))
    assert y.equal(data.test.y)


def test_samples_are_the_training_images_without_augmentation():
    data = numbered()
    samples = loader(data, augmentation=EVERYTHING).samples()
    assert len(samples) == 23
    for i in (0, 11, 22):
        x, y = samples[i]
        assert x.equal(normalise(data.train.x[i], torch.tensor(MEAN), torch.tensor(STD)))
        assert y == i % 5
        assert y.shape == ()


def counted(function, calls):
    return lambda *args: calls.append(args) or function(*args)


def test_samples_in_batches_are_the_single_ones(monkeypatch):
    samples = loader(numbered()).samples()
    monkeypatch.setattr(type(samples), "__getitem__", counted(type(samples).__getitem__, calls := []))
    batches = DataLoader(Subset(samples, [22, 0, 7, 7, 3]), batch_size=2)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert len(calls) == 3  # for each batch
    for i, found_x, found_y in zip([22, 0, 7, 7, 3], x, y, strict=True):
        assert found_x.equal(samples[i][0])
        assert found_y == samples[i][1]
    assert samples.__getitems__([]) == []
    assert [int(y) for _, y in samples.__getitems__(torch.tensor([3, 4]))] == [3, 4]


def test_what_a_loader_says_of_its_data():
    loading = loader()
    assert (loading.classes, loading.channels, loading.steps) == (5, 3, 5)


def test_a_batch_larger_than_the_data():
    assert loader(batch_size=23).steps == 1
    message = "data.batch_size must be at most the number of training images, 23, but is 24"
    with pytest.raises(ValueError, match=f"^{message}$"):
        loader(batch_size=24)


# Validation images


def held_out(data: ImageData) -> tuple[list[int], list[int]]:
    return tuple(numbers(normalise(part.x, torch.tensor(MEAN), torch.tensor(STD))) for part in (data.train, data.test))


def test_validation_images_are_training_images_that_are_not_trained_on():
    train, test = held_out(numbered().with_validation(6, seed=0))
    assert len(test) == 6
    assert sorted(train + test) == list(range(23))
    assert (train, test) == (sorted(train), sorted(test))


def test_labels_go_with_validation_images():
    data = numbered().with_validation(6, seed=0)
    train, test = held_out(data)
    assert data.train.y.tolist() == [number % 5 for number in train]
    assert data.test.y.tolist() == [number % 5 for number in test]


def test_validation_images_depend_on_the_seed_alone():
    draws = [held_out(numbered().with_validation(6, seed=seed))[1] for seed in (0, 0, 1, 2)]
    assert draws[0] == draws[1]
    assert len({tuple(draw) for draw in draws}) == 3


def test_validation_images_are_drawn_uniformly():
    counts = np.zeros(23)
    for seed in range(1000):
        counts[held_out(numbered().with_validation(6, seed=seed))[1]] += 1
    share = 6 / 23
    assert (np.abs(counts / 1000 - share) < 4.5 * math.sqrt(share * (1 - share) / 1000)).all()


@pytest.mark.parametrize("count", [-1, 0, 23, 24])
def test_impossible_validation_counts(count):
    message = f"data.validation must be between 1 and 22 for numbered, but is {count}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        numbered().with_validation(count, seed=0)


# Digits


@pytest.fixture(scope="module")
def digits() -> ImageData:
    pytest.importorskip("sklearn", reason="the digits need scikit-learn: pip install 'sparsam[train]'")
    return load_digits()


def test_digits_counts(digits):
    assert (len(digits.train), len(digits.test), digits.classes, digits.channels) == (1200, 597, 10, 1)
    assert digits.train.x.shape == (1200, 1, 8, 8)
    assert digits.train.x.dtype == torch.uint8
    assert digits.train.y.dtype == torch.int64
    labels = torch.cat([digits.train.y, digits.test.y])
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as scikit-learn states
    assert digits.test.y.bincount(minlength=10).min() > 40


def test_digits_are_scikit_learns_each_once(digits):
    from sklearn.datasets import load_digits as original

    shades, labels = original(return_X_y=True)
    # 17 shades: 0 is black, 16 is white.
    wanted = sorted((tuple(int(255 * s / 16 + 0.5) for s in x), int(y)) for x, y in zip(shades, labels, strict=True))
    x, y = torch.cat([digits.train.x, digits.test.x]), torch.cat([digits.train.y, digits.test.y])
    got = sorted((tuple(image), label) for image, label in zip(x.flatten(1).tolist(), y.tolist(), strict=True))
    assert len({image for image, _ in got}) == 1797  # no two are equal: the split is disjoint
    assert sum(a == b for a, b in zip(got, wanted, strict=True)) == 1797


def test_digits_split_is_always_the_same(digits):
    before = torch.get_rng_state()
    again = load_digits()
    assert torch.get_rng_state().equal(before)
    assert again.train.x.equal(digits.train.x)
    assert again.test.y.equal(digits.test.y)


def test_digits_mean_and_deviation(digits):
    shades = digits.train.x.numpy().astype(np.float64) / 255
    assert digits.mean == (round(shades.mean(), 4),)
    assert digits.std == (round(shades.std(), 4),)


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"^the digits need the package sklearn: pip install 'sparsam\[train\]'$"):
        load_digits()
