"""Decoding: crops by their formula and distribution, and colours of every kind of file."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from image_folders import RESIZE, SIZE, Image, opened, picture

from sparsam.data.decoding import crop_box, decode, random_resized_crop, resize_and_crop
from sparsam.selection import random_generator


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
