"""The report: its numbers against an independent computation, and its page as text."""

import base64
import hashlib
import json
import math
import re
from statistics import fmean

import numpy as np
import pytest
from commands import invoke
from html_elements import Elements
from report_runs import EPOCHS, HOSTILE, LAYERS, METHODS, accuracies, hostile_run, make_run, make_runs, metric, row

from sparsam.errors import UserValueError
from sparsam.report import collect, summary_table, write_report
from sparsam.report.styles import styles
from sparsam.runs.directory import directories_in
from sparsam.runs.files import RunError
from sparsam.runs.run import read_run


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
        assert method.step_ms == pytest.approx(step + 0.1)
        assert method.relative_step == pytest.approx((step + 0.1) / 3.1)
        assert method.peak_memory_mb.mean == pytest.approx(1000 * step + 1)
        assert method.seconds.mean == pytest.approx(0.01 * step * EPOCHS)
    assert [m.rho for m in methods] == [(), (0.1,), (0.1,)]
    assert [m.other_radii for m in methods] == [(), (), ()]
    assert [m.weight_decay for m in methods] == [(5e-4,), (1e-3,), (1e-3,)]
    assert [m.notes for m in methods] == [(), (), ()]


def test_one_slow_seed_does_not_make_a_method_slow(tmp_path):
    runs = make_runs(tmp_path, seeds=3)
    slow = next(run for run in runs if json.loads((run / "recipe.json").read_text())["name"] == "sam") / "summary.json"
    values = json.loads(slow.read_text())
    slow.write_text(json.dumps(values | {"step_ms": 1000 * values["step_ms"]}))
    sgd, sam, _ = collect(runs)
    assert sam.relative_step < 1.1 * METHODS["sam"][4] / METHODS["sgd"][4]
    assert sam.relative_step == sam.step_ms / sgd.step_ms


def test_table_says_the_numbers(tmp_path):
    methods = collect(make_runs(tmp_path))
    values = 100 * np.array(accuracies("ssam-f", 2))
    best = max(metric("ssam-f", 0, e)["test_accuracy"] for e in range(1, EPOCHS + 1)) + 0.0015
    assert row(methods, "SSAM-F") == {
        "Method": ("SSAM-F", ""),
        "Seeds": ("2", ""),
        "Test accuracy, %": (f"{values.mean():.2f} ± {values.std(ddof=1):.2f}", f"best {100 * best:.2f}"),
        "Training loss": ("0.038 ± 0.0021", ""),  # 2 exp(-0.4 · 12) + 0.02, and 0.003 more with the second seed
        "Perturbed (mean of steps), %": ("50.0", ""),
        "FLOPs (theory)": ("1.65×", ""),
        "Step time (measured)": (f"{6.35 / 3.05:.2f}×", "6.35 ms"),
        "Peak memory, MB": ("6,300", ""),
        "Training time": ("0.8 s", ""),
        "Weight decay": ("0.001", ""),
        "ρ": ("0.1", ""),
    }
    sgd = row(methods, "SGD")
    assert [sgd[column][0] for column in ("Perturbed (mean of steps), %", "Step time (measured)", "ρ")] == [
        "–",
        "1.00×",
        "–",
    ]


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
        {"recipe": {"optimizer.name": "adamw"}},
        {"recipe": {"model.name": "resnet18"}},
        {"recipe": {"model.stem": "imagenet"}},
        {"recipe": {"data.image_size": 160}},
        {"recipe": {"train.channels_last": False}},
        {"recipe": {"train.compile": True}},
        {"recipe": {"train.cuda_graph": False}},
    ):
        assert collect([make_run(tmp_path, "sgd", **other), sam])[1].relative_step is None
    first, second = make_run(tmp_path, "sgd"), make_run(tmp_path, "sgd", 1, recipe={"name": "sgd-control"})
    methods = collect([sam, first, second])
    assert [m.relative_step for m in methods] == pytest.approx([1.0, 3.1 / 3.0, 5.7 / 3.0])
    assert [m.label for m in methods] == ["SGD (sgd)", "SGD (sgd-control)", "SAM"]


def test_finished_runs_alone_are_counted(tmp_path):
    done, stopped = make_run(tmp_path, "sam"), make_run(tmp_path, "sam", 1, epochs=5, finished=False)
    (method,) = collect([done, stopped])
    assert method.accuracy.mean == metric("sam", 0, EPOCHS)["test_accuracy"]
    assert (len(method.counted), len(method.runs)) == (1, 2)
    assert method.notes == ("1 of 2 runs unfinished, not counted",)


def test_unfinished_method_shows_what_there_is(tmp_path):
    (method,) = collect([make_run(tmp_path, "ssam-f", epochs=5, finished=False)])
    assert method.label == "SSAM-F"
    assert method.notes == ("unfinished: epoch 5 of 12",)
    assert method.accuracy.mean == metric("ssam-f", 0, 5)["test_accuracy"]
    assert method.step_ms == pytest.approx(6.303)  # the median of five epochs
    assert method.seconds.mean == metric("ssam-f", 0, 5)["elapsed"]
    assert method.theoretical_flops is None
    assert row([method], "SSAM-F")["Method"] == ("SSAM-F", "unfinished: epoch 5 of 12")


@pytest.mark.parametrize("metrics", [None, "", '{"epoch": 1, "test_acc'])
def test_run_before_its_first_epoch(tmp_path, metrics):
    directory = make_run(tmp_path, finished=False)
    (directory / "metrics.jsonl").unlink()
    if metrics is not None:
        (directory / "metrics.jsonl").write_text(metrics)
    methods = collect([directory])
    assert methods[0].accuracy is None
    assert row(methods, "SGD")["Test accuracy, %"] == ("–", "")
    assert methods[0].notes == ("unfinished: epoch 0 of 12",)
    write_report([directory], tmp_path / "page.html")


@pytest.mark.parametrize(
    ("max_steps", "epochs", "words"), [(30, 2, "epoch 2 of 3"), (900, 2, "epoch 2 of 12"), (30, 0, "epoch 0")]
)
def test_a_run_ends_at_its_max_steps(tmp_path, max_steps, epochs, words):
    make_run(tmp_path, recipe={"train.max_steps": max_steps}, epochs=epochs, finished=False)
    (method,) = collect(tmp_path.iterdir())
    assert method.notes == (f"unfinished: {words}",)


def test_a_finished_run_has_the_epochs_that_it_has(tmp_path):
    run = make_run(tmp_path, recipe={"train.epochs": 200, "train.max_steps": 3}, epochs=1)
    assert read_run(run).planned_epochs == 1


def test_seeds_of_masks_may_differ(tmp_path):
    for seed in (0, 1):
        inner = {"name": "random", "sparsity": 0.5, "seed": seed}
        make_run(tmp_path, "ssam-f", seed, recipe={"mask.name": "suffix", "mask.inner": inner})
    (method,) = collect(tmp_path.iterdir())
    assert method.notes == ()
    make_run(tmp_path, "ssam-f", 0, recipe={"mask.name": "suffix", "mask.inner": {**inner, "seed": 2}})
    (method,) = collect(tmp_path.iterdir())
    assert (method.accuracy.n, method.notes) == (3, ())  # another mask is another sample


def test_line_that_is_being_written_is_left_out(tmp_path):
    directory = make_run(tmp_path, epochs=4, finished=False)
    metrics = directory / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-20])
    assert [epoch.epoch for epoch in read_run(directory).metrics] == [1, 2, 3]


def test_runs_that_differ_in_where_they_ran_are_seeds_of_one_method(tmp_path):
    elsewhere = {"data.root": "elsewhere", "data.workers": 2, "train.checkpoint_epochs": 5, "train.threads": 4}
    (method,) = collect([make_run(tmp_path, "sam"), make_run(tmp_path, "sam", 1, recipe=elsewhere)])
    assert method.accuracy.n == 2
    assert method.notes == ("recipes differ in train.threads",)


def test_runs_of_different_recipes_are_rows_and_not_seeds(tmp_path):
    """All of one name, as `sparsam train digits-sam --set ... -o ...` makes them."""
    runs = [make_run(tmp_path, "sam", seed) for seed in (0, 1)]
    runs += [make_run(tmp_path, "sam", seed, recipe={"sam.rho": 0.2}) for seed in (0, 1, 2)]
    runs += [make_run(tmp_path, "sam", recipe={"sam.rho": 0.2, "train.precision": "bf16"}), make_run(tmp_path)]
    methods = collect(runs)
    assert [(m.label, m.accuracy.n, m.rho, m.notes) for m in methods] == [
        ("SGD", 1, (), ()),
        ("SAM (sam.rho=0.1, train.precision=fp32)", 2, (0.1,), ()),
        ("SAM (sam.rho=0.2, train.precision=fp32)", 3, (0.2,), ()),
        ("SAM (sam.rho=0.2, train.precision=bf16)", 1, (0.2,), ()),
    ]
    assert [m.accuracy.mean for m in methods[1:]] == pytest.approx([np.mean(accuracies("sam", n)) for n in (2, 3, 1)])
    assert len({look.classes for look in styles([m.method for m in methods])}) == 4


def test_names_come_before_settings_where_rows_differ_in_both(tmp_path):
    other = {"name": "mine", "mask.name": "random", "mask.sparsity": 0.9}
    runs = [make_run(tmp_path, "ssam-f"), make_run(tmp_path, "ssam-f", recipe={"mask.interval_epochs": 2})]
    runs.append(make_run(tmp_path, "ssam-f", recipe=other))
    assert [m.label for m in collect(runs)] == [
        "SSAM-F (ssam-f, mask.interval_epochs=none)",
        "SSAM-F (ssam-f, mask.interval_epochs=2)",
        "SSAM-F (mine)",
    ]


def test_a_seed_that_is_there_twice_counts_once(tmp_path):
    runs = [
        make_run(tmp_path, "sam", seed, summary={"test_accuracy": 0.5 + 0.1 * i}) for i, seed in enumerate((0, 1, 1))
    ]
    stopped = make_run(tmp_path, "sam", 0, epochs=3, finished=False)
    (method,) = collect([stopped, *runs, runs[0]])
    assert (method.accuracy.mean, method.accuracy.n) == (pytest.approx(0.55), 2)
    assert method.accuracy.deviation == pytest.approx(np.std([0.5, 0.6], ddof=1))
    assert method.notes == (
        "1 of 4 runs unfinished, not counted",
        "seed 1 is there 2 times, counted once",
    )
    cells = row([method], "SAM")
    assert cells["Seeds"] == ("2", "")
    (series,) = embedded(elements([stopped, *runs], tmp_path))["methods"]
    assert [(run["seed"], run["finished"]) for run in series["runs"]] == [(0, True), (1, True)]


def test_steps_that_were_timed_in_turn_have_the_median_of_their_ratios(tmp_path):
    ratio = {"median": 1.83, "low": 1.79, "high": 1.85, "rounds": 30}
    runs = [make_run(tmp_path, "sgd"), make_run(tmp_path, "sam", summary={"step_ratio": ratio})]
    methods = collect(runs)
    assert [method.relative_step for method in methods] == [1.0, 1.83]
    assert row(methods, "SAM")["Step time (measured)"] == ("1.83× ± 0.03", "median of 30 rounds")


def test_a_setting_that_an_older_recipe_lacks_is_its_default(tmp_path):
    runs = [make_run(tmp_path, "sam"), make_run(tmp_path, "sam", 1, recipe={"data.limit": None, "data.cutout": 0})]
    (method,) = collect(runs)
    assert method.notes == ()
    methods = collect([*runs, make_run(tmp_path, "sam", 2, recipe={"data.cutout": 4})])
    assert [(m.label, m.accuracy.n) for m in methods] == [("SAM (data.cutout=0)", 2), ("SAM (data.cutout=4)", 1)]


def test_runs_that_differ_in_the_ramp_alone_are_told_apart(tmp_path):
    old, plain = make_run(tmp_path, "sam"), make_run(tmp_path, "sam", 1, recipe={"sam.ramp_epochs": 0.0})
    ramped = {"sam.ramp_epochs": 2.0}
    methods = collect([old, plain, make_run(tmp_path, "sam", recipe=ramped)])
    assert [(m.label, m.accuracy.n) for m in methods] == [
        ("SAM (sam.ramp_epochs=0)", 2),
        ("SAM (sam.ramp_epochs=2)", 1),
    ]
    named = make_run(tmp_path, "sam", recipe={**ramped, "name": "sam-ramp2"}, summary={"name": "sam-ramp2"})
    methods = collect([old, plain, named])
    assert [(method.label, method.notes) for method in methods] == [("SAM (sam)", ()), ("SAM (sam-ramp2)", ())]


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
    assert [[cell.text for cell in cells[-2:]] for cells in table.rows] == [
        ["–", "–"],
        ["0.5 ± 0.35", "12 (1 of 2 seeds)"],
    ]


def test_sharpness_of_some_seeds_says_of_how_many(tmp_path):
    sam, sgd = [make_run(tmp_path, "sam", seed) for seed in range(3)], make_run(tmp_path)
    for run, rise in ((sam[0], 0.25), (sam[2], 0.75), (sgd, 1.5)):
        measured = {"rho": 0.1, "samples": 64, "worst_case": rise, "lambda1": 10 * rise if run is sam[0] else None}
        (run / "analysis").mkdir()
        (run / "analysis" / "sharpness.json").write_text(json.dumps(measured))
    methods = collect([*sam, sgd])
    shown = row(methods, "SAM")
    assert shown["Seeds"][0] == "3"
    assert shown["Loss rise, ρ = 0.1"][0] == f"0.5 ± {np.std([0.25, 0.75], ddof=1):.2g} (2 of 3 seeds)"
    assert shown["λ1"][0] == "2.5 (1 of 3 seeds)"
    assert [row(methods, "SGD")[column][0] for column in ("Loss rise, ρ = 0.1", "λ1")] == ["1.5", "–"]


@pytest.mark.parametrize(
    ("mask", "shown"), [({"name": "suffix", "cut": "layer3"}, None), ({"name": "fisher", "cut": None}, ("1.65×", ""))]
)
def test_runs_with_a_cut_have_no_theoretical_flops_though_older_ones_wrote_them(tmp_path, mask, shown):
    """The formula counts what a cut saves as if it were computed."""
    run = make_run(tmp_path, "ssam-f", recipe={f"mask.{key}": value for key, value in mask.items()})
    assert json.loads((run / "summary.json").read_text())["theoretical_flops"] == 1.647
    assert row(collect([run]), "SSAM-F").get("FLOPs (theory)") == shown  # the column is left out where it is empty


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
            edit("summary.json", lambda s: s.update(seconds="long")),
            r"summary\.json: seconds must be a number, but is 'long'$",
        ),
        (
            edit("summary.json", lambda s: s.update(evaluated_on="train")),
            r"evaluated_on must be 'test' or 'validation'",
        ),
        (edit("summary.json", lambda s: s.update(extra=[1])), r"extra must be an object, but is \[1\]$"),
        (edit("summary.json", lambda s: s.update(measured=1)), r"measured must be an object, but is 1$"),
        (
            edit("summary.json", lambda s: s.update(measured={"step_ratio": {"device": "cpu", "torch": 2}})),
            r"measured 'step_ratio' must be an object with device, torch and git, .* but is \{'device': 'cpu', 'torch': 2\}$",
        ),
        (
            edit("summary.json", lambda s: s.update(measured={"a": {"device": "cpu", "torch": "2", "git": 3}})),
            r"measured 'a' must be an object with device, torch and git, which may be null, but is .*$",
        ),
        (
            edit("summary.json", lambda s: s.update(extra={"a": "x" * 99})),
            r"extra 'a' must be a number, but is 'xxx.*\.\.\.$",
        ),
    ],
)
def test_error_names_the_file_and_the_problem(tmp_path, spoil, message):
    directory = make_run(tmp_path)
    spoil(directory)
    with pytest.raises(RunError, match=message) as caught:
        write_report([directory], tmp_path / "page.html")
    assert str(directory) in str(caught.value)
    assert not (tmp_path / "page.html").exists()


def test_errors_about_directories(tmp_path):
    with pytest.raises(UserValueError, match="there is no run to compare"):
        write_report([], tmp_path / "page.html")
    with pytest.raises(RunError, match="nowhere is not a directory"):
        write_report([tmp_path / "nowhere"], tmp_path / "page.html")
    run = make_run(tmp_path)
    with pytest.raises(UserValueError, match=r"page\.html cannot be written"):
        write_report([run], run / "recipe.json" / "page.html")


def test_a_folder_stands_for_all_runs_in_it(tmp_path):
    """Those in sub-folders too, also beside runs; what lies within a run is none."""
    folder, deeper, elsewhere = tmp_path / "runs", tmp_path / "runs" / "deep" / "deeper", tmp_path / "elsewhere"
    for place in (deeper, elsewhere):
        place.mkdir(parents=True)
    first = make_run(folder, "sam")
    make_run(first, "sam", 1)
    others = [make_run(deeper, "sam", 2), make_run(deeper)]
    (folder / "linked").symlink_to(make_run(elsewhere, "sam", 3))
    (folder / "circle").symlink_to(folder)
    assert directories_in(folder) == sorted([first, *others, folder / "linked"])
    assert directories_in(first) == [first]
    assert directories_in(tmp_path / "nowhere") == []
    invoke("report", folder, "-o", tmp_path / "page.html")
    page = Elements((tmp_path / "page.html").read_text(encoding="utf-8"))
    methods = {method["label"]: [run["seed"] for run in method["runs"]] for method in embedded(page)["methods"]}
    assert methods == {"SGD": [0], "SAM": [0, 2, 3]}


# The page as text


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
        make_run(
            tmp_path, "sam", 2, environment={"processor": "A chip", "threads": 1, "start": {"git": "ab0123456789"}}
        ),
    ]
    page = elements(runs, tmp_path)
    facts = dict(zip((t for _, t in page.of("dt")), (t for _, t in page.of("dd")), strict=True))
    assert page.of("h1")[0][1] == "resnet-small on digits"
    assert facts["Date"] == "2026-02-01 to 2026-02-03"
    assert facts["Hardware"] == "CPU, 2 threads / NVIDIA H200 / A chip, 1 thread"
    assert facts["Versions"] == "sparsam 0.1.0, torch 2.13.0, python 3.11.7"
    assert facts["Commit"] == "0123456789ab+ / ab0123456789"
    lead = next(text for attributes, text in page.of("p") if attributes.get("class") == "lead")
    assert lead.startswith("3 methods, each trained for 12 epochs with 2 to 3 seeds, compared by")
