"""`sparsam reproduce table1` from end to end on a small slice of real CIFAR, by both engines."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
from commands import sparsam

from sparsam.data.cifar import LAYOUTS

DATA = Path(os.environ.get("SPARSAM_DATA", "none"))
FOLDER = LAYOUTS["cifar100"].folder
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (DATA / FOLDER).is_dir(), reason=f"needs real images: SPARSAM_DATA names no folder that holds {FOLDER}"
    ),
]
ROWS = {"cifar100-resnet18-sgd": 77.80, "cifar100-resnet18-ssam-d": 80.59}
SLICE = ("--set", "data.limit=256", "--set", "train.deterministic=true", "--device", "cpu", "--rounds", 1)


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_one_epoch_of_two_rows(engine, tmp_path):
    if engine == "ray":
        pytest.importorskip("ray", reason="needs the extra [ray]")
    arguments = ["table1", "--epochs", 1, *SLICE, "--set", f"data.root={DATA}", "-o", tmp_path, "--engine", engine]
    done = sparsam("reproduce", *arguments, "--only", "cifar100-resnet18-sgd", "--only", "cifar100-resnet18-ssam-d")
    assert "scaled down: data.limit=256, train.epochs=1" in done.stdout
    rows = list(csv.DictReader((tmp_path / "table1.csv").read_text().splitlines()))
    summaries = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/summary.json")}
    assert len(rows) == len(summaries) == 8  # SGD, SGD with SAM's weight decay, SSAM-D at six sparsities
    shown = {row["Paper, %"]: row["Ours, %"] for row in rows}
    for name, paper in ROWS.items():
        own = summaries[f"{name}-limit256-epochs1-seed0"]
        assert own["steps"] == 2
        assert shown[f"{paper:.2f}"] == f"{100 * own['test_accuracy']:.2f}"
