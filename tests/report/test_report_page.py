"""The report in a real browser."""

import re
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
from browser import Page
from report_runs import (
    EPOCHS,
    HOSTILE,
    LAYERS,
    METHODS,
    accuracies,
    hostile_run,
    make_run,
    make_runs,
    metric,
)

from sparsam.report import write_report


@pytest.fixture
def page(chromium, tmp_path):
    page = Page(chromium, write_report(make_runs(tmp_path / "runs"), tmp_path / "page.html")).open()
    page.problems()  # those of earlier pages
    yield page
    assert page.problems() == []


def test_page_draws_every_run(page, tmp_path):
    for chart in ("#curves", "#timing"):
        assert len(page.all(f"{chart} path[data-seed]")) == 6
        assert len(page.all(f"{chart} path.mean")) == 3
        assert all(len(path.get_attribute("d").split("L")) == EPOCHS for path in page.all(f"{chart} path"))
    assert len(page.all("#masks .cell")) == len(LAYERS) * EPOCHS
    assert page.text("#masks h3") == ["SSAM-F"]
    page.screenshot(tmp_path / "light.png")


@pytest.mark.parametrize("shared", [1, 2])
def test_runs_that_shared_a_device_are_not_drawn_against_time(chromium, tmp_path, shared):
    times = {"seconds": None, "step_ms": None}
    runs = [make_run(tmp_path, "sgd"), make_run(tmp_path, "sam", summary=times)]
    page = Page(chromium, write_report(runs[-shared:] if shared == 1 else runs, tmp_path / "page.html")).open()
    assert len(page.all("#curves path[data-seed]")) == shared
    assert len(page.all("#timing path[data-seed]")) == shared - 1
    assert page.problems() == []


def test_seeds_share_a_colour_and_methods_differ_in_colour_and_dash(page):
    looks = {}
    for path in page.all("#curves path.mean"):
        looks[path.get_attribute("data-method")] = (
            path.value_of_css_property("stroke"),
            path.value_of_css_property("stroke-dasharray"),
        )
    assert all(len({look[i] for look in looks.values()}) == 3 for i in range(2))
    for path in page.all("#curves path[data-seed]"):
        assert path.value_of_css_property("stroke") == looks[path.get_attribute("data-method")][0]


def test_table_in_the_page(page):
    heads = page.text("#summary thead th")
    for line, name in zip(page.all("#summary tbody tr"), METHODS, strict=True):
        texts = [cell.text.split("\n")[0] for cell in line.find_elements("css selector", "th, td")]
        found = dict(zip(heads, texts, strict=True))
        values = 100 * np.array(accuracies(name, 2))
        label, _, _, _, step, _, flops = METHODS[name]
        assert found["Method"] == label
        assert found["Test accuracy, %"] == f"{values.mean():.2f} ± {values.std(ddof=1):.2f}"
        assert found["Step time (measured)"] == f"{(step + 0.05) / 3.05:.2f}×"
        assert found["FLOPs (theory)"] == f"{flops:.2f}×"
    assert {th.get_attribute("scope") for th in page.all("#summary thead th")} == {"col"}
    assert {th.get_attribute("scope") for th in page.all("#summary tbody th")} == {"row"}


def test_page_makes_no_request_and_allows_none(page):
    assert page.js("return performance.getEntriesByType('resource').map(entry => entry.name)") == []
    assert page.problems() == []
    blocked = page.browser.execute_async_script("""
        const done = arguments[0], blocked = [];
        document.addEventListener("securitypolicyviolation", (event) => {
          blocked.push(event.effectiveDirective);
          if (blocked.length === 4) done(blocked.sort());
        });
        const script = document.createElement("script");
        script.textContent = "window.hacked = 1";
        const image = document.createElement("img");
        image.src = "other.png";
        const style = document.createElement("p");
        style.setAttribute("style", "color: red");
        document.body.append(script, image, style);
        fetch("other.json").catch(() => {});
    """)
    assert blocked == ["connect-src", "img-src", "script-src-elem", "style-src-attr"]
    assert page.js("return window.hacked") is None
    page.problems()  # the browser reports what was blocked


def test_legend_switches_methods(page):
    page.click("#legend button[data-method='2']")
    for chart in ("#curves", "#timing"):
        assert {path.get_attribute("data-method") for path in page.all(f"{chart} path")} == {"0", "1"}
        assert len(page.all(f"{chart} path[data-seed]")) == 4
    assert not page.one("#masks [data-method='2']").is_displayed()
    assert page.one("#legend button[data-method='2']").get_attribute("aria-pressed") == "false"
    page.click("#legend button[data-method='0']")
    page.click("#legend button[data-method='1']")
    assert page.text("#curves .plot text") == ["Nothing to show"]
    page.keys("#curves .plot", "LEFT")
    for button in page.all("#legend button"):
        button.click()
    assert len(page.all("#curves path[data-seed]")) == 6
    assert page.one("#masks [data-method='2']").is_displayed()


def test_curves_show_the_metrics(page):
    for measure, key, shown in [
        ("accuracy", "test_accuracy", lambda value: f"{100 * value:.2f} %"),
        ("loss", "train_loss", lambda value: f"{value:.4g}"),
    ]:
        page.click(f"#curves [data-measure={measure}]")
        page.keys("#curves .plot", "LEFT", "LEFT")  # from the last epoch
        epoch = EPOCHS - 2
        marks = page.marks("#curves")
        assert len(marks) == 6
        for (name, seed), (at, _, value, _) in marks.items():
            assert (at, value) == (epoch, metric(name, seed, epoch)[key])
        assert page.text("#curves .tip p") == [f"Epoch {epoch}, mean of seeds"]
        means = [fmean(metric(name, seed, epoch)[key] for seed in range(2)) for name in METHODS]
        assert page.text("#curves .tip b") == [shown(value) for value in means]
        assert f"SSAM-F {shown(means[2])}" in page.js("return document.querySelector('#curves .unseen').textContent")
        page.js("document.activeElement.blur()")
        assert not page.one("#curves .tip").is_displayed()


def heights(page, steps=5):
    """Values of one run at some epochs and where they lie."""
    found = []
    for _ in range(steps):
        page.keys("#curves .plot", "LEFT")
        found.append(page.marks("#curves")["sam", 1][2:])
    return np.array(found).T


def is_straight(x, y):
    return np.allclose(np.polyval(np.polyfit(x, y, 1), x), y, atol=0.02)


def test_loss_has_a_linear_and_a_log_scale(page):
    log, close = page.one("#curves [data-option=log]"), page.one("#curves [data-option=closeup]")
    assert (log.is_displayed(), close.is_displayed()) == (False, True)
    page.click("#curves [data-measure=loss]")
    assert (log.is_displayed(), close.is_displayed()) == (True, False)
    values, y = heights(page)
    assert is_straight(values, y)
    assert not is_straight(np.log(values), y)
    log.click()
    assert log.get_attribute("aria-pressed") == "true"
    values, y = heights(page)
    assert is_straight(np.log(values), y)
    assert not is_straight(values, y)


def test_closeup_of_accuracy(page):
    def lowest(chart):
        return min(float(text) for text in page.text(f"{chart} .plot text[x='38']"))

    for chart in ("#curves", "#timing"):
        assert lowest(chart) > 80
        page.click(f"{chart} [data-option=closeup]")
        assert lowest(chart) <= 60
        assert page.one(f"{chart} [data-option=closeup]").get_attribute("aria-pressed") == "false"


def test_timing_shows_accuracy_and_seconds(page):
    page.keys("#timing .plot", "LEFT", "DOWN", "DOWN")  # to the third run, the point nearest in time
    ((name, seed), (epoch, x, value, _)) = page.marks("#timing").popitem()
    assert (name, seed) == ("sam", 0)
    line = metric("sam", 0, int(epoch))
    assert (x, value) == (line["elapsed"], line["test_accuracy"])
    nearest = min(
        range(1, EPOCHS + 1), key=lambda e: abs(metric("sam", 0, e)["elapsed"] - metric("sgd", 0, 11)["elapsed"])
    )
    assert epoch == nearest
    assert page.text("#timing .tip span") == ["SAM, seed 0"]


def test_pointer_chooses_the_nearest_epoch(page):
    from selenium.webdriver import ActionChains

    plot = page.one("#curves .plot")
    right = plot.size["width"] // 2 - 14
    ActionChains(page.browser).move_to_element_with_offset(plot, right, 0).perform()
    assert page.text("#curves .tip p") == [f"Epoch {EPOCHS}, mean of seeds"]
    ActionChains(page.browser).move_to_element(page.one("h1")).perform()
    assert not page.one("#curves .tip").is_displayed()


def test_heat_map_shows_densities(page):
    page.keys("#masks .plot", "RIGHT", "RIGHT", "DOWN")  # starts at the first cell
    mark = page.one("#masks .mark")
    expected = fmean(metric("ssam-f", seed, 3)["mask_density"]["layer1"] for seed in range(2))
    assert mark.get_attribute("data-layer") == "layer1"
    assert mark.get_attribute("data-epoch") == "3"
    assert float(mark.get_attribute("data-value")) == pytest.approx(expected, abs=1e-4)
    assert page.text("#masks .tip b") == [f"{100 * expected:.1f} %"]
    assert page.text("#masks .scale span") == ["20 %", "80 %"]
    fills = {cell.value_of_css_property("fill") for cell in page.all("#masks .cell")}
    assert len(fills) > EPOCHS


def luminance(colour):
    channels = np.array([float(number) for number in re.findall(r"[\d.]+", colour)[:3]]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


TEXTS = """
    return [...document.querySelectorAll("body *")].filter(e => e.checkVisibility() &&
        [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())).map(e => {
      let behind = e;
      while (behind && /, 0\\)$/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
      const style = getComputedStyle(e);
      return [e.outerHTML.slice(0, 80), e instanceof SVGElement ? style.fill : style.color,
              getComputedStyle(behind ?? document.body).backgroundColor];
    })
"""


def test_dark_and_light(page, tmp_path):
    light = page.colour("body")
    assert luminance(light) > 0.8
    page.click("#theme")
    assert page.js("return document.documentElement.dataset.theme") == "dark"
    assert luminance(page.colour("body")) < 0.05
    page.screenshot(tmp_path / "dark.png")
    page.click("#theme")
    assert page.colour("body") == light
    page.open(scheme="dark")
    assert luminance(page.colour("body")) < 0.05
    page.click("#theme")
    assert page.colour("body") == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(page, scheme):
    page.open(scheme=scheme)
    page.click("#legend button[data-method='1']")
    page.all("details summary")[0].click()
    texts = page.js(TEXTS)
    assert len(texts) > 100
    assert [(text, contrast(ink, paper)) for text, ink, paper in texts if contrast(ink, paper) < 4.5] == []
    card = page.colour("#curves")
    for line in page.all("#curves path.mean"):
        assert contrast(line.value_of_css_property("stroke"), card) >= 3


def test_names_for_those_who_do_not_see(page):
    for drawing in page.all(".plot > svg"):
        assert drawing.get_attribute("role") == "img"
        assert "SSAM-F" in drawing.get_attribute("aria-label")
    levels = [int(h.tag_name[1]) for h in page.all("h1, h2, h3") if h.is_displayed()]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert all(button.text for button in page.all("button") if button.is_displayed())


def test_phone(page, tmp_path):
    page.open(360, phone=True)
    assert page.js("return [innerWidth, document.documentElement.scrollWidth]") == [360, 360]
    assert page.js("const box = document.querySelector('.scroll'); return box.scrollWidth > box.clientWidth")
    for summary in page.all("details summary")[:2]:
        summary.click()
    assert page.js("return document.documentElement.scrollWidth") == 360
    plot = page.one("#curves .plot")
    page.js("arguments[0].scrollIntoView({block: 'center'})", plot)
    x, y, width = page.js(
        "const b = arguments[0].getBoundingClientRect(); return [b.x, b.y + b.height / 2, b.width]", plot
    )
    for kind, points in [("touchStart", [{"x": x + width - 14, "y": y}]), ("touchEnd", [])]:
        page.browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    assert page.text("#curves .tip p") == [f"Epoch {EPOCHS}, mean of seeds"]
    assert page.js("return document.documentElement.scrollWidth") == 360
    page.screenshot(tmp_path / "phone.png")


def test_drawing_follows_the_width(page):
    def width():
        return float(page.one("#curves .plot > svg").get_dom_attribute("viewBox").split()[2])

    wide = width()
    page.browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 700, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    )
    page.browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert width() != wide
    assert width() == page.js("return document.querySelector('#curves .plot').clientWidth")


def test_print(page):
    page.click("#theme")
    page.media("print")
    assert page.colour("body") == "rgba(255, 255, 255, 1)"
    assert not page.one("#theme").is_displayed()
    # In one go: for its new width the chart is drawn anew.
    seen = page.js("return [...document.querySelectorAll('#curves path.mean')].map((path) => path.checkVisibility())")
    assert seen == [True] * 3


def test_recipes_are_folded_away(page):
    assert len(page.all("details")) == 6
    settings = page.all("details .settings")[2]
    assert not settings.is_displayed()
    page.all("details summary")[2].click()
    assert settings.is_displayed()
    assert "weight_decay\n0.001" in settings.text
    assert page.text("details .folder")[2] == "run-2"


def test_page_shows_the_minima(chromium, analysed, tmp_path):
    page = Page(chromium, write_report(analysed, analysed[0].parent / "page.html"))
    page.problems()
    for look in ({}, {"scheme": "dark"}, {"width": 360, "phone": True}):
        page.open(**look)
        for summary in page.all("#minima summary, .runs summary"):
            summary.click()
        sizes = page.js("return [...document.images].map(i => [i.naturalWidth, i.clientWidth, i.clientHeight])")
        assert len(sizes) == 8
        assert min(map(min, sizes)) > 60
        assert page.js("const page = document.documentElement; return page.scrollWidth - page.clientWidth") == 0
        assert [text for text, ink, paper in page.js(TEXTS) if contrast(ink, paper) < 4.5] == []
        page.screenshot(tmp_path / "minima.png")
    asked = page.js("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in asked if not name.startswith("data:")] == []
    assert [section.text.split("\n")[0] for section in page.all(".results section")][:5] == [
        f"analysis/{name}"
        for name in ("gradients.json", "hessian.json", "landscape-line.npz", "landscape.npz", "sharpness.json")
    ]
    assert page.problems() == []
    next(link for link in page.all("#minima a") if link.text == "landscape.html").click()
    assert page.text("h1") == ["Loss landscape: resnet-small on digits"]
    assert page.problems() == []


def test_page_stands_alone(chromium, analysed, tmp_path):
    page = Page(chromium, write_report(analysed, tmp_path / "page.html", analysed[0].parents[1] / "analysis"))
    (tmp_path / "far" / "away").mkdir(parents=True)
    page.path = page.path.rename(tmp_path / "far" / "away" / "page.html")  # its links lead nowhere now
    page.problems()
    page.open()
    assert page.js("return [...document.images].every(i => i.naturalWidth > 0)")
    assert page.problems() == []


def test_hostile_names_stay_names(chromium, tmp_path):
    page = Page(chromium, write_report([hostile_run(tmp_path)], tmp_path / "page.html"))
    page.problems()
    page.open(360, phone=True)
    assert page.js("return window.hacked") is None
    assert page.all("img") == []
    assert page.text("#legend button") == [HOSTILE]
    page.keys("#curves .plot", "LEFT")
    assert page.text("#curves .tip span") == [HOSTILE]
    assert page.js("return document.documentElement.scrollWidth") == 360
    assert page.problems() == []


@pytest.mark.parametrize("epochs", [0, 1])
def test_page_of_a_run_that_has_just_begun(chromium, tmp_path, epochs):
    run = make_run(tmp_path, "ssam-f", epochs=epochs, finished=False)
    page = Page(chromium, write_report([run], tmp_path / "page.html"))
    page.problems()
    page.open()
    for measure in ("loss", "accuracy"):
        page.click(f"#curves [data-measure={measure}]")
        page.keys("#curves .plot", "LEFT")
        assert len(page.all("#curves .mark")) == epochs
    page.click("#curves [data-measure=loss]")
    page.click("#curves [data-option=log]")
    assert "NaN" not in page.js("return document.body.innerHTML")
    assert "unfinished" in page.one("#summary tbody th").text
    assert page.problems() == []
