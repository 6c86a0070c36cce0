"""benchmarks/cost_to_sam: each method takes its steps at its counted cost, and the score follows its rules."""

from __future__ import annotations

import json

import pytest
import torch
from cost_to_sam import report, runs, training
from cost_to_sam.methods import METHODS, Task
from cost_to_sam.workloads import WORKLOADS, Data, Forecast


class Small(Forecast):
    """Forecasts of noise: 40 windows of 16 hours."""

    epochs = 2
    batch_size = 16
    window, horizon = 16, 4

    def load(self, root):
        series = torch.randn(7, 61, generator=torch.Generator().manual_seed(0))
        x, y = self._windows(series.T)
        return Data((x, y), (x[:8], y[:8]), (x[:8], y[:8]))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(WORKLOADS, "forecast", Small())


@pytest.mark.parametrize("name", METHODS)
def test_a_method_computes_as_many_samples_as_it_counts(name):
    method, workload = METHODS[name], WORKLOADS["forecast"]
    data, model, rows = workload.load(None), workload.network(), []
    stepper = method.build(Task(workload, data, model, 14, method.rho))
    model.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    x, y = (t[:16] for t in data.train)
    for _ in range(14):
        assert stepper.step(x, y).isfinite()
    if not name.startswith(("thrifty", "gradient", "ssam-f")):  # replay and the Fisher information compute otherwise
        assert sum(rows) / (14 * 16) == pytest.approx(stepper.cost, abs=0.05)


def test_a_run_has_what_the_report_needs(tmp_path):
    result = training.train("forecast", "share-8", 0.1, 0, tmp_path)
    assert result["cost"]["counted"] == pytest.approx(1.125)
    assert len(result["curve"]) == 2
    assert {*result["test"]} == {"last", "best"}
    assert {*result["rounded"]} == {"8", "4", "3"}
    assert result == json.loads(json.dumps(result))
    again = training.train("forecast", "share-8", 0.1, 0, tmp_path)
    assert again["test"] == result["test"]


def test_rounding_keeps_so_many_levels():
    model = torch.nn.Linear(50, 3)
    coarse = training.rounded(model, 3)
    assert all(len(row.unique()) <= 7 for row in coarse.weight)
    assert coarse.bias.equal(model.bias)


def made(method, seed, value, rho=None):
    rho = METHODS[method].rho if rho is None else rho
    return {
        "workload": "forecast",
        "method": method,
        "seed": seed,
        "rho": rho,
        "test": {"last": value},
        "validation": {"last": value},
        "cost": {"counted": 1.0},
    }


def test_the_score_is_a_share_of_sams_gain():
    found = [made("base", seed, 1.0 + 0.01 * seed) for seed in range(5)]
    found += [made("sam", seed, 0.5 + 0.012 * seed) for seed in range(5)]
    found += [made("share-8", seed, 0.75 + 0.01 * seed) for seed in range(5)]
    book = report.Workbook("forecast", found)
    assert book.gain.gain == pytest.approx(0.496)
    assert book.gain.seeds == 5
    assert book.share(("share-8", False)).startswith("50 %")
    assert book.is_not_worse(("sam", False), ("share-8", False))
    assert not book.is_not_worse(("share-8", False))
    assert book.is_not_worse(("momentum", False)) is None


def test_one_training_that_diverges_is_enough():
    found = [
        made(method, seed, 1.0 - (0.5 + 0.01 * seed) * (method == "sam"))
        for method in ("base", "sam")
        for seed in range(5)
    ]
    found += [made("share-8", seed, None if seed == 3 else 0.5) for seed in range(5)]
    book = report.Workbook("forecast", found)
    assert book.share(("share-8", False)) == "diverges"
    assert book.is_not_worse(("share-8", False)) is False


def test_the_radius_is_that_of_the_best_validation():
    found = [
        made("sam", seed, abs(rho - 0.2) + 0.01 * seed, rho)
        for seed in runs.SEARCH_SEEDS
        for rho in METHODS["sam"].search
    ]
    assert runs.best_radii(found) == {("forecast", "sam"): 0.2}
    assert runs.best_radii(found[:-1]) == {}  # a search that is not finished chooses nothing
