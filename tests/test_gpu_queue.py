"""benchmarks/gpu.py: what it trains, in which order, what it leaves out, how it stops and what it packs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from commands import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import gpu

DIGITS = gpu.Job("a test", ["digits.toml"], minutes=1.0, set=["train.max_steps=2"], seeds=2)


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """Jobs of a small table, and options as the command has them."""
    rows = '[digits]\nrows = [{ recipe = "digits-sgd" }, { recipe = "digits-sam" }]\n'
    (tmp_path / "digits.toml").write_text(rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "read_table", lambda: {gpu.CPU: (["train.threads=1"], [DIGITS, DIGITS])})
    output = tmp_path / "runs"
    return argparse.Namespace(output=output, data=tmp_path, smoke=False, lists=[gpu.CPU], cores=1, minutes=None)


def names(units):
    return [run.path.name for unit in units for run in unit.runs]


def test_the_table_names_rows_that_there_are(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    options = argparse.Namespace(output=tmp_path, data=tmp_path, smoke=False)
    for kind in (gpu.GPU, gpu.CPU):
        assert gpu.units_of(kind, options, known=[])


def test_all_rows_come_with_the_first_seed_and_no_run_comes_twice(digits):
    tags = ("sgd-max_steps2-seed0", "sam-max_steps2-seed0", "sgd-max_steps2-seed1", "sam-max_steps2-seed1")
    assert names(gpu.units_of(gpu.CPU, digits, known=[])) == [f"digits-{tag}" for tag in tags]


def test_it_trains_resumes_and_packs_all_but_weights(digits, tmp_path):
    assert gpu.train(digits, known=[])
    assert gpu.train(digits, known=[])  # which finds all runs finished
    archive = tmp_path / "small.tar.gz"
    assert gpu.pack(digits.output, archive) == 4
    with tarfile.open(archive) as tar:
        packed = {Path(name).name for name in tar.getnames()}
        recipe = json.load(tar.extractfile("digits-sgd-max_steps2-seed0/recipe.json"))
    assert packed == {"recipe.json", "environment.json", "metrics.jsonl", "summary.json"}
    assert recipe["data"]["root"] == "data"
    assert recipe["train"]["max_steps"] == 2
    assert gpu.units_of(gpu.CPU, digits, known=gpu.find_runs(digits.output)) == []


def test_no_run_is_begun_that_would_not_end_in_time(digits):
    digits.minutes = 0.9
    assert gpu.train(digits, known=[])
    assert not any(digits.output.glob("digits-*"))


def test_a_failed_run_is_named_with_its_log(digits, capsys, monkeypatch):
    broken = gpu.Job("a test", ["digits.toml"], minutes=0.1, set=["data.limit=64"], seeds=1)
    monkeypatch.setattr(gpu, "read_table", lambda: {gpu.CPU: ([], [broken])})
    assert not gpu.train(digits, known=[])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("not finished: digits-sam")
    assert "data.batch_size must be at most" in Path(line.split("its log: ")[1]).read_text()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_steps_of_every_row(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--smoke", "--output", tmp_path / "runs"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs.tar.gz").is_file()
