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
SLICE = ("data.limit=64", "data.batch_size=32", "train.deterministic=true", f"data.root={DATA}")


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_one_epoch_of_two_rows(engine, tmp_path):
    if engine == "ray":
        pytest.importorskip("ray", reason="needs the extra [ray]")
    settings = [word for setting in SLICE for word in ("--set", setting)]
    rows = [word for name in ROWS for word in ("--only", name)]
    options = ("--epochs", 1, "--rounds", 0, "--engine", engine, "--device", "cpu", "-o", tmp_path)
    done = sparsam("reproduce", "table1", *rows, *settings, *options)
    assert "scaled down: data.limit=64, data.batch_size=32, train.epochs=1" in done.stdout
    table = list(csv.DictReader((tmp_path / "table1.csv").read_text().splitlines()))
    assert len(table) == 2
    for row, (name, paper) in zip(table, ROWS.items(), strict=True):
        (file,) = tmp_path.glob(f"{name}-*-seed0/summary.json")
        own = json.loads(file.read_text())
        assert own["steps"] == 2
        assert row["Paper, %"] == f"{paper:.2f}"
        assert row["Ours, %"] == f"{100 * own['test_accuracy']:.2f}"
        assert row["Difference"] == f"{100 * own['test_accuracy'] - paper:+.2f}"
