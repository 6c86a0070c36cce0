"""Batches of images in memory: their order, their randomness, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from numbered_images import EVERYTHING, MEAN, STD, equal, loader, numbered, numbers
from torch.utils.data import DataLoader, Subset

from sparsam.data.augment import Augmentation, normalise
from sparsam.data.loaders import AUGMENT, ORDER
from sparsam.selection import random_generator


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
