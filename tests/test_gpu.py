"""benchmarks/gpu.py: what it trains, in which order, what it leaves out, how it stops and what it packs."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import gpu
import pytest
from commands import ROOT

from sparsam.errors import UserError

SETTINGS = {"set": ["train.max_steps=2"], "seeds": 2}
DIGITS = gpu.Job("a test", "digits", ["digits.toml"], minutes=1.0, **SETTINGS)
AGAIN = gpu.Job("another test", "others", ["digits.toml"], minutes=1.0, **SETTINGS)


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """Jobs of a small table, and options as the command has them."""
    rows = '[digits]\nrows = [{ recipe = "digits-sgd" }, { recipe = "digits-sam" }]\n'
    (tmp_path / "digits.toml").write_text(rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the processes to come, as the command sets it
    monkeypatch.setattr(gpu, "read_table", lambda: {gpu.CPU: (["train.threads=1"], [DIGITS, AGAIN])})
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


def test_it_trains_and_packs_all_but_weights(digits, monkeypatch):
    with_job(monkeypatch)
    assert gpu.train(digits, known=[]) == []
    assert gpu.units_of(gpu.CPU, digits, known=[]) == []
    assert gpu.units_of(gpu.CPU, digits, known=gpu.find_runs(digits.output)) == []
    archive, count = gpu.pack(digits.output)
    assert count == 2
    with tarfile.open(archive) as tar:
        packed = {Path(name).name for name in tar.getnames()}
        recipe = json.load(tar.extractfile("digits/digits-sgd-max_steps2-seed0/recipe.json"))
    assert packed == {"recipe.json", "environment.json", "metrics.jsonl", "summary.json"}
    assert recipe["data"]["root"] == "data"
    assert recipe["train"]["max_steps"] == 2


def test_no_run_is_begun_that_would_not_end_in_time(digits, capsys):
    digits.minutes = 0.9
    assert gpu.train(digits, known=[]) == []
    assert not any(digits.output.glob("*/digits-*"))
    assert "4 runs are left" in capsys.readouterr().out


def with_job(monkeypatch, **changes):
    job = gpu.replace(DIGITS, seeds=1, minutes=0.01, **changes)
    monkeypatch.setattr(gpu, "read_table", lambda: {gpu.CPU: ([], [job])})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"set": ["data.limit=64"]}, "data.batch_size must be at most"),
        pytest.param({"afterwards": "evaluate {output}/nothing"}, "sparsam evaluate .* failed", marks=pytest.mark.slow),
    ],
)
def test_what_failed_is_named_with_its_log(digits, monkeypatch, changes, reason):
    with_job(monkeypatch, **changes)
    *_, failed = gpu.train(digits, known=[])
    assert failed.name.startswith("digits-sgd") or "limit" in failed.name
    assert re.search(reason, failed.log(digits.output).read_text())


@pytest.mark.slow
def test_the_command_of_a_unit_runs_once(digits, monkeypatch):
    with_job(monkeypatch, afterwards="evaluate {runs}", only=["digits-sgd"])
    for _ in range(2):
        assert gpu.train(digits, known=[]) == []
    (log,) = (digits.output / "logs").glob("*.log")
    assert log.read_text().count("on 597 test images") == 1


def test_data_that_are_missing_are_named_at_once(digits, monkeypatch):
    monkeypatch.setattr(gpu, "read_table", lambda: {gpu.CPU: ([], [gpu.replace(DIGITS, tables=["table4"])])})
    with pytest.raises(UserError, match="--data must be a folder that holds cifar-10-batches-py"):
        gpu.train(digits, known=[])


def test_sigterm_saves_the_runs_and_leaves_no_process(digits):
    """What a scheduler sends. The script runs as a process of its own, whose children are its runs."""
    script = (
        "import argparse, gpu; from pathlib import Path\n"
        f"job = gpu.Job('a test', 'digits', [{str(digits.data / 'digits.toml')!r}], minutes=0.1, only=['digits-sgd'])\n"
        "gpu.read_table = lambda: {gpu.CPU: (['train.threads=1'], [job])}\n"
        f"options = argparse.Namespace(output=Path({str(digits.output)!r}), data=Path('.'), smoke=False)\n"
        "options.lists, options.cores, options.minutes = [gpu.CPU], 1, None\n"
        "if __name__ == '__main__': print(gpu.train(options, known=[]))\n"
    )
    file = digits.data / "own.py"
    file.write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT / "src")])}
    process = subprocess.Popen([sys.executable, file], env=environment, stdout=subprocess.PIPE, text=True)
    run = digits.output / "digits" / "digits-sgd-seed0"
    while not (run / "metrics.jsonl").is_file():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert "digits-sgd-seed0: stopped" in text
    assert (run / "checkpoints" / "last.pt").is_file()
    assert not (run / "summary.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_steps_of_every_row(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--smoke", "--output", tmp_path / "runs"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs.tar.gz").is_file()
