"""results/QUEUE.md: each of its commands has rows, and as many runs are missing as it says."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
from commands import ROOT

from sparsam.reproduce.comparison import find_runs
from sparsam.reproduce.experiments import chosen, find_experiments
from sparsam.reproduce.plan import plan_runs, without_known

QUEUE = (ROOT / "results" / "QUEUE.md").read_text()
TRAINED = re.findall(r"^\| `(reproduce .*?)` \| (\d+) \|", QUEUE, re.MULTILINE)


def parsed(command: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--share-start", action="store_true")
    return parser.parse_args(shlex.split(command)[1:])


@pytest.fixture(scope="module")
def committed():
    return find_runs(ROOT / "results")


def test_there_are_commands():
    assert len(TRAINED) > 10


@pytest.mark.parametrize(("command", "missing"), TRAINED)
def test_as_many_runs_are_missing_as_it_says(command, missing, committed, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = parsed(command)
    changes = options.set + ([] if options.epochs is None else [f"train.epochs={options.epochs}"])
    experiments = chosen(find_experiments(options.names), options.only)
    left, _ = without_known(plan_runs(experiments, options.seeds, Path("runs"), changes), committed)
    assert len(left) == int(missing)
