"""The report: numbers against an independent computation, then the page in a real browser."""

import base64
import hashlib
import json
import math
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest

from sparsam.report import ReportError, collect, read_run, summary_table, write_report

EPOCHS = 12
LAYERS = ("stem", "layer1", "head")
METHODS = {  # label, sam, mask, weight decay, ms a step, share perturbed, theoretical FLOPs
    "sgd": ("SGD", False, "dense", 5e-4, 3.0, None, 1.0),
    "sam": ("SAM", True, "dense", 1e-3, 5.7, 1.0, 2.0),
    "ssam-f": ("SSAM-F", True, "fisher", 1e-3, 6.3, 0.5, 1.647),
}


def metric(name, seed, epoch):
    """One line of metrics: smooth, and different for every run."""
    own = 0.01 * list(METHODS).index(name) + 0.003 * seed
    step = METHODS[name][4]
    density = {layer: 0.2 + 0.2 * i + 0.01 * epoch + 0.02 * seed for i, layer in enumerate(LAYERS)}
    return {
        "epoch": epoch,
        "steps": 10,
        "train_loss": 2.0 * math.exp(-0.4 * epoch) + own,
        "test_loss": 1.0,
        "test_accuracy": 0.9 + own - 0.7 * math.exp(-0.5 * epoch) - 0.004 * (epoch == EPOCHS),
        "lr": 0.05,
        "rho": 0.1 if METHODS[name][1] else None,
        "seconds": 0.01 * step,
        "elapsed": 0.01 * step * epoch,
        "step_ms": step + 0.001 * epoch,
        "perturbed": METHODS[name][5],
        "mask_density": density if METHODS[name][2] == "fisher" else None,
    }


def make_run(root, name="sgd", seed=0, *, epochs=EPOCHS, recipe=(), environment=(), summary=(), finished=True):
    """Write a run directory as the trainer does. The last three overwrite values, the recipe's by dotted key."""
    label, sam, mask, weight_decay, step, perturbed, flops = METHODS[name]
    settings = {
        "name": name,
        "model": {"name": "resnet-small"},
        "data": {"name": "digits", "batch_size": 128, "validation": 0},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": weight_decay},
        "sam": {"enabled": sam, "rho": 0.1, "adaptive": False},
        "mask": {"kind": mask, "sparsity": 0.5},
        "train": {"epochs": EPOCHS, "seed": seed, "precision": "fp32"},
    }
    for key, value in dict(recipe).items():
        section, dot, setting = key.partition(".")
        if dot:
            settings[section][setting] = value
        else:
            settings[key] = value
    lines = [metric(name, seed, epoch) for epoch in range(1, epochs + 1)]
    directory = root / f"run-{len(list(root.iterdir()))}"
    directory.mkdir()
    (directory / "recipe.json").write_text(json.dumps(settings))
    (directory / "environment.json").write_text(
        json.dumps(
            {
                "sparsam": "0.1.0",
                "torch": "2.13.0",
                "python": "3.11.7",
                "device": "cpu",
                "git": None,
                "platform": "Linux",
                "threads": 2,
                "started": f"2026-02-0{1 + seed}T10:00:00+00:00",
                **dict(environment),
            }
        )
    )
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        accuracies = [line["test_accuracy"] for line in lines]
        result = {
            "name": settings["name"],
            "method": label,
            "seed": seed,
            "epochs": epochs,
            "test_accuracy": accuracies[-1],
            "best_accuracy": max(accuracies),
            "best_epoch": 1 + int(np.argmax(accuracies)),
            "evaluated_on": "test",
            "step_ms": step + 0.1 * seed,
            "seconds": lines[-1]["elapsed"],
            "peak_memory_mb": 1000 * step + seed,
            "perturbed": perturbed,
            "theoretical_flops": flops,
            "extra": {},
            **dict(summary),
        }
        (directory / "summary.json").write_text(json.dumps(result))
    return directory


def make_runs(root, seeds=2):
    root.mkdir(exist_ok=True)
    return [make_run(root, name, seed) for name in METHODS for seed in range(seeds)]


def accuracies(name, seeds):
    return [metric(name, seed, EPOCHS)["test_accuracy"] for seed in range(seeds)]


def row(methods, label):
    """A row of the table as {column: (text, note)}."""
    table = summary_table(methods)
    cells = next(cells for cells in table.rows if cells[0].text == label)
    return {column: (cell.text, cell.note) for column, cell in zip(table.columns, cells, strict=True)}


# What is computed


def test_numbers_equal_an_independent_computation(tmp_path):
    methods = collect(make_runs(tmp_path, seeds=3))
    assert [(m.name, m.label, len(m.runs)) for m in methods] == [
        ("sgd", "SGD", 3),
        ("sam", "SAM", 3),
        ("ssam-f", "SSAM-F", 3),
    ]
    for method in methods:
        values = accuracies(method.name, 3)
        assert method.accuracy.mean == pytest.approx(np.mean(values), rel=1e-12)
        assert method.accuracy.deviation == pytest.approx(np.std(values, ddof=1), rel=1e-12)
        best = [max(metric(method.name, s, e)["test_accuracy"] for e in range(1, EPOCHS + 1)) for s in range(3)]
        assert method.best_accuracy.mean == pytest.approx(np.mean(best), rel=1e-12)
        assert method.best_accuracy.mean > method.accuracy.mean
        step = METHODS[method.name][4]
        assert method.step_ms.mean == pytest.approx(step + 0.1)
        assert method.relative_step == pytest.approx((step + 0.1) / 3.1)
        assert method.peak_memory_mb.mean == pytest.approx(1000 * step + 1)
        assert method.seconds.mean == pytest.approx(0.01 * step * EPOCHS)
    assert [m.rho for m in methods] == [(), (0.1,), (0.1,)]
    assert [m.weight_decay for m in methods] == [(5e-4,), (1e-3,), (1e-3,)]
    assert [m.notes for m in methods] == [(), (), ()]


def test_table_says_the_numbers(tmp_path):
    methods = collect(make_runs(tmp_path))
    values = 100 * np.array(accuracies("ssam-f", 2))
    best = max(metric("ssam-f", 0, e)["test_accuracy"] for e in range(1, EPOCHS + 1)) + 0.0015
    assert row(methods, "SSAM-F") == {
        "Method": ("SSAM-F", ""),
        "Seeds": ("2", ""),
        "Test accuracy, %": (f"{values.mean():.2f} ± {values.std(ddof=1):.2f}", f"best {100 * best:.2f}"),
        "Perturbed, %": ("50.0", ""),
        "FLOPs (theory)": ("1.65×", ""),
        "Step time (measured)": (f"{6.35 / 3.05:.2f}×", "6.35 ms"),
        "Peak memory, MB": ("6,300", ""),
        "Training time": ("0.8 s", ""),
        "Weight decay": ("0.001", ""),
        "ρ": ("0.1", ""),
    }
    sgd = row(methods, "SGD")
    assert [sgd[column][0] for column in ("Perturbed, %", "Step time (measured)", "ρ")] == ["–", "1.00×", "–"]


def test_one_seed_has_no_deviation(tmp_path):
    methods = collect([make_run(tmp_path)])
    assert methods[0].accuracy.deviation is None
    accuracy, best = row(methods, "SGD")["Test accuracy, %"]
    assert accuracy == f"{100 * metric('sgd', 0, EPOCHS)['test_accuracy']:.2f}"
    assert best.endswith("(epoch 11)")


def test_step_time_is_relative_to_a_comparable_run_without_sam(tmp_path):
    sam = make_run(tmp_path, "sam")
    assert collect([sam])[0].relative_step is None
    assert row(collect([sam]), "SAM")["Step time (measured)"] == ("–", "5.70 ms")
    for other in (
        {"environment": {"device": "NVIDIA H200"}},
        {"environment": {"threads": 16}},
        {"environment": {"processor": "another"}},
        {"recipe": {"data.batch_size": 64}},
        {"recipe": {"train.precision": "bf16"}},
        {"recipe": {"model.name": "resnet18"}},
    ):
        assert collect([make_run(tmp_path, "sgd", **other), sam])[1].relative_step is None
    first, second = make_run(tmp_path, "sgd"), make_run(tmp_path, "sgd", 1, recipe={"name": "sgd-control"})
    methods = collect([sam, first, second])
    assert [m.relative_step for m in methods] == pytest.approx([5.7 / 3.0, 1.0, 3.1 / 3.0])
    assert [m.label for m in methods] == ["SAM", "SGD (sgd)", "SGD (sgd-control)"]


def test_finished_runs_alone_are_counted(tmp_path):
    done, stopped = make_run(tmp_path, "sam"), make_run(tmp_path, "sam", 1, epochs=5, finished=False)
    (method,) = collect([done, stopped])
    assert method.accuracy.mean == metric("sam", 0, EPOCHS)["test_accuracy"]
    assert (len(method.counted), len(method.runs)) == (1, 2)
    assert method.notes == ("1 of 2 runs unfinished, not counted",)


def test_unfinished_method_shows_what_there_is(tmp_path):
    (method,) = collect([make_run(tmp_path, "ssam-f", epochs=5, finished=False)])
    assert method.label == "ssam-f"
    assert method.notes == ("unfinished: epoch 5 of 12",)
    assert method.accuracy.mean == metric("ssam-f", 0, 5)["test_accuracy"]
    assert method.step_ms.mean == pytest.approx(6.303)  # the median of five epochs
    assert method.seconds.mean == metric("ssam-f", 0, 5)["elapsed"]
    assert method.theoretical_flops is None
    assert row([method], "ssam-f")["Method"] == ("ssam-f", "unfinished: epoch 5 of 12")


@pytest.mark.parametrize("metrics", [None, "", '{"epoch": 1, "test_acc'])
def test_run_before_its_first_epoch(tmp_path, metrics):
    directory = make_run(tmp_path, finished=False)
    (directory / "metrics.jsonl").unlink()
    if metrics is not None:
        (directory / "metrics.jsonl").write_text(metrics)
    methods = collect([directory])
    assert methods[0].accuracy is None
    assert row(methods, "sgd")["Test accuracy, %"] == ("–", "")
    assert methods[0].notes == ("unfinished: epoch 0 of 12",)
    write_report([directory], tmp_path / "page.html")


def test_line_that_is_being_written_is_left_out(tmp_path):
    directory = make_run(tmp_path, epochs=4, finished=False)
    metrics = directory / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-20])
    assert [epoch.epoch for epoch in read_run(directory).metrics] == [1, 2, 3]


def test_notes_tell_what_seeds_of_one_method_do_not_share(tmp_path):
    runs = [make_run(tmp_path, "sam"), make_run(tmp_path, "sam", 1, recipe={"sam.rho": 0.2, "data.root": "elsewhere"})]
    (method,) = collect([*runs, make_run(tmp_path, "sam", 1), runs[0]])
    assert method.notes == ("recipes differ in sam.rho", "seed 1 counted 2 times")
    assert row([method], "SAM")["ρ"][0] == "0.1, 0.2"


def test_images_are_named(tmp_path):
    first = make_run(tmp_path, recipe={"data.validation": 5000}, summary={"evaluated_on": "validation"})
    assert "Validation accuracy, %" in summary_table(collect([first])).columns
    assert read_run(make_run(tmp_path, recipe={"data.validation": 500}, finished=False)).evaluated_on == "validation"
    both = collect([first, make_run(tmp_path, "sam", recipe={"data.name": "cifar10"})])
    assert "Accuracy, %" in summary_table(both).columns
    assert row(both, "SGD")["Method"][1] == "resnet-small on digits; validation images"
    assert row(both, "SAM")["Method"][1] == "resnet-small on cifar10; test images"


def test_further_numbers_become_columns(tmp_path):
    runs = [
        make_run(tmp_path, "sgd"),
        make_run(tmp_path, "sam", 0, summary={"extra": {"Sharpness": 0.25, "λ max": 12}}),
        make_run(tmp_path, "sam", 1, summary={"extra": {"Sharpness": 0.75, "λ max": None}}),
    ]
    table = summary_table(collect(runs))
    assert table.columns[-2:] == ("Sharpness", "λ max")
    assert [[cell.text for cell in cells[-2:]] for cells in table.rows] == [["–", "–"], ["0.5 ± 0.35", "12"]]


def test_density_is_the_mean_over_seeds(tmp_path):
    sgd, sam, sparse = collect(make_runs(tmp_path))
    assert sgd.density() is None
    assert sam.density() is None
    density = sparse.density()
    assert (density.layers, density.epochs, density.seeds) == (LAYERS, tuple(range(1, EPOCHS + 1)), 2)
    for layer, shares in zip(LAYERS, density.shares, strict=True):
        expected = [fmean(metric("ssam-f", s, e)["mask_density"][layer] for s in range(2)) for e in density.epochs]
        assert shares == pytest.approx(expected)


def edit(name, change):
    def apply(directory):
        path = directory / name
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    return apply


def write(name, text):
    return lambda directory: (directory / name).write_bytes(text)


def remove(name):
    return lambda directory: (directory / name).unlink()


def last_line(**values):
    def apply(directory):
        path = directory / "metrics.jsonl"
        *lines, last = path.read_text().splitlines()
        path.write_text("\n".join([*lines, json.dumps({**json.loads(last), **values})]) + "\n")

    return apply


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove("recipe.json"), r"run-0 is not a run directory: it has no recipe\.json$"),
        (remove("environment.json"), r"run-0 has no environment\.json$"),
        (remove("metrics.jsonl"), r"run-0 has no metrics\.jsonl$"),
        (write("recipe.json", b'{"name": '), r"recipe\.json is not valid JSON: Expecting value: line 1"),
        (write("recipe.json", b"[1]"), r"recipe\.json must hold a JSON object, but holds \[1\]$"),
        (write("recipe.json", b'"\xff"'), r"recipe\.json cannot be read: .*utf-8"),
        (write("summary.json", b"{}{}"), r"summary\.json is not valid JSON: Extra data"),
        (write("metrics.jsonl", b""), r"metrics\.jsonl is empty, but the run is finished$"),
        (write("metrics.jsonl", b'{"epoch": 1'), r"metrics\.jsonl, line 1 is not valid JSON"),
        (write("metrics.jsonl", b"{}\n"), r"metrics\.jsonl, line 1 has no 'epoch'$"),
        (last_line(epoch=1), r"metrics\.jsonl, line 12: epoch 1 comes after epoch 11$"),
        (last_line(test_accuracy="high"), r"line 12: test_accuracy must be a number, but is 'high'$"),
        (last_line(test_accuracy=math.nan), r"line 12: test_accuracy must be a number, but is nan$"),
        (last_line(mask_density=[1]), r"line 12: mask_density must be an object of numbers or null, but is \[1\]$"),
        (edit("recipe.json", lambda r: r.pop("sam")), r"recipe\.json has no 'sam\.rho'$"),
        (edit("recipe.json", lambda r: r["sam"].update(enabled=1)), r"sam\.enabled must be true or false, but is 1$"),
        (edit("recipe.json", lambda r: r["train"].update(seed=True)), r"train\.seed must be a whole number"),
        (edit("recipe.json", lambda r: r.update(name="")), r"recipe\.json: name must be a text, but is ''$"),
        (edit("environment.json", lambda e: e.update(started="noon")), r"started must be an ISO time, but is 'noon'$"),
        (
            edit("summary.json", lambda s: s.update(seconds=None)),
            r"summary\.json: seconds must be a number, but is None$",
        ),
        (
            edit("summary.json", lambda s: s.update(evaluated_on="train")),
            r"evaluated_on must be 'test' or 'validation'",
        ),
        (edit("summary.json", lambda s: s.update(extra=[1])), r"extra must be an object, but is \[1\]$"),
        (
            edit("summary.json", lambda s: s.update(extra={"a": "x" * 99})),
            r"extra 'a' must be a number, but is 'xxx.*\.\.\.$",
        ),
    ],
)
def test_error_names_the_file_and_the_problem(tmp_path, spoil, message):
    directory = make_run(tmp_path)
    spoil(directory)
    with pytest.raises(ReportError, match=message) as caught:
        write_report([directory], tmp_path / "page.html")
    assert str(directory) in str(caught.value)
    assert not (tmp_path / "page.html").exists()


def test_errors_about_directories(tmp_path):
    with pytest.raises(ReportError, match="there is no run to compare"):
        write_report([], tmp_path / "page.html")
    with pytest.raises(ReportError, match="nowhere is not a directory"):
        write_report([tmp_path / "nowhere"], tmp_path / "page.html")
    run = make_run(tmp_path)
    with pytest.raises(ReportError, match=r"page\.html cannot be written"):
        write_report([run], run / "recipe.json" / "page.html")


# The page as text


class Elements(HTMLParser):
    """Every element with its attributes and the text right inside it."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append([tag, dict(attrs), ""])
        self.inside = True

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.found[-1][2] += data

    def of(self, tag):
        return [(attributes, text) for name, attributes, text in self.found if name == tag]


def elements(runs, tmp_path):
    return Elements(write_report(runs, tmp_path / "page.html").read_text(encoding="utf-8"))


def embedded(page):
    return json.loads(next(text for attributes, text in page.of("script") if "type" in attributes))


def test_page_goes_where_it_should(tmp_path):
    runs = make_runs(tmp_path / "runs")
    assert write_report(runs, tmp_path / "new" / "name.html") == tmp_path / "new" / "name.html"
    assert write_report(runs, tmp_path) == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_bytes() == (tmp_path / "new" / "name.html").read_bytes()


def test_page_asks_for_nothing(tmp_path):
    text = write_report(make_runs(tmp_path / "runs"), tmp_path / "page.html").read_text(encoding="utf-8")
    assert set(re.findall(r"\w+://[\w./]*", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"@import|url\((?!#)", text)
    for _, attributes, _ in Elements(text).found:
        assert not attributes.keys() & {"src", "href", "srcset", "action", "style", "onclick", "onload"}


def test_policy_allows_this_style_and_this_script(tmp_path):
    page = elements(make_runs(tmp_path / "runs"), tmp_path)
    policy = next(a["content"] for a, _ in page.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    for kind, text in [("style", page.of("style")[0][1]), ("script", page.of("script")[-1][1])]:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"


def test_page_holds_the_metrics(tmp_path):
    data = embedded(elements(make_runs(tmp_path / "runs"), tmp_path))
    for method, name in zip(data["methods"], METHODS, strict=True):
        assert method["label"] == METHODS[name][0]
        for run in method["runs"]:
            lines = [metric(name, run["seed"], epoch) for epoch in range(1, EPOCHS + 1)]
            assert run["epoch"] == [line["epoch"] for line in lines]
            assert run["accuracy"] == [line["test_accuracy"] for line in lines]
            assert run["loss"] == [line["train_loss"] for line in lines]
            assert run["elapsed"] == [line["elapsed"] for line in lines]


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_diverged_loss_is_a_gap(tmp_path, loss):
    run = make_run(tmp_path)
    last_line(train_loss=loss)(run)
    data = embedded(elements([run], tmp_path))
    assert data["methods"][0]["runs"][0]["loss"][-1] is None
    assert data["methods"][0]["runs"][0]["loss"][-2] == metric("sgd", 0, EPOCHS - 1)["train_loss"]


HOSTILE = '</script ><script>window.hacked=1</script><img src=x onerror="window.hacked=2">&amp;<!--<script >'


def hostile_run(root):
    """A run that tries to get markup into the page wherever a text of its files goes."""
    return make_run(
        root,
        "ssam-f",
        recipe={"name": HOSTILE, "model.name": HOSTILE, f"mask.{HOSTILE}": HOSTILE},
        environment={"device": HOSTILE, "git": HOSTILE, "torch": HOSTILE},
        summary={"method": HOSTILE, "extra": {HOSTILE: 1}},
    )


def test_texts_of_files_are_escaped(tmp_path):
    harmless = elements(make_runs(tmp_path / "runs", seeds=1)[2:], tmp_path)
    page = elements([hostile_run(tmp_path)], tmp_path)
    assert len(page.of("script")) == len(harmless.of("script")) == 2
    assert page.of("img") == []
    assert embedded(page)["methods"][0]["label"] == HOSTILE
    assert page.of("h1")[0][1] == f"{HOSTILE} on digits"


def test_unfinished_run_is_marked(tmp_path):
    page = elements([make_run(tmp_path), make_run(tmp_path, seed=1, epochs=3, finished=False)], tmp_path)
    assert [text for _, text in page.of("em")] == ["unfinished"]
    assert len(page.of("details")) == 2
    assert all("open" not in attributes for attributes, _ in page.of("details"))


def test_head_of_the_page(tmp_path):
    runs = [
        *make_runs(tmp_path / "runs"),
        make_run(tmp_path, "sam", 2, environment={"device": "NVIDIA H200", "git": "0123456789ab+"}),
        make_run(tmp_path, "sam", 2, environment={"processor": "A chip", "threads": 1}),
    ]
    page = elements(runs, tmp_path)
    facts = dict(zip((t for _, t in page.of("dt")), (t for _, t in page.of("dd")), strict=True))
    assert page.of("h1")[0][1] == "resnet-small on digits"
    assert facts["Date"] == "2026-02-01 to 2026-02-03"
    assert facts["Hardware"] == "CPU, 2 threads / NVIDIA H200 / A chip, 1 thread"
    assert facts["Versions"] == "sparsam 0.1.0, torch 2.13.0, python 3.11.7"
    assert facts["Commit"] == "0123456789ab+"
    lead = next(text for attributes, text in page.of("p") if attributes.get("class") == "lead")
    assert lead.startswith("3 methods, each trained for 12 epochs with 2 to 4 seeds, compared by")


# The page in a browser

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not driver:
        missing = "chromium" if not browser else "chromedriver"
        pytest.skip(f"{missing} is not installed: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chromium
    chromium.quit()


class Page:
    """The page as a reader uses it."""

    def __init__(self, chromium, path):
        self.browser = chromium
        self.path = path

    def open(self, width=1280, *, phone=False, scheme="light"):
        metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": phone}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})
        self.media(scheme=scheme)
        self.browser.get(self.path.as_uri())
        return self

    def media(self, medium="", scheme="light"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": medium, "features": features})

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def one(self, selector):
        (element,) = self.all(selector)
        return element

    def click(self, selector):
        self.one(selector).click()

    def keys(self, selector, *names):
        """Focus by keyboard and press arrow keys."""
        from selenium.webdriver.common.keys import Keys

        self.js("document.querySelector(arguments[0]).focus({focusVisible: true})", selector)
        self.one(selector).send_keys(*(getattr(Keys, f"ARROW_{name}") for name in names))

    def js(self, code, *arguments):
        return self.browser.execute_script(code, *arguments)

    def text(self, selector):
        return [element.text for element in self.all(selector)]

    def colour(self, selector, name="background-color"):
        return self.one(selector).value_of_css_property(name)

    def marks(self, chart):
        """What the chart points at: {(method, seed): (epoch, x, value, height in pixels)}."""
        names = ["data-method", "data-seed", "data-epoch", "data-x", "data-value", "cy"]
        read = "return [...document.querySelectorAll(arguments[0])].map(e => arguments[1].map(n => +e.getAttribute(n)))"
        found = self.js(read, f"{chart} .mark", names)
        return {(list(METHODS)[method], seed): tuple(values) for method, seed, *values in found}

    def problems(self):
        return [entry["message"] for entry in self.browser.get_log("browser")]

    def screenshot(self, path):
        """Save the whole page."""
        shot = self.browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))
        assert path.stat().st_size > 10_000


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
    assert all(path.is_displayed() for path in page.all("#curves path.mean"))


def test_recipes_are_folded_away(page):
    assert len(page.all("details")) == 6
    settings = page.all("details .settings")[2]
    assert not settings.is_displayed()
    page.all("details summary")[2].click()
    assert settings.is_displayed()
    assert "weight_decay\n0.001" in settings.text
    assert page.text("details .folder")[2] == "run-2"


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
