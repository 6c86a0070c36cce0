"""`sparsam reproduce --from FOLDER --time-steps`: times of runs that were trained without."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from commands import ROOT, invoke

from sparsam.reproduce.table import FISHER_SECONDS
from sparsam.reproduce.times import AT_ONCE
from sparsam.runs.run import read_run
from sparsam.step_cost import StepRatio
from sparsam.training.environment import git_commit

OWN = """
[table1]
title = "Digits"
rows = [
  { recipe = "digits-sgd" },
  { recipe = "digits-ssam-f", set = ["mask.samples=16"], seconds = 1.49 },
  { recipe = "digits-sam" },
]
"""
NAMES = ("digits-sgd", "digits-ssam-f-samples16", "digits-sam")
TIMED = ("--time-steps", "--rounds", 2, "--device", "cpu")
CIFAR = "cifar10-resnet18-200"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of two seeds that took turns, so they have no times."""
    folder = tmp_path_factory.mktemp("times")
    (folder / "own.toml").write_text(OWN)
    options = ("--epochs", 2, "--seeds", 2, "--at-once", 2, "--rounds", 0, "--device", "cpu")
    invoke("reproduce", folder / "own.toml", *options, "-o", folder / "trained")
    for run in runs_of(folder / "trained"):
        change(run, "summary.json", lambda s: (s.pop("measured", None), s["extra"].pop(FISHER_SECONDS, None)))
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    shutil.copytree(trained / "trained", tmp_path / "runs", ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copy(trained / "own.toml", tmp_path)
    return tmp_path


@pytest.fixture
def timed(monkeypatch):
    """The recipes that are timed, turn by turn, each with a ratio that is the number of its turn and place."""
    found = []

    def time(recipes, *, device, rounds):
        found.append(list(recipes))
        return [StepRatio(len(found) + i / 10, 1.0, 9.0, rounds) for i in range(len(recipes))]

    monkeypatch.setattr("sparsam.training.turns.step_ratios", time)
    return found


def runs_of(folder):
    return sorted(file.parent for file in folder.rglob("recipe.json"))


def read(run, file="summary.json"):
    return json.loads((run / file).read_text())


def change(run, file, how):
    values = read(run, file)
    how(values)
    (run / file).write_text(json.dumps(values))


def show(folder, *options, code=0):
    return invoke("reproduce", folder / "own.toml", "--epochs", 2, "--from", folder / "runs", *options, code=code)


def test_runs_without_times_are_timed(folder):
    assert not any({"step_ratio", "measured"} & read(run).keys() for run in runs_of(folder))
    text = show(folder, *TIMED, "--set", "data.root=nowhere").stdout
    about = {"device": "cpu", "torch": torch.__version__, "git": git_commit()}
    for name in NAMES:
        one, other = (read(folder / "runs" / f"{name}-epochs2-seed{seed}") for seed in (0, 1))
        assert one["step_ratio"] == other["step_ratio"]
        assert one["measured"]["step_ratio"] == about
        line = next(line for line in text.splitlines() if f" {name} " in line)
        assert f" {one['step_ratio']['median']:.2f}× ± " in line
        if name == NAMES[0]:
            assert one["step_ratio"] == {"median": 1, "low": 1, "high": 1, "rounds": 2}
        if name == NAMES[1]:
            assert one["extra"][FISHER_SECONDS] == other["extra"][FISHER_SECONDS] > 0
            assert one["measured"][FISHER_SECONDS] == about
            assert f" {one['extra'][FISHER_SECONDS]:.3g} s" in line
        else:
            assert one["extra"] == {}
    assert read_run(folder / "runs" / f"{NAMES[0]}-epochs2-seed0").measured == {"step_ratio": about}

    before = {run: (run / "summary.json").stat().st_mtime_ns for run in runs_of(folder)}
    assert show(folder, *TIMED).stdout == text
    assert {run: (run / "summary.json").stat().st_mtime_ns for run in runs_of(folder)} == before

    invoke("reproduce", folder / "own.toml", "--from", folder / "runs", "--markdown", folder / "page.md")
    page = (folder / "page.md").read_text()
    words = " ".join(page[page.index("Made on:") :].split())
    git = read(runs_of(folder)[0], "environment.json")["git"]
    made = f"Made on: cpu; torch {torch.__version__}; precision fp32; commit {git}"
    assert words == f"{made}; times: torch {torch.__version__}, commit {about['git']}."


def test_times_of_an_older_version_have_an_unknown_commit(folder):
    ratio = {"median": 1.83, "low": 1.79, "high": 1.85, "rounds": 30}
    change(folder / "runs" / f"{NAMES[2]}-epochs2-seed0", "summary.json", lambda s: s.update(step_ratio=ratio))
    assert " 1.83× ± 0.03 " in show(folder).stdout
    invoke("reproduce", folder / "own.toml", "--from", folder / "runs", "--markdown", folder / "page.md")
    assert "times: torch unknown, commit unknown." in " ".join((folder / "page.md").read_text().split())


def test_only_what_lacks_a_time_is_timed(folder, timed):
    ratio = {"median": 1.83, "low": 1.79, "high": 1.85, "rounds": 30}
    for seed in (0, 1):
        change(folder / "runs" / f"{NAMES[2]}-epochs2-seed{seed}", "summary.json", lambda s: s.update(step_ratio=ratio))
    change(folder / "runs" / f"{NAMES[0]}-epochs2-seed1", "summary.json", lambda s: s.update(step_ratio=ratio))
    show(folder, *TIMED)
    assert [[recipe.name for recipe in turn] for turn in timed] == [[f"{name}-epochs2" for name in NAMES[:2]]]
    found = {name: [read(folder / "runs" / f"{name}-epochs2-seed{s}")["step_ratio"] for s in (0, 1)] for name in NAMES}
    assert found[NAMES[2]] == [ratio, ratio]
    assert [ratio["median"] for ratio in found[NAMES[0]]] == [1.0, 1.0]  # one of them had another


def test_runs_of_other_devices_are_named_and_left_out(folder, timed):
    for seed in (0, 1):
        run = folder / "runs" / f"{NAMES[2]}-epochs2-seed{seed}"
        change(run, "environment.json", lambda e: e.update(device="NVIDIA H200"))
    text = show(folder, *TIMED).stdout
    assert "No times were measured of runs that were trained on NVIDIA H200, another device than this." in text
    assert "step_ratio" not in read(run)
    assert [[recipe.name for recipe in turn] for turn in timed] == [[f"{name}-epochs2" for name in NAMES[:2]]]


def test_the_commit_is_that_before_the_first_summary_was_written(folder, timed, monkeypatch):
    """The runs may be files of the commit, which then has changes as soon as a time is written."""

    def git():
        return "123456789abc" + ("+" if any("step_ratio" in read(run) for run in runs_of(folder)) else "")

    monkeypatch.setattr("sparsam.training.environment.git_commit", git)
    monkeypatch.setattr("sparsam.reproduce.times.AT_ONCE", 1)
    show(folder, *TIMED)
    assert len(timed) == 3
    assert {read(run)["measured"]["step_ratio"]["git"] for run in runs_of(folder)} == {"123456789abc"}


def test_steps_are_timed_as_the_runs_took_them_with_the_data_where_it_is_now(tmp_path, timed):
    shutil.copytree(ROOT / "results" / CIFAR, tmp_path / "runs")
    shutil.copytree(tmp_path / "runs" / "sam-seed0", tmp_path / "runs" / "sam-seed1")
    for run in runs_of(tmp_path):
        change(run, "environment.json", lambda e: e.update(device="cpu"))
        change(run, "summary.json", lambda s: (s.pop("step_ratio", None), s.pop("measured", None)))
    other = tmp_path / "runs" / "sam-seed1"  # another seed, with another precision
    change(other, "recipe.json", lambda r: r["train"].update(seed=1, precision="fp32"))
    change(other, "summary.json", lambda s: s.update(seed=1))
    arguments = ("--from", tmp_path / "runs", *TIMED, "--set", "data.root=there", "-o", tmp_path)
    shown = invoke("reproduce", "table1", "--only", "cifar10-resnet18", *arguments, width=200).stdout
    recipes = [recipe for turn in timed for recipe in turn]
    assert len(recipes) == len(runs_of(tmp_path))
    assert max(map(len, timed)) == AT_ONCE
    assert {recipe.data.root for recipe in recipes} == {"there"}
    assert {recipe.train.precision for recipe in recipes} == {"bf16", "fp32"}
    assert all(recipe.train.compile for recipe in recipes)
    assert len([recipe for recipe in recipes if recipe.name == "cifar10-resnet18-sam"]) == 2
    line = next(line for line in shown.splitlines() if line.split()[:1] == ["cifar10-resnet18-sam"])
    assert f"{read(tmp_path / 'runs' / 'sam-seed0')['step_ratio']['median']:.2f}×" in line
    assert read(tmp_path / "runs" / "sam-seed0", "recipe.json")["data"]["root"] == "data"  # recipes stay as they are


def test_a_folder_without_such_runs_is_left_alone(folder, timed):
    text = invoke("reproduce", "table1", "--from", folder / "runs", *TIMED).stdout
    assert "There is no run of table1 in" in text
    assert timed == []


def test_the_root_of_the_data_hides_no_hint(folder):
    arguments = ("reproduce", folder / "own.toml", "--from", folder / "runs")
    hint = "There are runs of 2 epochs: use --epochs 2."
    assert hint in " ".join(invoke(*arguments, "--set", "data.root=nowhere").stdout.split())
    assert hint in " ".join(invoke(*arguments, "--set", "sam.rho=0.3", code=1).stderr.split())  # SGD's, without rho


def test_data_that_is_not_there_is_named_and_nothing_is_written(tmp_path):
    shutil.copytree(ROOT / "results" / CIFAR / "sam-seed0", tmp_path / "runs" / "sam-seed0")
    run = tmp_path / "runs" / "sam-seed0"
    change(run, "environment.json", lambda e: e.update(device="cpu"))
    change(run, "summary.json", lambda s: s.pop("step_ratio", None))
    before = (run / "summary.json").read_text()
    arguments = ("--only", "cifar10-resnet18-sam", "--from", tmp_path, *TIMED, "--set", f"data.root={tmp_path}/none")
    error = invoke("reproduce", "table1", *arguments, code=1).stderr
    assert f"cifar10 is not at {tmp_path}/none/cifar-10-batches-py" in "".join(error.split("\n"))
    assert (run / "summary.json").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--time-steps goes with --from: runs that are trained now are timed afterwards anyway"),
        (("--from", "results", "--rounds", 0), "--rounds must be at least 1 for --time-steps, but is 0"),
        (("--from", "nowhere"), "--from must be a folder with runs, but nowhere is none"),
        (("--from", "results", "--list"), "--time-steps does not go with --list: time the steps first"),
        (("--from", "results", "--dry-run"), "--time-steps does not go with --dry-run: time the steps first"),
        (("--from", "results", "--markdown", "x.md"), "--time-steps does not go with --markdown: time the steps first"),
        (
            ("--from", "results", "--set", "data.root=x", "--set", "train.precision=fp32"),
            "steps are timed as the runs took them, so --set must choose runs or be one of data.root, data.workers, "
            "but is train.precision",
        ),
    ],
)
def test_what_is_refused(arguments, message):
    error = invoke("reproduce", "table1", "--time-steps", "--device", "cpu", *arguments, code=1, width=300).stderr
    assert message in error.replace("\n", " ")
