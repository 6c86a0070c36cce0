"""Runs in processes of their own, which can be killed, and what two runs are compared by."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from digits_runs import CPU, equal, numbers

from sparsam.runs.checkpoint import load_checkpoint


def start(*arguments, command="train", **environment):
    """Start a command of `sparsam` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "sparsam", command, "--device", "cpu", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def finish(process, code=0):
    """Wait for the end of a process and of its workers; return what it has printed."""
    output = process.communicate(timeout=300)[0]
    assert process.returncode == code, output
    return output


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.005)


def saved_at(run, epoch, batch):
    """Return whether a run has saved a checkpoint in an epoch, after so many batches or more."""
    if not run.last.exists():
        return False
    saved = load_checkpoint(run.last, CPU)
    return saved["epoch"] == epoch and saved["batch"] >= batch


def assert_same_run(one, other):
    assert numbers(one.metrics()) == numbers(other.metrics())
    states = [load_checkpoint(run.last, CPU) for run in (one, other)]
    for key in ("model", "optimizer", "rng", "best", "mask_statistics"):
        assert equal(states[0][key], states[1][key]), key
