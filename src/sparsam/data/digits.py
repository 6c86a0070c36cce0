"""scikit-learn's handwritten digits: 1,797 real 8×8 images that come with the package."""

from __future__ import annotations

import numpy as np
import torch

from sparsam.data.images import ImageData, Images
from sparsam.errors import need
from sparsam.randomness import random_generator

TEST = 597  # leaves 1,200 to train on
SPLIT_SEED = 0  # the same split for every run


def load_digits() -> ImageData:
    """Return the digits, split by a fixed seed."""
    datasets = need("sklearn.datasets", "the digits", extra="train")
    x, y = datasets.load_digits(return_X_y=True)
    images = torch.from_numpy(np.round(x * 255 / 16).astype(np.uint8)).view(-1, 1, 8, 8)
    data = Images(images, torch.from_numpy(y.astype(np.int64)))
    order = torch.randperm(len(data), generator=random_generator(SPLIT_SEED))
    train, test = data[order[TEST:]], data[order[:TEST]]
    shades = train.x.float() / 255
    return ImageData("digits", train, test, 10, (round(shades.mean().item(), 4),), (round(shades.std().item(), 4),))
