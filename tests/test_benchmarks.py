"""Benchmarks: they run to their end, their ratios are those of the rounds, and a result names its commit."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from functools import partial

import pytest
import torch
from commands import ROOT
from shares import step_with_one_forward
from torch import nn
from torch.nn import functional as F

from sparsam import SAM
from sparsam.training.environment import git_commit

SMALL = {
    "peers.py": ("--batch-size", 2, "--size", 8, "--warm-up", 3),
    "transformer.py": ("--sizes", "tiny", "--batch-size", 2, "--context", 8, "--steps", 1),
    "ssam_c.py": ("--networks", "resnet18", "--batch-size", 2, "--steps", 1, "--warm-up", 3, "--precision", "fp32"),
    "shares.py": ("--cases", "tiny-4-eager", "--turn", 0),
}
BASE = {"transformer.py": "AdamW", "shares.py": "base step"}
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
    parts = result.get("sizes") or result.get("cases") or [result]
    rows = {row["method"]: row for part in parts for row in part["rows"]}
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


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA graph would not fail")
def test_a_case_that_fails_does_not_end_the_measurement_of_shares(tmp_path):
    output = tmp_path / "result.json"
    options = ("--rounds", 2, "--turn", 0, "--device", "cpu", "--cases", "tiny-4-graph", "tiny-4-eager", "--output")
    first, text = measured("shares.py", *options, output=output)
    failed, done = first["cases"]
    assert "needs a CUDA device" in failed["error"]
    assert "graph, fp32, failed: " in text
    again, _ = measured("shares.py", *options, output=output)
    assert [case["case"] for case in again["cases"]] == ["tiny-4-eager", "tiny-4-graph"]
    assert again["cases"][0] == done  # not measured again


@pytest.mark.parametrize("share", [1 / 8, 1 / 4, 0.4])
def test_share_and_rest_in_one_forward_pass_have_the_gradient_of_two(share):
    """The benchmark's rows "one forward", without BatchNorm in float64."""
    x, y = torch.randn(24, 5, dtype=torch.float64), torch.randint(0, 3, (24,))
    results = []
    for one_forward in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()
        options = {"rho": 0.3, "model": model, "lr": 0.05, "momentum": 0.9}
        opt = SAM(model.parameters(), torch.optim.SGD, share=1.0 if one_forward else share, **options)

        def closure(rows, model=model, opt=opt):
            opt.zero_grad()
            loss = F.cross_entropy(model(rows(x)), rows(y))
            loss.backward()
            return loss

        for _ in range(3):
            by_hand = partial(step_with_one_forward, opt, model, F.cross_entropy, x, y, share)
            loss = by_hand() if one_forward else opt.step(closure)
        results.append([loss, *(p.grad for p in model.parameters()), *(p.detach() for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
