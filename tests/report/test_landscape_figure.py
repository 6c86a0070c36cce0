"""Landscapes as figures and as a page: one scale, labels that differ, captions, and the page in a browser."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from browser import Page
from small_landscapes import gap, landscapes, trajectory, with_losses
from torch.nn import functional as F

from cases import task
from sparsam.analysis.landscape import loss_landscape
from sparsam.report import landscape_figure
from sparsam.report.landscape_figure import draw_figures
from sparsam.report.landscape_page import write_landscapes
from sparsam.report.landscape_scale import Scale
from sparsam.report.landscape_words import caption, labels

PICTURES = {
    "plane": lambda: landscapes(),
    "line": lambda: landscapes(1),
    "many": lambda: landscapes(points=4) * 2,  # more than fit in a row
    "gaps": lambda: [with_losses(shown, gap) for shown in landscapes()[:2]],
    "line-gaps": lambda: [with_losses(shown, gap) for shown in landscapes(1)],
    "nothing": lambda: [with_losses(shown, lambda losses: losses * np.nan) for shown in landscapes()[:1]],
    "constant": lambda: [replace(with_losses(shown, np.ones_like), centre=1.0) for shown in landscapes()[:1]],
    "negative": lambda: [with_losses(shown, lambda losses: losses - 5) for shown in landscapes()[:1]],
    "wide": lambda: [with_losses(shown, lambda losses: losses**9) for shown in landscapes()[:1]],
    "unfinished": lambda: [replace(with_losses(shown, gap), finished=63) for shown in landscapes()[:1]],
    "pca": lambda: [
        loss_landscape(
            t.model, F.cross_entropy, (t.x, t.y), points=5, directions="pca", checkpoints=trajectory(t.model, 4)
        )
        for t in [task()]
    ],
}


@pytest.mark.parametrize("name", PICTURES)
def test_figures_are_written(name, tmp_path):
    from matplotlib.image import imread

    shown = PICTURES[name]()
    files = draw_figures(shown, tmp_path / "figures")
    line = shown[0].losses.ndim == 1
    names = ["landscape-line"] if line else ["landscape-contour", "landscape-surface"]
    assert [f.name for f in files] == [f"{n}.{suffix}" for n in names for suffix in ("png", "svg")]
    for file in files:
        if file.suffix == ".png":
            pixels = (imread(file)[..., :3] * 255).astype(int) @ [1 << 16, 1 << 8, 1]
            assert len(np.unique(pixels)) > (20 if line or name in ("nothing", "constant") else 300)
        else:
            assert file.read_text().count("<path") > 20
    page = write_landscapes(shown, tmp_path / "page.html").read_text()
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)
    assert page.count("<script") == 2
    assert "<b>SSAM" not in page


def turned(shown, quarters):
    """Return a landscape whose lowest corner, over which a surface is seen, is another."""
    return with_losses(shown, lambda losses: np.rot90(losses, quarters))


SURFACES = {
    "one": lambda: landscapes()[:1],
    "five": lambda: (landscapes() * 2)[:5],
    **{f"turned-{n}": lambda n=n: [turned(shown, n) for shown in landscapes()] for n in (1, 2, 3)},
    "wide": lambda: [with_losses(shown, lambda losses: losses**99) for shown in landscapes()],
}


@pytest.mark.parametrize("name", SURFACES)
def test_no_text_of_a_surface_covers_another(name, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(landscape_figure, "save_figure", lambda figure, path: figures.append(figure))
    landscape_figure.draw_surfaces(SURFACES[name](), tmp_path / "surface")
    (figure,) = figures
    figure.canvas.draw()
    panels = [ax for ax in figure.axes if ax.name == "3d"]
    assert len(panels) == len(SURFACES[name]())
    for ax in panels:
        axes = (ax.xaxis, ax.yaxis, ax.zaxis)
        texts = [ax.xaxis.label, ax.yaxis.label, *(tick.label1 for axis in axes for tick in axis.majorTicks)]
        texts = [text for text in texts if text.get_visible() and text.get_text()]
        assert {"a", "b", "0", "0.5"} <= {text.get_text() for text in texts}
        for one, other in combinations(texts, 2):
            assert not one.get_window_extent().overlaps(other.get_window_extent()), (one, other)


def test_runs_share_one_scale():
    shown = landscapes()
    scale = Scale.of(shown)
    values = np.concatenate([[*s.losses.ravel(), s.centre] for s in shown])
    assert (scale.low, scale.high) == (values.min(), values.max())
    assert not scale.log
    wide = Scale.of([with_losses(shown[0], lambda losses: 1e3 * losses), *shown])
    assert wide.log
    assert wide.low == scale.low
    assert Scale(0.02, 130, True).ticks() == pytest.approx([0.03, 0.1, 0.3, 1, 3, 10, 30, 100])
    assert Scale(-0.3, 1.1, False).ticks() == pytest.approx([0, 0.5, 1])
    assert Scale(1e-9, 1e9, True).ticks(4)[0] == pytest.approx(1e-9)
    gaps = with_losses(shown[0], gap)
    assert Scale.of([gaps]).high < math.inf


def test_labels_tell_runs_apart():
    def named(*abouts):
        return labels([replace(shown, about=about) for shown, about in zip(landscapes(points=2), abouts, strict=False)])

    assert named({"label": "SGD"}, {"label": "SAM"}) == ["SGD", "SAM"]
    assert named({"label": "SAM", "seed": 0}, {"label": "SAM", "seed": 1}) == ["SAM, seed 0", "SAM, seed 1"]
    twice = {"label": "SAM", "seed": 0}
    assert named({**twice, "run": "a"}, {**twice, "run": "b"}) == ["a", "b"]
    assert named({}, {}) == ["loss (1)", "loss (2)"]


def test_the_caption_says_what_is_drawn():
    text = caption(landscapes(points=4))
    assert "Mean loss over 24 samples at w + a·d₁ + b·d₂, model in eval mode, fp32, 4×4 points" in text
    assert "Directions: random (seed 0), each filter scaled to the length of the run’s own filter" in text
    assert "biases and normalisation parameters are not moved" in text
    assert "blank" not in text
    assert "Unfinished: 18 points are" in caption(PICTURES["unfinished"]()[:1])


def test_the_page_can_be_turned_and_read(chromium, tmp_path):
    from selenium.webdriver import ActionChains

    shown = [with_losses(landscapes()[0], gap), *landscapes()[1:]]
    page = Page(chromium, write_landscapes(shown, tmp_path / "page.html")).open()
    page.problems()  # those of earlier pages
    page.open()
    assert page.text(".panels h2") == ["SGD", "SAM", "<b>SSAM</b> & co"]
    picture = "return document.querySelectorAll('.plot canvas')[arguments[0]].toDataURL()"
    before = [page.js(picture, i) for i in range(6)]
    assert len(set(before)) == 6

    middle = page.all(".plot.map canvas")[1]
    ActionChains(chromium).move_to_element(middle).perform()
    tip = page.text(".tip:not([hidden])")[0].split("\n")
    a, b = (float(value.replace("−", "-")) for value in re.findall(r"[−\d.]+", tip[0]))
    row, column = (int(np.abs(shown[0].axis - value).argmin()) for value in (b, a))
    assert tip[1:] == [
        text
        for s, name in zip(shown, page.text(".panels h2"), strict=True)
        for text in (name, f"{s.losses[row, column]:#.4g}")
    ]
    page.keys(".card[data-run='1'] .map", "RIGHT", "UP")
    assert page.text(".tip:not([hidden])")[0] != tip[0]
    ActionChains(chromium).move_to_element(page.one("h1")).perform()
    page.js("document.activeElement.blur()")
    wait(page)
    assert page.text(".tip:not([hidden])") == []
    assert [page.js(picture, i) for i in range(6)] == before

    surface = page.all(".plot.surface canvas")[0]
    ActionChains(chromium).click_and_hold(surface).move_by_offset(60, -20).release().perform()
    ActionChains(chromium).move_to_element(page.one("h1")).perform()
    wait(page)
    turned = [page.js(picture, i) for i in range(6)]
    assert all(a != b for a, b in zip(turned[::2], before[::2], strict=True))  # all surfaces together
    assert turned[1::2] == before[1::2]  # and no map
    page.click("#reset")
    wait(page)
    assert [page.js(picture, i) for i in range(6)] == before

    page.click("#legend button[data-run='0']")
    assert page.text(".card:not([hidden]) h2") == ["SAM", "<b>SSAM</b> & co"]
    page.click("#log")
    page.click("#theme")
    page.open(400, phone=True)
    assert page.js("return document.documentElement.scrollWidth") <= 400
    assert page.js("return performance.getEntriesByType('resource').map(entry => entry.name)") == []
    assert page.problems() == []


def wait(page):
    """Until what was asked for is drawn."""
    page.browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def test_the_page_of_a_line(chromium, tmp_path):
    shown = landscapes(1)
    page = Page(chromium, write_landscapes([with_losses(shown[0], gap), *shown[1:]], tmp_path / "page.html")).open()
    page.problems()
    page.open()
    lines = page.all("path[data-run]")
    assert [len(re.findall("[ML]", line.get_attribute("d"))) for line in lines] == [7, 10, 10]  # with the centre
    page.keys(".plot", "RIGHT", "LEFT")
    tip = page.text(".tip:not([hidden])")[0].split("\n")
    assert tip[0] == "a = −0.25"
    assert tip[2::2] == [f"{s.losses[3]:#.4g}" for s in shown]
    assert page.problems() == []
