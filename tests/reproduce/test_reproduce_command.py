"""`sparsam reproduce`, as a user types it, on tables of short runs on the digits."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, stdev

import pytest
from commands import ROOT, invoke

from sparsam.reproduce.experiments import find_experiments

OWN = """
[table1]
title = "Digits"
rows = [
  { recipe = "digits-sgd", paper = 90.00, flops = 1.00 },
  { recipe = "digits-ssam-f", set = ["mask.samples=16"], paper = 95.50, flops = 1.65, seconds = 1.49 },
  { recipe = "digits-sam" },
]

[figure1]
shows = "gradients"
rows = [{ recipe = "digits-sam" }]
"""
QUICK = ("--set", "train.deterministic=true", "--device", "cpu", "--rounds", 2)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("tables") / "own.toml"
    file.write_text(OWN)
    return file


@pytest.fixture(scope="module")
def reproduced(own):
    output = own.parent / "runs"
    done = invoke("reproduce", own, "--epochs", 2, "--seeds", 2, "--samples", 128, "-o", output, *QUICK)
    return output, done.stdout


def accuracy(output, name):
    return [100 * summary(output, name, seed)["test_accuracy"] for seed in (0, 1)]


def summary(output, name, seed=0):
    return json.loads((output / f"{name}-seed{seed}" / "summary.json").read_text())


def test_the_table_has_the_paper_ours_and_the_difference(reproduced):
    output, text = reproduced
    assert "table1: Digits (scaled down: train.epochs=2)" in text
    rows = list(csv.DictReader((output / "table1.csv").read_text().splitlines()))
    assert [row["Method"] for row in rows] == ["SGD", "SSAM-F", "SAM"]
    for row, name in zip(
        rows, ("digits-sgd-epochs2", "digits-ssam-f-samples16-epochs2", "digits-sam-epochs2"), strict=True
    ):
        found = accuracy(output, name)
        assert row["Ours, %"] == f"{fmean(found):.2f} ± {stdev(found):.2f}"
        assert row["n"] == "2"
        if name != "digits-sam-epochs2":
            assert row["Difference"] == f"{fmean(found) - float(row['Paper, %']):+.2f}"
        assert row["Time × SGD"] == f"{summary(output, name)['step_ratio']['median']:.2f}×"
    assert (rows[2]["Paper, %"], rows[2]["Difference"]) == ("ours", "–")
    assert [row["FLOPs (theory)"] for row in rows] == ["1.00×", "1.65×", "2.00×"]
    seconds = fmean(
        summary(output, "digits-ssam-f-samples16-epochs2", seed)["extra"]["Fisher information, s"] for seed in (0, 1)
    )
    assert (rows[1]["Fisher, paper"], rows[1]["Fisher, ours"]) == ("1.49 s", f"{seconds:.3g} s")
    assert rows[0]["Fisher, ours"] == "–"


def test_it_is_written_as_markdown_and_on_the_page(reproduced):
    output, _ = reproduced
    page = (output / "report.html").read_text()
    for row in csv.reader((output / "table1.csv").read_text().splitlines()):
        assert f"| {' | '.join(row)} |" in (output / "table1.md").read_text()
        assert all(cell in page for cell in row)
    assert "table1: Digits (scaled down: train.epochs=2)" in page


def test_a_figure_is_measured_and_drawn(reproduced):
    output, text = reproduced
    measured = json.loads((output / "digits-sam-epochs2-seed0" / "analysis" / "gradients.json").read_text())
    assert measured["samples"] == 128
    assert f"{100 * measured['below_zero']['']:.1f}" in text
    assert (output / "figure1" / "gradients.png").is_file()


def test_again_trains_and_measures_nothing(own, reproduced):
    output, text = reproduced
    before = {file: file.stat().st_mtime_ns for file in output.rglob("*.json*")}
    again = invoke("reproduce", own, "--epochs", 2, "--seeds", 2, "--samples", 128, "-o", output, *QUICK)
    assert {file: file.stat().st_mtime_ns for file in output.rglob("*.json*")} == before
    assert again.stdout == text


def test_from_a_folder_shows_the_same_table_and_trains_nothing(own, reproduced):
    output, text = reproduced
    shown = invoke("reproduce", own, "--epochs", 2, "--from", output).stdout
    table = shown[shown.index("table1") : shown.index("figure1")].strip()
    assert table in text
    whole = invoke("reproduce", own, "--only", "sgd", "--from", output).stdout
    assert "There are also runs of 2 epochs: --epochs shows them." in whole


def test_a_page_of_all_tables(own, reproduced, tmp_path):
    output, _ = reproduced
    (output / "notes").mkdir(exist_ok=True)
    (output / "notes" / "table1.md").write_text("A known difference.\n")
    invoke("reproduce", own, "--from", output, "--markdown", tmp_path / "RESULTS.md")
    text = (tmp_path / "RESULTS.md").read_text()
    assert "## Table 1: Digits" in text
    assert "**Scaled down to 2 epochs** of the paper's 15:" in text
    found = accuracy(output, "digits-sgd-epochs2")
    assert f"| SGD | 90.00 | {fmean(found):.2f} ± {stdev(found):.2f} | 2 |" in text
    assert text.endswith("A known difference.\n")
    assert "## Figure" not in text


def test_the_list_has_every_row():
    text = invoke("reproduce", "--list").stdout
    words = text.split()
    for experiment in find_experiments(["all"]):
        assert f"{experiment.name}: {experiment.title}" in text.replace("\n", " ")
        for row in experiment.rows:
            assert row.name in words
    assert words.count("110.65") == 1


def test_a_dry_run_counts_steps_and_trains_nothing(own, reproduced, tmp_path):
    text = invoke("reproduce", own, "--epochs", 2, "--dry-run", "-o", tmp_path / "x", "--device", "cpu").stdout
    assert not (tmp_path / "x").exists()
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip().startswith("digits")}
    assert lines["digits-sam-epochs2-seed0"][0] == str(summary(reproduced[0], "digits-sam-epochs2")["steps"])
    hours = [float(steps) * float(ms) / 3.6e6 for steps, ms, _ in lines.values()]
    assert f"3 runs, {sum(hours):.1f} hours on cpu" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "reproduce needs the name of a table or a figure, such as table1; --list shows them"),
        (("table1", "--from", "nowhere"), "--from must be a folder with runs, but nowhere is none"),
        (("table1", "--markdown", "x.md"), "--markdown goes with --from"),
        (("table1", "--part", "4/4"), "--part must be K/N with K from 0 to N - 1, such as 0/4, but is '4/4'"),
        (("table1", "--only", "sgd", "--address", "auto"), "--address goes with --engine ray"),
    ],
)
def test_what_is_refused(arguments, message):
    assert message in invoke("reproduce", *arguments, code=1).stderr.replace("\n", " ")


def test_no_resume_refuses_runs_that_are_there(own, reproduced):
    output, _ = reproduced
    done = invoke("reproduce", own, "--epochs", 2, "--no-resume", "-o", output, *QUICK, code=1)
    assert "--no-resume starts anew, but there are runs already, such as" in done.stderr


def test_a_killed_command_goes_on_and_neither_loses_nor_repeats_an_epoch(own, tmp_path):
    """SIGKILL in mid-run, then the same command: all files are those of a run that was never stopped."""
    arguments = ["reproduce", str(own), "--only", "digits-sam", "--epochs", "4", *map(str, QUICK), "--rounds", "0"]

    def start(output: Path) -> subprocess.Popen:
        command = [sys.executable, "-m", "sparsam", *arguments, "-o", str(output)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet)

    killed, whole = start(tmp_path / "killed"), start(tmp_path / "whole")
    metrics = tmp_path / "killed" / "digits-sam-epochs4-seed0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (metrics.parent / "summary.json").exists()
    assert start(tmp_path / "killed").wait() == 0
    assert whole.wait() == 0
    runs = [tmp_path / name / "digits-sam-epochs4-seed0" for name in ("killed", "whole")]
    epochs = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    assert [m["epoch"] for m in epochs[0]] == [1, 2, 3, 4]
    for one, other in zip(*epochs, strict=True):
        assert {k: v for k, v in one.items() if k not in ("seconds", "elapsed", "step_ms")} == {
            k: v for k, v in other.items() if k not in ("seconds", "elapsed", "step_ms")
        }


def test_the_committed_page_is_that_of_the_committed_runs(tmp_path):
    page = tmp_path / "RESULTS.md"
    invoke("reproduce", "all", "--from", "results", "--markdown", page)
    assert page.read_text().replace(str(page), "RESULTS.md") == (ROOT / "RESULTS.md").read_text()
