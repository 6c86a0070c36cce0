"""Benchmarks: they run to their end, their ratios are those of the rounds, and a result names its commit."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import pytest
from commands import ROOT

from sparsam.training.environment import git_commit

SMALL = {
    "peers.py": ("--batch-size", 2, "--size", 8, "--warm-up", 3),
    "transformer.py": ("--sizes", "tiny", "--batch-size", 2, "--context", 8, "--steps", 1),
    "ssam_c.py": ("--networks", "resnet18", "--batch-size", 2, "--steps", 1, "--warm-up", 3, "--precision", "fp32"),
}
BASE = {"transformer.py": "AdamW"}
OTHERS = {
    "looking.py": ("--samples", 2, "--batch-size", 2),
    "perturbation.py": ("--layers", 2, "--width", 4),
}


def measured(script, *options, output):
    """Run a script; return its result and what it printed."""
    command = [sys.executable, ROOT / "benchmarks" / script, *options, output]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text()), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", SMALL)
def test_ratios_are_those_of_the_rounds(script, tmp_path):
    options = (*SMALL[script], "--rounds", 3, "--device", "cpu", "--output")
    result, text = measured(script, *options, output=tmp_path / "result.json")
    assert result["git"] == git_commit()
    rows = {row["method"]: row for part in result.get("sizes", [result]) for row in part["rows"]}
    plain = rows[BASE.get(script, "SGD")]["rounds_ms"]
    assert len(plain) == 3
    assert len(rows) > 5
    for name, row in rows.items():
        ratios = [own / base for own, base in zip(row["rounds_ms"], plain, strict=True)]
        assert row["ratio"] == pytest.approx(statistics.median(ratios))
        assert f"| {name} | " in text


@pytest.mark.slow
def test_the_cost_of_the_fisher_is_that_of_the_rounds(tmp_path):
    options = ("--resnet18", 2, "--repeats", 3, "--json")
    result, text = measured("fisher.py", *options, output=tmp_path / "result.json")
    assert result["settings"]["git"] == git_commit()
    times = result["seconds"]
    unit, signs = times["batch gradient"], times["signs, chunks of 32"]
    assert len(unit) == len(signs) == 3
    ratio = statistics.median(own / base for own, base in zip(signs, unit, strict=True))
    assert f"| {ratio:.2f} (" in text


@pytest.mark.slow
@pytest.mark.parametrize("script", OTHERS)
def test_a_result_names_its_commit(script, tmp_path):
    options = (*OTHERS[script], "--rounds", 2, "--device", "cpu", "--output")
    result, _ = measured(script, *options, output=tmp_path / "result.json")
    assert result["git"] == git_commit()
