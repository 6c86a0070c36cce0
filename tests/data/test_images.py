"""Validation images: drawn from the training images by a seed."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from numbered_images import MEAN, STD, numbered, numbers

from sparsam.data.augment import normalise
from sparsam.data.images import ImageData


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
