"""The commands, as a user types them, on real data."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import version
from statistics import fmean, stdev

import pytest
import torch
from browser import Page
from commands import ROOT, invoke, sparsam
from image_folders import REAL, real_images

from sparsam.runs.library import packaged_recipes
from sparsam.training import Trainer

QUICK = ["--set", "train.epochs=2", "--set", "train.deterministic=true", "--device", "cpu"]
RECIPES = [f"digits-{method}" for method in ("sgd", "sam", "ssam-f", "ssam-d", "thrifty")]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """SGD, SAM, SSAM-F, SSAM-D and thrifty SAM on the digits, two seeds each."""
    output = tmp_path_factory.mktemp("compare")
    done = sparsam("compare", *RECIPES, "--seeds", 2, "--rounds", 3, "--output", output, *QUICK)
    return output, done.stdout


def summaries(output, name):
    return [json.loads((output / f"{name}-seed{seed}" / "summary.json").read_text()) for seed in (0, 1)]


def test_compare_prints_the_runs_numbers(compared):
    output, text = compared
    for name, method, flops in [
        ("digits-sgd", "SGD", ["1.00×"]),
        ("digits-sam", "SAM", ["2.00×"]),
        ("digits-ssam-f", "SSAM-F", ["1.65×"]),
        ("digits-ssam-d", "SSAM-D", ["1.65×"]),
        ("digits-thrifty", "Thrifty", []),  # the formula does not know cuts
    ]:
        accuracies = [100 * s["test_accuracy"] for s in summaries(output, name)]
        line = next(line for line in text.splitlines() if line.split()[:1] == [method])
        assert f"{fmean(accuracies):.2f} ± {stdev(accuracies):.2f}" in line
        assert re.findall(r"\d\.\d\d×(?! ±)", line) == flops  # those with ± are times
        ratios = [s["step_ratio"] for s in summaries(output, name)]
        assert ratios[0] == ratios[1]  # timed once for all seeds
        spread = (ratios[0]["high"] - ratios[0]["low"]) / 2
        assert f"{ratios[0]['median']:.2f}× ± {spread:.2f}" in line
    assert summaries(output, "digits-sgd")[0]["step_ratio"] == {"median": 1, "low": 1, "high": 1, "rounds": 3}
    assert str(output / "report.html") in text.replace("\n", "")
    words = " ".join(text.split())
    assert (
        "±: the standard deviation over seeds. Training loss: the mean over the steps of the last epoch. Step time"
        in words
    )
    assert "Step time: relative to the base optimizer, ± half of the range between the quartiles." in words
    assert "Loss rise" not in words


def test_compare_again_repeats_nothing(compared):
    output, _ = compared
    files = [*output.rglob("*.jsonl"), *output.rglob("summary.json")]
    before = {p: p.stat().st_mtime_ns for p in files}
    invoke("compare", *RECIPES, "--seeds", 2, "--rounds", 3, "--output", output, *QUICK)
    assert {p: p.stat().st_mtime_ns for p in files} == before


def test_compare_refuses_another_recipe_in_the_same_place(compared):
    output, _ = compared
    recipes = ["digits-sam", "digits-sgd"]
    done = invoke("compare", *recipes, "--seeds", 3, "--output", output, "--device", "cpu", code=1)
    assert re.search(
        "error: .*digits-.*-seed0 holds a run of another recipe, which differs in train.epochs, train.deterministic; choose",
        done.stderr,
    )
    assert not (output / "digits-sam-seed2").exists()  # refused before anything was trained


def test_compare_continues_a_stopped_run(compared, tmp_path):
    output, _ = compared
    shutil.copytree(output / "digits-ssam-d-seed0", tmp_path / "digits-ssam-d-seed0")
    (tmp_path / "digits-ssam-d-seed0" / "summary.json").unlink()
    invoke("compare", "digits-ssam-d", "--rounds", 0, "--output", tmp_path, *QUICK)
    whole, again = (
        json.loads((place / "digits-ssam-d-seed0" / "summary.json").read_text()) for place in (output, tmp_path)
    )
    assert whole.pop("step_ratio")
    assert whole.pop("measured").keys() == {"step_ratio"}
    assert whole == again


@pytest.mark.parametrize("command", ["compare", "reproduce"])
def test_a_stopped_command_says_how_all_of_its_runs_go_on(tmp_path, monkeypatch, command):
    table, step = tmp_path / "own.toml", Trainer._step
    table.write_text("[own]\nrows = [{ recipe = 'digits-sgd' }, { recipe = 'digits-sam' }]\n")

    def stops(self, x, y):
        signal.raise_signal(signal.SIGTERM)
        return step(self, x, y)

    monkeypatch.setattr(Trainer, "_step", stops)
    what = [table] if command == "reproduce" else ["digits-sgd", "digits-sam"]
    done = invoke(command, *what, "-o", tmp_path / "runs", "--rounds", 0, "--device", "cpu", code=1)
    assert done.stderr == "stopped, and saved; the same command goes on from here\n"
    assert len(list(tmp_path.rglob("last.pt"))) == 1


def test_compare_gives_settings_to_the_recipes_that_they_have_a_meaning_for(tmp_path):
    few = ["--max-steps", 1, "--rounds", 0, "--device", "cpu"]
    settings = ["--set", "mask.sparsity=0.9", "--set", "sam.rho=0.3"]
    invoke("compare", *RECIPES[:3], "--output", tmp_path, *few, *settings)
    runs = {name: tmp_path / f"{name}-seed0" for name in RECIPES[:3]}
    shares = [json.loads((run / "summary.json").read_text())["perturbed"] for run in runs.values()]
    assert shares == [None, 1.0, pytest.approx(0.1, abs=1e-4)]
    rhos = [json.loads((run / "recipe.json").read_text())["sam"]["rho"] for run in runs.values()]
    assert rhos == [0.1, 0.3, 0.3]


@pytest.mark.parametrize(
    ("how", "of_second"),
    [([], [1, 2]), (["--at-once", 2], [1, 2]), (["--share-start"], [2])],  # the first run has taken epoch 1 for both
    ids=["alone", "at once", "shared"],
)
@pytest.mark.parametrize("command", ["compare", "reproduce"])
def test_each_epoch_of_several_runs_has_a_line_in_a_log_and_each_run_another(tmp_path, command, how, of_second):
    table = tmp_path / "own.toml"
    late = tmp_path / "late.toml"
    late.write_text('extends = "digits-thrifty"\nschedule.fraction = 0.2\n')
    table.write_text(f"[own]\nrows = [{{ recipe = 'digits-sgd' }}, {{ recipe = '{late}' }}]\n")
    what, tag = ([table], "-limit256-epochs2") if command == "reproduce" else (["digits-sgd", late], "")
    few = ["--set", "data.limit=256", "--set", "train.epochs=2", "--rounds", 0, "--device", "cpu"]
    done = invoke(command, *what, *few, *how, "-o", tmp_path / "runs")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    for place, name, epochs in (("1 of 2", "digits-sgd", [1, 2]), ("2 of 2", "late", of_second)):
        *own, end = (line for line in lines if line["place"] == place)
        assert {(line["run"], line["seed"]) for line in (*own, end)} == {(name + tag, 0)}
        assert [line["epoch"] for line in own] == epochs
        assert (end["epochs"], end["test_accuracy"]) == (2, own[-1]["test_accuracy"])


def test_the_log_of_one_run_has_a_line_for_each_epoch_and_no_other(tmp_path):
    done = invoke("train", "digits-sgd", "-o", tmp_path / "run", "--set", "data.limit=256", *QUICK)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["run"], line["epoch"]) for line in lines] == [("digits-sgd", 1), ("digits-sgd", 2)]


def test_compare_measures_sharpness_over_so_many_images(tmp_path):
    few = ["--max-steps", 1, "--rounds", 0, "--sharpness", 0.2, "--samples", 20, "--device", "cpu"]
    invoke("compare", "digits-sgd", "--output", tmp_path, *few)
    measured = json.loads((tmp_path / "digits-sgd-seed0" / "analysis" / "sharpness.json").read_text())
    assert (measured["rho"], measured["samples"]) == (0.2, 20)


def test_the_page_of_a_real_comparison(compared, chromium, tmp_path):
    output, _ = compared
    page = Page(chromium, output / "report.html").open()
    page.problems()
    page.open()
    cells = page.text("#summary tbody tr, table tbody tr")
    for name in ("digits-sgd", "digits-ssam-f"):
        accuracies = [100 * s["test_accuracy"] for s in summaries(output, name)]
        assert any(f"{fmean(accuracies):.2f} ± {stdev(accuracies):.2f}" in row for row in cells)
    assert page.text("#masks h3") == ["SSAM-F", "SSAM-D", "Thrifty SAM"]
    page.all("#legend button")[0].click()
    page.screenshot(tmp_path / "page.png")
    assert page.problems() == []


def test_report_of_some_runs(compared, tmp_path):
    output, _ = compared
    done = invoke("report", output / "digits-sgd-seed0", output / "digits-sam-seed0", "-o", tmp_path / "page.html")
    assert "SGD" in done.stdout
    assert "SSAM" not in done.stdout
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_the_page_is_named_as_it_was_given(compared, tmp_path):
    page = tmp_path / "x[y]" / ":key:.html"
    done = invoke("report", compared[0] / "digits-sgd-seed0", "-o", page)
    assert done.stdout.endswith(f"\nThe page: {page}\n")
    assert page.is_file()


def test_a_folder_stands_for_the_runs_in_it(compared, tmp_path):
    output, _ = compared
    page = tmp_path / "page.html"
    done = invoke("report", output, "-o", page)
    named = invoke("report", *(path for path in output.iterdir() if path.is_dir()), "-o", page)
    assert done.stdout == named.stdout
    assert all(f" {method} " in done.stdout for method in ("SGD", "SAM", "SSAM-F"))


def test_a_narrow_terminal_gets_whole_words(compared):
    output, _ = compared
    text = invoke(
        "report", output / "digits-sgd-seed0", output / "digits-sam-seed0", "-o", output / "p.html", width=80
    ).stdout
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_narrow_terminal_is_told_of_the_columns_that_it_lacks(compared, tmp_path):
    text = " ".join(invoke("report", compared[0], "-o", tmp_path / "page.html", width=60).stdout.split())
    (left_out,) = re.findall(r"Left out for width: (.*?); a wider terminal or the page shows them\.", text)
    assert {"ρ", "Weight decay", "Training time"} <= set(left_out.split(", "))
    page = (tmp_path / "page.html").read_text()
    assert all(f'<th scope="col">{heading}</th>' in page for heading in ("ρ", "Weight decay", "Training time"))


def test_evaluate_measures_what_training_measured(compared):
    output, _ = compared
    run = output / "digits-sam-seed0"
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    text = invoke("evaluate", run, "--device", "cpu").stdout
    assert f"last weights (epoch 2) on 597 test images: loss {last['test_loss']:.4f}" in text
    assert f"accuracy {100 * last['test_accuracy']:.2f} %" in text
    best = json.loads((run / "summary.json").read_text())
    text = invoke("evaluate", run, "--best", "--device", "cpu").stdout
    assert f"best weights (epoch {best['best_epoch']})" in text
    assert f"accuracy {100 * best['best_accuracy']:.2f} %" in text


REFUSED = [
    (["train"], "error: train needs either a recipe or --resume DIR"),
    (["train", "digit-sam"], "error: there is no recipe named 'digit-sam'; did you mean digits-sam"),
    (["train", "recipes/digits-sam.toml"], "error: there is no recipe at recipes/digits-sam.toml; did you mean digits-sam?"),
    (["train", "none.toml"], "error: there is no recipe at none.toml"),
    (["train", "digits-sam", "--set", "sam.rho=-1"], "error: sam.rho must be a number >= 0, but is -1.0"),
    (["train", "digits-sgd", "--set", "sam.rho=0.2"], "error: sam.rho has no meaning where sam.enabled is false; set sam.enabled=true too"),
    (["train", "digits-sam", "--set", "epochs=3"], "error: unknown key epochs; did you mean train.epochs?"),
    (["train", "digits-sam", "--epochs", "3"], "error: --epochs is an option of reproduce; here it is a setting: --set train.epochs=3"),
    (["compare", "digits-sam", "--epochs=x"], "error: --epochs is an option of reproduce; here it is a setting: --set train.epochs=x"),
    (["train", "digits-sam", "--device", "quantum"], "error: --device must be a device of this machine (cpu"),
    (["train", "cifar10-resnet18-sam", "--set", "data.root=nowhere", "-o", "{tmp}/x"], "error: cifar10 is not at"),
    (["train", "cifar10-resnet18-sam", "--set", "data.root=nowhere", "-o", "{tmp}/x"], ": --set data.root=DIR"),
    (["train", "imagenet-resnet50-sgd", "--set", "data.root=nowhere", "-o", "{tmp}/y"], "error: there is no folder nowhere"),
    (["train", "digits-sam", "--resume", "{tmp}"], "error: train takes a recipe or --resume DIR, not both"),
    (["train", "--resume", "{tmp}", "--model", "resnet18"], "--set, --model, --max-steps and --output do not go with it"),
    (["train", "digits-sam", "--model", "resnet19", "-o", "{tmp}/z"], "error: model must be one of resnet18,"),
    (["train", "--resume", "{tmp}"], "is not a run directory: it has no recipe.json"),
    (["evaluate", "{tmp}"], "is not a run directory: it has no recipe.json"),
    (["report", "{tmp}"], "{tmp} has no runs in it, and is not one itself; give a run, which is a folder with a recipe.json, or"),
    (["report", "{tmp}/none"], "error: {tmp}/none is not a directory"),
    (["recipes", "digit-sam"], "error: no recipe has 'digit-sam' in its name or description"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(r[0])[:50] for r in REFUSED])
def test_errors_have_no_traceback(tmp_path, arguments, message):
    done = invoke(*(a.format(tmp=tmp_path) for a in arguments), code=1)
    assert message.replace("{tmp}", str(tmp_path)) in done.stderr


def test_an_error_has_no_traceback_in_a_process_of_its_own():
    done = sparsam("train", "digits-sam", "--set", "sam.rho=-1", code=1)
    assert done.stderr == "error: sam.rho must be a number >= 0, but is -1.0\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_not_suggested():
    done = invoke("train", "digits-sam", "--device", "cuda", code=1)
    assert done.stderr.startswith("error: --device must be a device of this machine (cpu), but is 'cuda': ")


def test_the_end_of_a_run_is_said_in_words(tmp_path):
    few = ["--set", "data.limit=256", "--device", "cpu"]
    text = invoke("train", "digits-sgd", "-o", tmp_path / "one", "--max-steps", 1, *few).stdout
    assert re.fullmatch(
        r"SGD: \d+\.\d\d % of the test images are classified correctly after 1 step; everything is in .*/one\n", text
    )
    text = invoke("train", "digits-sgd", "-o", tmp_path / "whole", "--set", "train.epochs=1", *few).stdout
    assert "classified correctly after 1 epoch; everything" in text
    text = invoke("train", "digits-sgd", "-o", tmp_path / "two", "--set", "train.epochs=2", *few).stdout
    assert re.search(r"correctly after the last of 2 epochs \(best: \d+\.\d\d %, epoch \d\); everything", text)
    again = invoke("train", "--resume", tmp_path / "one", "--device", "cpu").stdout
    assert again.startswith(
        f"{tmp_path / 'one'} is finished already: it ended after 1 step, its train.max_steps\nSGD: "
    )
    again = invoke("train", "--resume", tmp_path / "two", "--device", "cpu").stdout
    assert again.startswith(f"{tmp_path / 'two'} is finished already\nSGD: ")


@pytest.mark.slow
def test_a_warning_is_a_plain_line_and_a_bad_cut_names_the_command_that_lists_cuts(tmp_path):
    settings = ["--set", "mask.cut=layer2.0.conv2", "--set", "schedule=every-step", "--max-steps", 2]
    done = sparsam("train", "digits-ssam-c", *settings, "-o", tmp_path / "run", "--device", "cpu")
    assert done.stderr.startswith(
        "warning: the second pass is computed in full, exact but slower: what is computed before 'layer2.0.conv2' is "
        "used after it, and not through its input; find_cuts(model, closure) lists where the model can be cut; "
        "`sparsam cuts RECIPE` lists the cuts that save time\n"
    )


def test_an_error_that_is_no_users_has_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr("sparsam.cli.train.train_run", lambda *_, **__: int("bug"))
    with pytest.raises(ValueError, match="invalid literal"):
        invoke("train", "digits-sam", "-o", tmp_path / "x", "--device", "cpu")


def test_nothing_is_left_of_a_run_that_could_not_start(tmp_path):
    invoke("train", "cifar10-resnet18-sam", "--set", "data.root=nowhere", "-o", tmp_path / "x", code=1)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", ["", "train", "evaluate", "compare", "report", "recipes", "cuts", "doctor"])
def test_help_has_examples(command):
    text = invoke(*filter(None, [command]), "--help").stdout
    assert "sparsam" in text
    if command not in ("", "doctor"):
        assert "Example" in text


def test_doctor():
    text = invoke("doctor").stdout
    assert re.search(r"torch +2\.", text)
    assert "gives the right numbers" in text
    for name in ("matplotlib", "lightning", "transformers"):  # of extras
        assert re.search(
            rf"^{name} +({re.escape(version(name))}|not installed, .*: pip install 'sparsam\[\w+\]')$", text, re.M
        )


def test_recipes_are_listed_with_their_first_line():
    text = " ".join(invoke("recipes").stdout.split())
    for name, line in packaged_recipes().items():
        assert name in text
        assert line.split(":")[0] in text


def test_recipes_are_filtered_and_grouped():
    names = [
        line.split()[0] if line.strip() else "" for line in invoke("recipes", "SSAM-c", width=200).stdout.splitlines()
    ]
    assert names[3:-1] == ["cifar100-resnet18-ssam-c", "", "digits-ssam-c"]
    assert "along the momentum" in invoke("recipes", "ssam-c", width=200).stdout


def test_every_recipe_is_packaged():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["sparsam"]
    package = ROOT / "src" / "sparsam"
    packaged = {path for pattern in patterns for path in package.glob(pattern)}
    assert set((package / "recipes").iterdir()) <= packaged


@pytest.mark.slow
def test_an_installed_wheel_trains_by_name_in_an_empty_folder(tmp_path):
    source, target, empty = (tmp_path / name for name in ("source", "target", "empty"))
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", target]
    subprocess.run([*pip, source], check=True)
    empty.mkdir()
    train = [sys.executable, "-m", "sparsam", "train", "digits-sam", "--max-steps", "1", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}
    subprocess.run(train, check=True, cwd=empty, env=environment)
    assert (empty / "runs" / "digits-sam-seed0" / "summary.json").is_file()


@pytest.mark.slow
def test_without_its_packages_the_command_says_what_to_install(tmp_path):
    (tmp_path / "typer.py").write_text("raise ImportError('no typer', name='typer')")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from sparsam.cli import main; main()"
    for arguments, status, message in [
        (["train"], 1, "the sparsam command needs the package typer: pip install 'sparsam[train]'"),
        (["doctor"], 0, "gives the right numbers"),
        (["doctor"], 0, "typer         not installed, needed only for the command line: pip install 'sparsam[train]'"),
    ]:
        done = subprocess.run([sys.executable, "-c", code, tmp_path, *arguments], capture_output=True, text=True)
        assert done.returncode == status
        assert message in done.stdout + done.stderr


@pytest.mark.slow
def test_the_command_starts_without_large_packages():
    large = ("matplotlib", "scipy", "sklearn", "ray", "lightning", "transformers")
    code = f"import sys, sparsam.cli.app; print([name for name in {large} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@real_images
def test_image_folders_train_and_a_corrupt_image_is_named(tmp_path):
    settings = ["model.stem=cifar", "model.name=resnet-small", "data.image_size=32", "data.resize=36", "data.workers=2",
                "train.epochs=2", "data.batch_size=100", "sam.rho=0.05"]  # fmt: skip
    root = tmp_path / "images"
    subprocess.run(["cp", "-rL", REAL, root], check=True)
    subprocess.run(["chmod", "-R", "u+w", root], check=True)
    arguments = [a for s in (*settings, f"data.root={root}") for a in ("--set", s)]
    recipe = "imagenet-resnet50-sam"
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


def test_other_commands_are_refused_under_torchrun(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = invoke("recipes", code=1)
    assert done.stderr == "error: only `sparsam train` runs on several processes; start this one without torchrun\n"
