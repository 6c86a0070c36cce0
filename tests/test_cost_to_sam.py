"""benchmarks/cost_to_sam: each method takes its steps at its counted cost, and the score follows its rules."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from committed import RESULTS, ROOT
from cost_to_sam import __main__ as command
from cost_to_sam import report, runs, times, training
from cost_to_sam.methods import METHODS, Task
from cost_to_sam.report import tables
from cost_to_sam.report.scores import BASE, Row, Workbook
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
        "test": {"last": value, "best": value},
        "validation": {"last": value},
        "rounded": {str(bits): None if value is None else value + 0.01 * bits for bits in training.BITS},
        "cost": {"counted": 1.0},
        "environment": {"processor": "slow", "torch": "2", "python": "3", "git": "abc"},
        "source": "def",
    }


def base_and_sam(worse=0.5):
    """Return runs of the base optimizer and of SAM, whose error is smaller by about a half."""
    found = [made("base", seed, 1.0 + 0.01 * seed) for seed in range(5)]
    return found + [made("sam", seed, 1.0 - worse + 0.012 * seed) for seed in range(5)]


def test_the_score_is_a_share_of_sams_gain():
    book = Workbook("forecast", [*base_and_sam(), *(made("share-8", seed, 0.75 + 0.01 * seed) for seed in range(5))])
    assert book.gain.gain == book.helped == pytest.approx(0.496)
    assert book.gain.seeds == 5
    assert book.share(Row("share-8")).gain == pytest.approx(100 * 0.25 / 0.496)
    assert book.is_not_worse(Row("sam"), Row("share-8"))
    assert not book.is_not_worse(Row("share-8"))
    assert book.is_not_worse(Row("momentum")) is None
    assert book.is_not_worse(book.sam) is None


def test_one_training_that_diverges_is_enough():
    found = [*base_and_sam(), *(made("share-8", seed, None if seed == 3 else 0.5) for seed in range(5))]
    book = Workbook("forecast", found)
    assert book.is_not_worse(Row("share-8")) is False
    assert book.is_not_worse(BASE, Row("share-8")) is True
    assert "| SAM on 1/8 of the batch | 1.00× | – | diverges | 0 of 1 |" in tables.scores([book], tables.FIXED)
    assert "| SAM on 1/8 of the batch | diverges (5) |" in tables.metrics([book], "last")


def test_without_a_gain_of_sam_nothing_is_scored():
    book = Workbook("forecast", base_and_sam(worse=0.005))  # the interval of the gain includes 0
    assert book.gain.interval[0] < 0 < book.gain.gain
    assert book.helped is book.share(BASE) is book.is_not_worse(BASE) is None
    assert "forecast" not in tables.scores([book], tables.FIXED)
    assert "| SAM | 1.0190 ± 0.0190 (5) |" in tables.metrics([book], "last")


def test_a_measured_cost_stands_beside_the_counted_one():
    data, workload = Small().load(None), Small()
    found = times.costs(workload, data, ["base", "sam", "seventh", "base-2"], rounds=3)
    assert found["base"]["cost"] == 1
    assert found["seventh"]["fraction"] == pytest.approx(1 / 4)  # steps 0 and 7... of 4
    assert found["base-2"]["cost"] == pytest.approx(2 * found["base-2"]["step"]["median"])
    book = Workbook("forecast", base_and_sam(), {"costs": {"forecast": {"sam": {"cost": 1.9}}}})
    assert book.measured(Row("sam")) == 1.9
    assert book.measured(BASE) is None


def test_a_page_has_a_dash_for_what_is_missing(tmp_path):
    nothing = report.files([], {}, tmp_path)
    assert [path.name for path in nothing] == ["README.md"]
    found = [run for run in base_and_sam() if run["seed"] < 3]
    [page, *pictures] = report.files(found, {}, tmp_path).values()
    assert "| SAM | 1.00× | – | 100 % (99 to 101), n 3 | – |" in page
    assert "| share-8" not in page
    assert "| SAM on 1/8 of the batch | – | – | – | – |" in page
    assert "| forecast, MSE | SAM | 0.5000 | – | – | – | – | 0.1 |" in page
    assert "| 3 | SAM, ρ searched | – | – | – | +0.0300 ± 0.0000 (3) | – |" in page
    assert "| slow | 3 | 2 | abc | def | 6 |" in page
    assert len(pictures) == 2
    assert all("mean of 3 seeds" in picture and "forecast" in picture for picture in pictures)


def test_a_search_shows_its_best_radius_and_compares_with_it():
    found = base_and_sam() + [
        made("sam", seed, (0.3 if rho == 0.4 else 0.8) + 0.01 * seed, rho)
        for rho in METHODS["sam"].search[1:]
        for seed in range(2)
    ]
    book = Workbook("forecast", found)
    assert book.sam == Row("sam", searched=True)
    assert book.helped == pytest.approx(0.7)
    lines = tables.searches([book], METHODS["sam"].search)
    assert (
        "| SAM | 0.5000 | 0.8000 | **0.3000** | 0.8000 | 0.8000 | 0.1 | 71 % (70 to 71) | 100 %, n 2, ρ 0.4 |" in lines
    )


def test_a_comparison_has_a_verdict():
    found = [*base_and_sam(), *(made("base-2", seed, 0.9 + 0.01 * seed) for seed in range(5))]
    found += [made("average", seed, 0.51 + 0.012 * seed) for seed in range(5)]
    found += [made("decay-10", seed, 0.3 + 0.1 * seed) for seed in range(5)]
    lines = tables.comparisons([Workbook("forecast", found)]).splitlines()
    verdicts = {line.split(" | ")[1]: line.split(" | ")[-2:] for line in lines}
    assert verdicts[METHODS["base-2"].title][0].endswith(": worse")
    assert verdicts[METHODS["average"].title] == ["−0.0100 (−0.0100 to −0.0100): not worse", "1 of 1 |"]
    assert verdicts[METHODS["decay-10"].title][0].endswith(": unclear")
    assert verdicts[METHODS["groups-8"].title] == ["–", "– |"]


def test_check_finds_what_would_change(tmp_path, monkeypatch):
    for run in base_and_sam():
        file = tmp_path / "results" / runs.Run(*(run[key] for key in ("workload", "method", "rho", "seed"))).file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(run))

    def call(*options):
        monkeypatch.setattr(sys, "argv", ["cost_to_sam", "report", *options])
        with pytest.raises(SystemExit) as stopped:
            command.main()
        return stopped.value.code

    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "COMMITTED", tmp_path / "results")
    page = tmp_path / "results" / "cost-to-sam" / "README.md"
    assert "cost-to-sam-dark.svg" in call("--check")
    assert not page.exists()
    assert call() == 0
    assert call("--check") == 0
    page.write_text("other")
    assert "README.md" in call("--check")
    assert page.read_text() == "other"


@pytest.mark.skipif(not any((RESULTS / runs.FOLDER).rglob("*.json")), reason="no committed runs")
def test_the_page_is_up_to_date(monkeypatch):
    monkeypatch.undo()  # the small workload
    names = [
        path.name for path in command.changed(report.files(runs.results([RESULTS]), runs.measurements([RESULTS]), ROOT))
    ]
    assert not names, f"{', '.join(names)}: run python -m cost_to_sam report"


def test_the_radius_is_that_of_the_best_validation():
    found = [
        made("sam", seed, abs(rho - 0.2) + 0.01 * seed, rho)
        for seed in runs.SEARCH_SEEDS
        for rho in METHODS["sam"].search
    ]
    assert runs.best_radii(found) == {("forecast", "sam"): 0.2}
    assert runs.best_radii(found[:-1]) == {}  # a search that is not finished chooses nothing


@pytest.mark.parametrize(("target", "next_radius"), [(1.5, 3.2), (0.09, 0.05)])
def test_a_search_goes_on_beyond_its_ends(target, next_radius):
    found = [made("sam", 0, abs(rho - target), rho) for rho in METHODS["sam"].search]
    assert runs.best_radii(found) == {}
    asked = {run.rho for run in runs.search_runs(found) if (run.workload, run.method) == ("forecast", "sam")}
    assert asked == {*METHODS["sam"].search, next_radius}
    found.append(made("sam", 0, 1.0, next_radius))
    assert runs.best_radii(found) == {("forecast", "sam"): pytest.approx(target, abs=0.2)}
