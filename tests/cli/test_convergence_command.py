"""`sparsam convergence`."""

from __future__ import annotations

import json
import re

import pytest
from commands import invoke


def test_the_command(tmp_path):
    chosen = ["--problem", "cosine", "--sparsity", 0.5, "--sparsity", 0.9]
    done = invoke("convergence", *chosen, "--steps", 20, "--seeds", 2, "-o", tmp_path, width=80)
    lines = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["cosine"]]
    assert [line[1:3] for line in lines] == [
        ["dense", "0"], ["random", "0.5"], ["dynamic", "0.5"], ["random", "0.9"], ["dynamic", "0.9"],
    ]  # fmt: skip
    result = json.loads((tmp_path / "convergence.json").read_text())
    assert [float(line[3]) for line in lines] == pytest.approx([c["mean"][-1] for c in result["curves"]], rel=0.01)
    assert (result["seeds"], result["steps"]) == (2, 20)
    assert all(0 < curve["largest_share"] < 1 for curve in result["curves"])
    refused = invoke("convergence", "--rho", 1.5, "-o", tmp_path, code=1)
    assert refused.stderr.startswith("error: rho_0 must be a number in [0, G eta_0]")


def test_redraw_needs_nothing_but_the_numbers(tmp_path, monkeypatch):
    options = [
        "--problem",
        "sigmoid",
        "--problem",
        "cosine",
        "--sparsity",
        0.5,
        "--steps",
        12,
        "--seeds",
        2,
        "-o",
        tmp_path,
    ]
    shown = invoke("convergence", *options).stdout
    data = (tmp_path / "convergence.json").read_bytes()
    pictures = [tmp_path / f"convergence.{suffix}" for suffix in ("png", "svg")]
    for picture in pictures:
        assert picture.stat().st_size > 10_000
        picture.unlink()
    monkeypatch.setattr("sparsam.analysis.convergence.walk", None)  # nothing is run
    assert invoke("convergence", "--redraw", "-o", tmp_path).stdout == shown
    assert all(picture.is_file() for picture in pictures)
    assert (tmp_path / "convergence.json").read_bytes() == data
    error = invoke("convergence", "--redraw", "-o", tmp_path / "nowhere", code=1).stderr
    assert re.search(r"there is no .*nowhere/convergence.json to redraw; compute it with: sparsam conv", error)
    error = invoke("convergence", "--redraw", "--seeds", 2, "-o", tmp_path, "--sparsity", 0.5, code=1).stderr
    assert re.search(r"as they were measured, so leave out --seeds, --sparsity$", error)
