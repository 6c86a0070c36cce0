"""`sparsam sharpness`, `gradients` and `masks` on a run that was really trained, against numbers computed here."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import invoke
from torch.nn import functional as F
from trained_runs import train_digits

from sparsam.cli.names import names_of
from sparsam.cli.sharpness import show
from sparsam.data import load_digits
from sparsam.data.augment import normalise
from sparsam.models import build_model
from sparsam.report.mask_figure import RunMasks, draw_masks
from sparsam.runs.results import read_result, write_result
from sparsam.selection import random_generator

QUICK = ["--top", 1, "--products", 4, "--probes", 1, "--steps", 2]
FEW = ["--samples", 100, "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("analysis") / "digits-ssam-f-seed0"
    return train_digits(path, "ssam-f", "mask.samples=16", "mask.sparsity=0.8", epochs=2)


def trained(run, count):
    """The run's network and the images that commands look at, put together by hand."""
    data = load_digits()
    chosen = torch.randperm(len(data.train), generator=random_generator(0))[:count]
    model = build_model("resnet-small", 10, channels=1)
    saved = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    x = normalise(data.train.x[chosen], torch.tensor(data.mean), torch.tensor(data.std))
    return model.eval(), x, data.train.y[chosen], saved["optimizer"]["sparsam"]["moved"]


def rise(model, x, y, rho, mask=None, adaptive=False):
    """f(w + eps) - f(w) with SAM's eps, written out."""
    params = list(model.parameters())
    loss = F.cross_entropy(model(x), y)
    g = torch.autograd.grad(loss, params)
    w = [p.detach().clone() for p in params]
    if adaptive:
        norm = torch.stack([(a.abs() * b).square().sum() for a, b in zip(w, g, strict=True)]).sum().sqrt()
        eps = [rho * a**2 * b / norm for a, b in zip(w, g, strict=True)]
    else:
        norm = torch.stack([b.square().sum() for b in g]).sum().sqrt()
        eps = [rho * b / norm for b in g]
    with torch.no_grad():
        for p, e, m in zip(params, eps, mask or [True] * len(params), strict=True):
            p += e * m
        after = F.cross_entropy(model(x), y)
        for p, a in zip(params, w, strict=True):
            p.copy_(a)
    return (after - loss).item()


def test_sharpness_of_a_run(run):
    text = invoke("sharpness", run, "--rho", 0.2, "--noise", 3, *FEW).stdout
    result = json.loads((run / "analysis" / "sharpness.json").read_text())
    model, x, y, mask = trained(run, 100)
    assert result["loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)
    assert result["worst_case"] == pytest.approx(rise(model, x, y, 0.2), rel=1e-3)
    assert result["worst_case_masked"] == pytest.approx(rise(model, x, y, 0.2, mask), rel=1e-3)
    assert result["worst_case_adaptive"] == pytest.approx(rise(model, x, y, 1.0, adaptive=True), rel=1e-3)
    assert 0 < result["worst_case_masked"] < result["worst_case"]
    params = list(model.parameters())
    g = torch.autograd.grad(F.cross_entropy(model(x), y), params, create_graph=True)
    v = [torch.randn_like(p) for p in params]
    for _ in range(60):  # power iteration
        length = torch.stack([t.square().sum() for t in v]).sum().sqrt()
        v = [t / length for t in v]
        product = torch.autograd.grad(g, params, v, retain_graph=True)
        largest = sum((a * b).sum() for a, b in zip(product, v, strict=True)).item()
        v = list(product)
    assert result["lambda1"] == pytest.approx(largest, rel=0.03)
    assert result["samples"] == 100
    assert f"{result['worst_case']:.3g}" in text
    again = invoke("sharpness", run, "--redraw").stdout
    assert again == text
    assert "λ1" in invoke("report", run, "--output", run.parent / "page.html").stdout
    assert "Loss rise" in (run.parent / "page.html").read_text()


def test_gradients_of_a_run(run, tmp_path):
    command = ["gradients", run, "--rho", 0.2, "--batch-size", 50, "--batches", 2, "--output", tmp_path]
    text = invoke(*command, "--device", "cpu").stdout
    result = json.loads((run / "analysis" / "gradients.json").read_text())
    model, x, y, _ = trained(run, 100)
    params = list(model.parameters())
    below = total = 0
    for part in (slice(0, 50), slice(50, 100)):
        g = torch.autograd.grad(F.cross_entropy(model(x[part]), y[part]), params)
        norm = torch.stack([b.square().sum() for b in g]).sum().sqrt()
        w = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p, b in zip(params, g, strict=True):
                p += 0.2 * b / norm
        h = torch.autograd.grad(F.cross_entropy(model(x[part]), y[part]), params)
        with torch.no_grad():
            for p, a in zip(params, w, strict=True):
                p.copy_(a)
        below += sum(int((((b - a).abs() < a.abs()) | (a == b)).sum()) for a, b in zip(g, h, strict=True))
        total += sum(a.numel() for a in g)
    assert result["below_zero"][""] == pytest.approx(below / total, abs=2e-3)  # a few are at the edge in float32
    assert sum(result["counts"][""]) == total
    assert f"{100 * result['below_zero']['']:.1f}" in text
    figures = {p.name for p in tmp_path.iterdir()}
    assert figures == {f"{n}.{s}" for n in ("gradients", f"gradients-{run.name}") for s in ("png", "svg")}
    assert invoke(*command[:2], "--redraw", "--output", tmp_path).stdout.split() == text.split()


@pytest.mark.parametrize("folder", [False, True], ids=["run", "folder"])
def test_masks_of_a_run(run, tmp_path, folder):
    invoke("masks", run.parent if folder else run, "--output", tmp_path)
    svg = (tmp_path / "masks.svg").read_text()
    assert (tmp_path / "masks.png").stat().st_size > 10_000
    for text in ("digits-ssam-f-seed0", "the epoch before", "the first epoch", "layer2.0", "head.2"):
        assert f"<!-- {text} -->" in svg
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 0 < metrics[1]["mask_kept"] < 1


def test_a_rise_that_is_infinite_is_shown_and_stops_no_report(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    invoke("sharpness", other, "--noise", 2, *FEW)
    values = read_result(other, "sharpness")
    write_result(other, "sharpness", values | {"worst_case": math.inf})
    assert read_result(other, "sharpness")["worst_case"] is None
    assert "not finite" in invoke("sharpness", other, "--redraw").stdout
    invoke("report", other, "--output", tmp_path / "page.html")
    assert "not finite" in (tmp_path / "page.html").read_text()


def test_nothing_is_measured_if_a_later_run_is_missing(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    shutil.rmtree(other / "analysis", ignore_errors=True)
    for command in ("hessian", "gradients", "sharpness", "landscape"):
        error = invoke(command, other, tmp_path / "none", "--device", "cpu", code=1).stderr
        assert f"{tmp_path / 'none'} is not a run directory" in error
    assert not (other / "analysis").exists()


@pytest.mark.slow
def test_results_of_different_settings_do_not_stand_side_by_side(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    for command, one, two in (
        ("sharpness", ["--noise", 2], ["--noise", 2, "--rho", 0.3]),
        ("gradients", ["--batches", 1], ["--batches", 2]),
        ("hessian", QUICK, [*QUICK, "--best"]),
    ):
        figures = [] if command == "sharpness" else ["--output", tmp_path]
        few = ["--device", "cpu", *([] if command == "gradients" else ["--samples", 50])]
        invoke(command, run, *one, *few, *figures)
        invoke(command, other, *two, *few, *figures)
        error = invoke(command, run, other, "--redraw", *figures, code=1).stderr
        assert "runs must have the same settings to be compared, but" in error
    both = [read_result(path, "sharpness") for path in (run, other)]
    for path, samples, asked in zip((run, other), (40, 50), (50, 50), strict=True):  # one has less data than asked for
        write_result(path, "sharpness", both[0] | {"samples": samples, "samples_asked": asked})
    assert "over 40 or 50 images" in invoke("sharpness", run, other, "--redraw").stdout
    for path, result in zip((run, other), both, strict=True):
        write_result(path, "sharpness", result)
    invoke("sharpness", other, "--samples", 60, "--noise", 2, "--device", "cpu")  # and seeds of two sizes do not mix
    summary = json.loads((other / "summary.json").read_text())
    summary["seed"] += 1  # a seed that is there twice counts once
    (other / "summary.json").write_text(json.dumps(summary))
    invoke("report", run, other, "--output", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "λ1 (50 images)" in page
    assert "λ1 (60 images)" in page


def test_results_from_before_a_run_was_continued(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    invoke("sharpness", other, "--samples", 50, "--noise", 2, "--device", "cpu")
    assert "was measured" not in invoke("sharpness", other, "--redraw").stderr
    assert "λ1" in invoke("report", other, "--output", tmp_path / "page.html").stdout
    lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    third = json.dumps(json.loads(lines[-1]) | {"epoch": 3}) + "\n"
    (other / "metrics.jsonl").write_text("".join([*lines, third]))
    told = " ".join(invoke("sharpness", other, "--redraw").stderr.split())
    assert "was measured after epoch 2, but has 3 epochs now: measure it again" in told
    assert "λ1" not in invoke("report", other, "--output", tmp_path / "page.html").stdout
    (other / "analysis" / "sharpness.json").write_text("{")
    error = " ".join(invoke("sharpness", other, "--redraw", code=1).stderr.split())
    assert "sharpness.json is not valid JSON: Expecting property name" in error


@pytest.mark.slow
def test_runs_of_one_name(run, tmp_path, monkeypatch):
    places = [tmp_path / name / "run [b]{x}" for name in ("one", "two")]
    for place in places:
        shutil.copytree(run, place)
        invoke("gradients", place, "--batches", 1, "--device", "cpu", "--output", tmp_path / "figures")
    shown = invoke("gradients", *places, "--redraw", "--output", tmp_path / "figures").stdout
    assert all(f"{name}/run [b]{{x}} " in shown for name in ("one", "two"))
    files = {f.stem for f in (tmp_path / "figures").iterdir()}
    assert files == {"gradients", *(f"gradients-{name}run [b]{{x}}" for name in ("", "one-", "two-"))}
    monkeypatch.chdir(places[0])
    assert names_of([Path()]) == ["run [b]{x}"]
    assert names_of([Path(), Path()]) == ["run [b]{x}"] * 2


def test_numbers_are_not_cut_off(capsys):
    values = {"loss": 1.0, "worst_case": 12.345e-6, "worst_case_masked": None, "worst_case_adaptive": -1.2345e-10}
    values |= {"average_case": -3.3445e-5, "average_case_error": 8.12e-5, "average_case_adaptive": 1.0, "lambda1": 2.0}
    settings = {"samples": 9, "weights": "best", "ascent": 1, "rho": 0.1, "noise": 2, "adaptive_rho": 1.0}
    show([Path("a-run-with-a-rather-long-name-of-its-own")], [values | settings])
    text = capsys.readouterr().out
    assert all(number in text for number in ("1.23e-05", "-1.23e-10", "-3.34e-05 ± 8.1e-05"))
    assert "around the best weights" in " ".join(text.split())


def test_the_data_may_have_moved(run, tmp_path):
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["data"].update(name="cifar10", root="data")
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (other / "recipe.json").write_text(json.dumps(recipe))
    error = invoke("gradients", other, "--data-root", tmp_path / "there", "--device", "cpu", code=1).stderr
    assert str(tmp_path / "there") in "".join(error.split("\n"))


def test_masks_of_runs_without_one(run, tmp_path):
    other = tmp_path / "plain"
    shutil.copytree(run, other)
    lines = [json.loads(line) | {"mask_density": None} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "Without a mask: plain" in invoke("masks", run, other, "--output", tmp_path).stdout
    assert "a run must have a mask to draw, but plain has none" in invoke("masks", other, code=1).stderr


@pytest.mark.parametrize(("shares", "words"), [([0, 0.5, 1], "comes and goes"), ([1, 1, 1], "does not change")])
def test_masks_of_whole_layers(shares, words, tmp_path):
    metrics = [
        {"epoch": i, "mask_density": {"stem": 0.0, "head": share}, "mask_kept": None} for i, share in enumerate(shares)
    ]
    _, drawn = draw_masks([RunMasks("ssam-c", "SSAM-C", metrics)], tmp_path / "masks")
    assert f"<!-- the mask {words} -->" in drawn.read_text()


def test_what_cannot_be_looked_at(run, tmp_path):
    for arguments, text in [
        (["sharpness", tmp_path], f"error: {tmp_path} has no runs in it, and is not one itself; give a run, "),
        (
            ["gradients", tmp_path / "none", "--redraw"],
            "error: there is no .*gradients.json; compute it with: sparsam gradients",
        ),
        (["sharpness", run, "--redraw", "--rho", 0.2, "--adaptive-rho", 2], "so leave out --rho, --adaptive-rho$"),
        (["gradients", run, "--redraw", "--best", "--device", "cpu"], "so leave out --best, --device$"),
        (["landscape", run, "--redraw", "--dimensions", 1, "--points", 3], "so leave out --points$"),
        (["sharpness", run, "--rho", "-1"], "error: rho must be a finite number >= 0, but is -1.0"),
        (["masks", tmp_path], f"error: {tmp_path} has no runs in it, and is not one itself; give a run, "),
        (["masks", tmp_path / "none"], f"error: {tmp_path}/none is not a run directory: it has no recipe.json"),
        (
            ["gradients", run, "--output", __file__],
            f"error: --output must be a folder for figures, but {__file__} is a",
        ),
    ]:
        assert re.search(text.replace("(", r"\("), invoke(*arguments, code=1).stderr)


@pytest.mark.slow
def test_compare_measures_what_is_missing(tmp_path):
    few = ["--set", "train.epochs=1", "--set", "data.validation=1100", "--set", "data.batch_size=100"]  # 100 are left
    command = ["compare", "digits-sgd", *few, "--output", tmp_path, "--sharpness", 0.1]
    text = invoke(*command, "--device", "cpu").stdout
    assert "λ1" in text
    assert "Loss rise: how much the training loss grows within ρ of the weights" in " ".join(text.split())
    file = tmp_path / "digits-sgd-seed0" / "analysis" / "sharpness.json"
    before = file.stat().st_mtime_ns
    invoke(*command, "--device", "cpu")
    assert file.stat().st_mtime_ns == before
    # Of other weights, so not what compare needs.
    invoke("sharpness", file.parent.parent, "--best", "--noise", 2, "--device", "cpu")
    invoke(*command, "--device", "cpu")
    assert json.loads(file.read_text())["weights"] == "last"
