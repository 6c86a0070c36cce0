"""The table of a reproduction: which columns it has, and what is said about them."""

from __future__ import annotations

import pytest
from report_runs import make_run

from sparsam.report.collect import group_runs
from sparsam.reproduce.comparison import Result
from sparsam.reproduce.document import table_page
from sparsam.reproduce.experiments import Experiment, Row
from sparsam.reproduce.table import paper_notes, paper_table
from sparsam.runs.run import read_run

RATIO = {"median": 1.83, "low": 1.79, "high": 1.85, "rounds": 30}


@pytest.fixture
def methods(tmp_path):
    """Two seeds of SGD with times, and three of SAM without."""
    runs = [
        make_run(tmp_path, "sgd", s, summary={"test_accuracy": a, "step_ratio": RATIO})
        for s, a in enumerate((0.5, 0.75))
    ]
    runs += [make_run(tmp_path, "sam", s, summary={"test_accuracy": a}) for s, a in enumerate((0.5, 0.75, 1.0))]
    return {method.name: method for method in group_runs(map(read_run, runs))}


def table(methods, sgd, sam, **about):
    results = [Result(row, row.recipe(), methods.get(row.name.removeprefix("digits-"))) for row in (sgd, sam)]
    return paper_table(Experiment("t", "", (sgd, sam), **about), results)


def test_columns_that_are_empty_are_left_out(methods):
    sgd, sam = Row("digits-sgd"), Row("digits-sam")
    found = table(methods, sgd, sam)
    assert found.columns == ("Row", "Ours, %", "n", "Training loss", "FLOPs (theory)", "Time × SGD")
    assert [[cell.text for cell in row] for row in found.rows] == [
        ["digits-sgd", "62.50 ± 17.68", "2", "0.018 ± 0.0021", "1.00×", "1.83× ± 0.03"],
        ["digits-sam", "75.00 ± 25.00", "3", "0.0295 ± 0.003", "2.00×", "–"],
    ]
    del methods["sgd"]
    assert table(methods, sgd, sam).columns == ("Row", "Ours, %", "n", "Training loss", "FLOPs (theory)")
    assert table({}, sgd, sam).columns == ("Row", "Ours, %", "n")


def test_a_column_with_one_number_stays(methods):
    found = table(methods, Row("digits-sgd", paper=60.0), Row("digits-sam"))
    assert found.columns[:5] == ("Row", "Reference, %", "Ours, %", "n", "Difference")
    assert [[row[i].text for i in (1, 4)] for row in found.rows] == [["60.00", "+2.50"], ["–", "–"]]
    assert "Difference" not in table({}, Row("digits-sgd", paper=60.0), Row("digits-sam")).columns


def test_a_table_of_its_own_has_a_heading_and_says_what_its_numbers_mean(methods):
    found = table(methods, Row("digits-sgd"), Row("digits-sam"))
    assert table_page("t: SGD and SAM", found) == (
        "# t: SGD and SAM\n\n"
        "| Row | Ours, % | n | Training loss | FLOPs (theory) | Time × SGD |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| digits-sgd | 62.50 ± 17.68 | 2 | 0.018 ± 0.0021 | 1.00× | 1.83× ± 0.03 |\n"
        "| digits-sam | 75.00 ± 25.00 | 3 | 0.0295 ± 0.003 | 2.00× | – |\n\n"
        "Ours: the accuracy of the last epoch, mean ± standard deviation over n seeds. Training loss: the mean over "
        "the steps of\nthe last epoch. FLOPs: by the paper's formula, which is not for rows with a cut. Time: of a "
        "step, ± half of the range\nbetween the quartiles.\n"
    )


def test_notes_are_about_what_is_there(methods):
    sgd, sam = Row("digits-sgd"), Row("digits-sam")
    results = [Result(sam, sam.recipe(), methods["sam"], methods["sgd"])]
    found = paper_table(Experiment("t", "", (sgd, sam), against=sgd), results)
    heading = "Minus digits-sgd (95 % interval)"
    assert paper_notes(found)[heading].startswith("Interval: holds the true difference with 95 % confidence")
    assert paper_notes(table({}, sgd, sam)) == {"Ours, %": "Ours: the accuracy of the last epoch."}
    of_paper = table({}, Row("digits-sgd", paper=60.0), sam, of_paper=True)
    assert "Training loss" not in table(methods, sgd, sam, of_paper=True).columns
    assert paper_notes(of_paper)["Paper, %"] == "Paper: the highest accuracy of all epochs."
