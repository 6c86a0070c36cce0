"""Benchmarks that compare methods: they run to their end, and their ratios are those of the rounds."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import pytest
from commands import ROOT

SMALL = {
    "peers.py": ("--batch-size", 2, "--size", 8, "--warm-up", 3),
    "transformer.py": ("--sizes", "tiny", "--batch-size", 2, "--context", 8, "--steps", 1),
    "ssam_c.py": ("--networks", "resnet18", "--batch-size", 2, "--steps", 1, "--warm-up", 3, "--precision", "fp32"),
}
BASE = {"transformer.py": "AdamW"}


@pytest.mark.slow
@pytest.mark.parametrize("script", SMALL)
def test_ratios_are_those_of_the_rounds(script, tmp_path):
    output = tmp_path / "result.json"
    command = [sys.executable, ROOT / "benchmarks" / script, *SMALL[script], "--rounds", 3, "--output", output]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, [*command, "--device", "cpu"])), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    rows = {row["method"]: row for part in result.get("sizes", [result]) for row in part["rows"]}
    plain = rows[BASE.get(script, "SGD")]["rounds_ms"]
    assert len(plain) == 3
    assert len(rows) > 5
    for name, row in rows.items():
        ratios = [own / base for own, base in zip(row["rounds_ms"], plain, strict=True)]
        assert row["ratio"] == pytest.approx(statistics.median(ratios))
        assert f"| {name} | " in done.stdout


@pytest.mark.slow
def test_the_cost_of_the_fisher_is_that_of_the_rounds(tmp_path):
    output = tmp_path / "result.json"
    command = [sys.executable, ROOT / "benchmarks" / "fisher.py", "--resnet18", 2, "--repeats", 3, "--json", output]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    times = json.loads(output.read_text())["seconds"]
    unit, signs = times["batch gradient"], times["signs, chunks of 32"]
    assert len(unit) == len(signs) == 3
    ratio = statistics.median(own / base for own, base in zip(signs, unit, strict=True))
    assert f"| {ratio:.2f} (" in done.stdout
