"""scikit-learn's digits: all of them, once each, always split the same way."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from sparsam.data.digits import load_digits
from sparsam.data.images import ImageData


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
