"""`sparsam hessian` on a trained run."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from commands import ROOT, invoke
from exact_hessian import eigsh_of
from trained_runs import train_digits

from sparsam.analysis.hessian import (
    Density,
    weights_of,
)
from sparsam.analysis.run_objective import load_objective

QUICK = ["--samples", 60, "--probes", 2, "--steps", 10, "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_digits(tmp_path_factory.mktemp("runs") / "digits", "sgd")


@pytest.fixture(scope="module")
def measured(run, tmp_path_factory):
    output = tmp_path_factory.mktemp("figures")
    return (
        invoke("hessian", run, *QUICK, "-o", output),
        output,
        json.loads((run / "analysis/hessian.json").read_text()),
    )


def test_command_measures_a_run(run, measured):
    done, output, result = measured
    objective = load_objective(run, samples=60)
    assert result["eigenvalues"][0] == pytest.approx(eigsh_of(objective, 1)[0], rel=1e-3)
    assert len(result["eigenvalues"]) == len(result["residuals"]) == 5
    assert result["ratio"] == pytest.approx(result["eigenvalues"][0] / result["eigenvalues"][4])
    assert result["loss"] == pytest.approx(objective.loss().item(), rel=1e-5)
    density = Density.from_dict(result["density"])
    assert density.size == weights_of(objective)
    assert (result["trace"], result["trace_error"]) == (density.trace, density.trace_error)
    assert {result[key] for key in ("samples", "probes", "steps", "seed", "weights", "method")} == {
        60,
        2,
        10,
        0,
        "last",
        "SGD",
    }
    assert result["versions"]["torch"] == torch.__version__
    values = result["eigenvalues"]
    row = next(line for line in done.stdout.splitlines() if line.split()[:1] == ["digits"])
    assert row.split()[1:4] == [f"{values[0]:.4g}", f"{values[4]:.4g}", f"{result['ratio']:.2f}"]
    assert f"{result['trace']:.4g} ± {result['trace_error']:.2g}" in row
    assert f"{result['residuals'][0]:.1e}, {result['residuals'][4]:.1e}" in row
    assert (output / "hessian.png").read_bytes()[:4] == b"\x89PNG"
    drawn = (output / "hessian.svg").read_text()
    assert "<svg" in drawn
    assert "GiB for vectors" in " ".join(done.stderr.split())


def test_command_draws_again_without_measuring(run, measured, tmp_path):
    done, _, result = measured
    copied = tmp_path / "digits"
    shutil.copytree(run, copied, ignore=shutil.ignore_patterns("checkpoints"))
    again = invoke("hessian", copied, copied, "--redraw", "-o", tmp_path / "figures")
    rows = [
        [line for line in text.splitlines() if line.split()[:1] == ["digits"]] for text in (done.stdout, again.stdout)
    ]
    assert rows[1] == rows[0]  # once, although the run is named twice
    assert json.loads((copied / "analysis/hessian.json").read_text()) == result
    assert (tmp_path / "figures/hessian.png").is_file()


def test_command_refuses(run, tmp_path):
    done = invoke("hessian", run, *QUICK, "--memory", 0.001, "-o", tmp_path, code=1)
    assert "error: memory_limit must hold 12 vectors for k=5 eigenvalues" in done.stderr
    assert "or lower k (k is --top, memory_limit is --memory)" in done.stderr
    done = invoke("hessian", run, *QUICK, "--top", 60, "-o", tmp_path, code=1)
    assert "error: products must be a whole number >= 2 k = 120, but is 100 (k is --top" in done.stderr
    bare = tmp_path / "bare"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("analysis"))
    done = invoke("hessian", bare, "--redraw", "-o", tmp_path, code=1)
    assert f"there is no {bare}/analysis/hessian.json; compute it with: sparsam hessian" in done.stderr
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.slow
def test_command_says_that_it_was_stopped(run, tmp_path):
    command = [sys.executable, "-m", "sparsam", "hessian", run, "--device", "cpu", "-o", tmp_path]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a shell's background jobs do not
    options = {"stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "preexec_fn": heard}
    with subprocess.Popen(list(map(str, command)), **options) as process:
        assert "weights" in process.stderr.readline()  # it has begun
        process.send_signal(signal.SIGINT)
        last = process.stderr.read().splitlines()[-1]
    assert process.returncode == 1
    assert last == "digits: stopped; nothing new of it was saved, results of earlier runs were"
