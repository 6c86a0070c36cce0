"""`sparsam reproduce table1` from end to end on a small slice of real CIFAR, by both engines."""

from __future__ import annotations

import csv
import json

import pytest
from commands import sparsam
from real_images import DATA, needs_cifar

pytestmark = [pytest.mark.slow, needs_cifar("cifar100")]
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
    assert "data.limit 64, train.epochs 1 instead of 200" in done.stdout.replace("\n", " ")
    (file,) = tmp_path.glob("table1-*.csv")
    table = list(csv.DictReader(file.read_text().splitlines()))
    assert [row["row"] for row in table] == list(ROWS)
    for row in table:
        own = json.loads((tmp_path / f"{row['run']}-seed0" / "summary.json").read_text())
        paper, accuracy = ROWS[row["row"]], 100 * own["test_accuracy"]
        assert own["steps"] == 2
        assert float(row["paper"]) == paper
        assert float(row["ours"]) == pytest.approx(accuracy, abs=1e-4)
        assert float(row["difference"]) == pytest.approx(accuracy - paper, abs=1e-4)
