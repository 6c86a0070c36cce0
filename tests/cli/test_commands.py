"""The commands, as a user types them, on real data."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

import pytest
from browser import Page
from commands import sparsam

QUICK = ["--set", "train.epochs=3", "--set", "train.deterministic=true", "--device", "cpu"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """SGD, SAM, SSAM-F, SSAM-D and SSAM-C on the digits, two seeds each."""
    output = tmp_path_factory.mktemp("compare")
    recipes = [f"recipes/digits-{method}.toml" for method in ("sgd", "sam", "ssam-f", "ssam-d")]
    done = sparsam("compare", *recipes, "--seeds", 2, "--output", output, *QUICK)
    return output, done.stdout, recipes


def summaries(output, name):
    return [json.loads((output / f"{name}-seed{seed}" / "summary.json").read_text()) for seed in (0, 1)]


def test_compare_prints_the_runs_numbers(compared):
    output, text, _ = compared
    for name, method, flops in [
        ("digits-sgd", "SGD", "1.00×"),
        ("digits-sam", "SAM", "2.00×"),
        ("digits-ssam-f", "SSAM-F", "1.65×"),
        ("digits-ssam-d", "SSAM-D", "1.65×"),
    ]:
        accuracies = [100 * s["test_accuracy"] for s in summaries(output, name)]
        line = next(line for line in text.splitlines() if line.split()[:1] == [method])
        assert f"{fmean(accuracies):.2f} ± {stdev(accuracies):.2f}" in line
        assert flops in line
    sgd, sam = (fmean(s["step_ms"] for s in summaries(output, f"digits-{m}")) for m in ("sgd", "sam"))
    line = next(line for line in text.splitlines() if line.split()[:1] == ["SAM"])
    assert f"{sam / sgd:.2f}×" in line
    assert str(output / "report.html") in text.replace("\n", "")


def test_compare_again_repeats_nothing(compared):
    output, _, recipes = compared
    before = {p: p.stat().st_mtime_ns for p in output.rglob("*.jsonl")}
    sparsam("compare", *recipes, "--seeds", 2, "--output", output, *QUICK)
    assert {p: p.stat().st_mtime_ns for p in output.rglob("*.jsonl")} == before


def test_compare_refuses_another_recipe_in_the_same_place(compared):
    output, _, recipes = compared
    new = "recipes/digits-sam.toml"
    done = sparsam("compare", new, recipes[0], "--seeds", 3, "--output", output, "--device", "cpu", code=1)
    assert re.search(
        "error: .*digits-.*-seed0 holds a run of another recipe, which differs in train.epochs, train.deterministic; choose",
        done.stderr,
    )
    assert not (output / "digits-sam-seed2").exists()  # refused before anything was trained


def test_compare_continues_a_stopped_run_and_sets_the_mask_only_where_there_is_one(compared, tmp_path):
    output, _, recipes = compared
    shutil.copytree(output / "digits-ssam-d-seed0", tmp_path / "digits-ssam-d-seed0")
    (tmp_path / "digits-ssam-d-seed0" / "summary.json").unlink()
    sparsam("compare", *recipes[2:], "--output", tmp_path, *QUICK)
    whole, again = (
        json.loads((place / "digits-ssam-d-seed0" / "summary.json").read_text()) for place in (output, tmp_path)
    )
    assert whole == again
    sparsam(
        "compare",
        *recipes[1:3],
        "--output",
        tmp_path / "s",
        *QUICK,
        "--set",
        "train.epochs=1",
        "--set",
        "mask.sparsity=0.9",
    )
    shares = [
        json.loads((tmp_path / "s" / f"{n}-seed0" / "summary.json").read_text())["perturbed"]
        for n in ("digits-sam", "digits-ssam-f")
    ]
    assert shares == pytest.approx([1.0, 0.1], abs=1e-4)


def test_the_page_of_a_real_comparison(compared, chromium, tmp_path):
    output, _, _ = compared
    page = Page(chromium, output / "report.html").open()
    page.problems()
    page.open()
    cells = page.text("#summary tbody tr, table tbody tr")
    for name in ("digits-sgd", "digits-ssam-f"):
        accuracies = [100 * s["test_accuracy"] for s in summaries(output, name)]
        assert any(f"{fmean(accuracies):.2f} ± {stdev(accuracies):.2f}" in row for row in cells)
    assert page.text("#masks h3") == ["SSAM-F", "SSAM-D"]
    page.all("#legend button")[0].click()
    page.screenshot(tmp_path / "page.png")
    assert page.problems() == []


def test_report_of_some_runs(compared, tmp_path):
    output, _, _ = compared
    done = sparsam("report", output / "digits-sgd-seed0", output / "digits-sam-seed0", "-o", tmp_path / "page.html")
    assert "SGD" in done.stdout
    assert "SSAM" not in done.stdout
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_a_narrow_terminal_gets_whole_words(compared):
    output, _, _ = compared
    text = sparsam(
        "report", output / "digits-sgd-seed0", output / "digits-sam-seed0", "-o", output / "p.html", width=80
    ).stdout
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_evaluate_measures_what_training_measured(compared):
    output, _, _ = compared
    run = output / "digits-sam-seed0"
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    text = sparsam("evaluate", run, "--device", "cpu").stdout
    assert f"last weights (epoch 3) on 597 test images: loss {last['test_loss']:.4f}" in text
    assert f"accuracy {100 * last['test_accuracy']:.2f} %" in text
    best = json.loads((run / "summary.json").read_text())
    text = sparsam("evaluate", run, "--best", "--device", "cpu").stdout
    assert f"best weights (epoch {best['best_epoch']})" in text
    assert f"accuracy {100 * best['best_accuracy']:.2f} %" in text


REFUSED = [
    (["train"], "error: train needs either a recipe or --resume DIR"),
    (["train", "recipes/none.toml"], "error: there is no recipe at recipes/none.toml"),
    (["train", "recipes/digits-sam.toml", "--set", "sam.rho=-1"], "error: sam.rho must be a number >= 0, but is -1.0"),
    (["train", "recipes/digits-sam.toml", "--device", "quantum"], "error: --device must be a device of this machine"),
    (["train", "recipes/cifar10-resnet18-sam.toml", "--set", "data.root=nowhere", "-o", "{tmp}/x"], "error: cifar10 is not at"),
    (["train", "recipes/imagenet-resnet50-sgd.toml", "--set", "data.root=nowhere", "-o", "{tmp}/y"], "error: there is no folder nowhere"),
    (["train", "--resume", "{tmp}", "--model", "resnet18"], "--set, --model and --output do not go with it"),
    (["train", "recipes/digits-sam.toml", "--model", "resnet19", "-o", "{tmp}/z"], "error: model must be one of resnet18,"),
    (["train", "--resume", "{tmp}"], "is not a run directory: it has no recipe.json"),
    (["evaluate", "{tmp}"], "is not a run directory: it has no recipe.json"),
    (["report", "{tmp}"], "is not a run directory: it has no recipe.json"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(r[0])[:50] for r in REFUSED])
def test_errors_have_no_traceback(tmp_path, arguments, message):
    done = sparsam(*(a.format(tmp=tmp_path) for a in arguments), code=1)
    assert message in done.stderr


def test_nothing_is_left_of_a_run_that_could_not_start(tmp_path):
    sparsam("train", "recipes/cifar10-resnet18-sam.toml", "--set", "data.root=nowhere", "-o", tmp_path / "x", code=1)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", ["", "train", "evaluate", "compare", "report", "doctor"])
def test_help_has_examples(command):
    text = sparsam(*filter(None, [command]), "--help").stdout
    assert "sparsam" in text
    if command not in ("", "doctor"):
        assert "Example" in text


def test_doctor():
    text = sparsam("doctor").stdout
    assert re.search(r"torch +2\.", text)
    assert "gives the right numbers" in text


def test_without_its_packages_the_command_says_what_to_install(tmp_path):
    (tmp_path / "typer.py").write_text("raise ImportError('no typer', name='typer')")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from sparsam.cli import main; main()"
    for arguments, status, message in [
        (["train"], 1, "the sparsam command needs the package typer: pip install 'sparsam[train]'"),
        (["doctor"], 0, "gives the right numbers"),
    ]:
        done = subprocess.run([sys.executable, "-c", code, tmp_path, *arguments], capture_output=True, text=True)
        assert done.returncode == status
        assert message in done.stdout + done.stderr


FOLDER = Path(os.environ.get("SPARSAM_DATA", "none")) / "imagefolder-mini"


@pytest.mark.skipif(not FOLDER.is_dir(), reason="needs real JPEGs: SPARSAM_DATA names no folder with imagefolder-mini")
def test_image_folders_train_and_a_corrupt_image_is_named(tmp_path):
    settings = ["model.stem=cifar", "model.name=resnet-small", "data.image_size=32", "data.resize=36", "data.workers=2",
                "train.epochs=2", "data.batch_size=100", "sam.rho=0.05"]  # fmt: skip
    root = tmp_path / "images"
    subprocess.run(["cp", "-rL", FOLDER, root], check=True)
    subprocess.run(["chmod", "-R", "u+w", root], check=True)
    arguments = [a for s in (*settings, f"data.root={root}") for a in ("--set", s)]
    recipe = "recipes/imagenet-resnet50-sam.toml"
    sparsam("train", recipe, *arguments, "-o", tmp_path / "run", "--device", "cpu")
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["steps"] == 12
    assert metrics[1]["test_accuracy"] > 0.05  # chance among 20 classes

    bad = sorted((root / "train").rglob("*.JPEG"))[7]
    bad.write_bytes(bad.read_bytes()[:200])
    done = sparsam("train", recipe, *arguments, "-o", tmp_path / "bad", "--device", "cpu", code=1)
    assert str(bad) in done.stderr.replace("\n", "")
    assert "data.skip_corrupt" in done.stderr
    done = sparsam(
        "train", recipe, *arguments, "--set", "data.skip_corrupt=true", "-o", tmp_path / "skip", "--device", "cpu"
    )
    assert bad.name in done.stderr
