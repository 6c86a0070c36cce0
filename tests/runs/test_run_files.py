"""Files of runs: written whole or not at all, read with errors that name the file."""

from __future__ import annotations

import json
import math
import resource
from contextlib import contextmanager

import pytest
import torch
from report_runs import EPOCHS, make_run

from sparsam.errors import UserError
from sparsam.runs.checkpoint import save_checkpoint
from sparsam.runs.directory import RunDirectory
from sparsam.runs.files import RunError, read_text, replace_file
from sparsam.runs.record import Record
from sparsam.runs.results import check_shared, outdated, read_result, result_files, write_result
from sparsam.runs.run import read_run


@pytest.mark.parametrize("content", ["new, ε", lambda file: file.write("new, ε".encode())], ids=["text", "function"])
def test_a_file_is_replaced_and_its_folder_created(tmp_path, content):
    path = tmp_path / "some" / "folder" / "file.json"
    for _ in range(2):
        replace_file(path, content)
        assert path.read_text(encoding="utf-8") == "new, ε"
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.json"
    replace_file(path, "old")

    def fails(file):
        file.write(b"half of the n")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replace_file(path, fails)
    assert path.read_text() == "old"


@contextmanager
def full_disk():
    """No file can grow beyond 100,000 bytes."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@pytest.mark.parametrize("write", [replace_file, save_checkpoint], ids=["text", "checkpoint"])
def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path, write):
    path = tmp_path / "file"
    path.write_text("old")
    content = {replace_file: "x" * 1_000_000, save_checkpoint: {"model": torch.zeros(1_000_000)}}[write]
    with full_disk(), pytest.raises(RunError, match=rf"^{path} cannot be written: .*File too large"):
        write(path, content)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named_and_leaves_earlier_epochs(tmp_path):
    run = RunDirectory(make_run(tmp_path, epochs=2, finished=False))
    before, path = run.metrics(), run.path / "metrics.jsonl"
    with full_disk(), pytest.raises(RunError, match=rf"^{path} cannot be written: .*File too large"):
        run.add_metrics({**before[1], "epoch": 3, "mask_density": {f"block{i}": 0.5 for i in range(10_000)}})
    assert path.stat().st_size == 100_000  # the half of a line
    assert run.metrics() == before
    run.keep_epochs(2)  # as a resumed run does
    run.add_metrics({**before[1], "epoch": 3})
    assert run.metrics() == [*before, {**before[1], "epoch": 3}]


def test_what_cannot_be_read(tmp_path):
    assert issubclass(RunError, UserError)
    with pytest.raises(RunError, match=rf"^{tmp_path} has no recipe\.json$"):
        read_text(tmp_path / "recipe.json")
    with pytest.raises(RunError, match=rf"^{tmp_path} cannot be read: "):
        read_text(tmp_path)
    with pytest.raises(RunError, match=rf"^{tmp_path} is not a run directory: it has no recipe\.json$"):
        RunDirectory(tmp_path).recipe()


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda r: r.get("train.epochs"), "file has no 'train.epochs'"),
        (lambda r: r.text("empty"), "file: empty must be a text, but is ''"),
        (lambda r: r.flag("one"), "file: one must be true or false, but is 1"),
        (lambda r: r.whole("half"), "file: half must be a whole number, but is 0.5"),
        (lambda r: r.number("endless"), "file: endless must be a number, but is inf"),
        (lambda r: r.numbers("mixed"), r"file: mixed must be a list of numbers, but is \[1, 'a'\]"),
        (lambda r: r.time("one"), "file: one must be a text, but is 1"),
    ],
)
def test_a_record_names_its_file_and_the_key(read, message):
    record = Record("file", {"empty": "", "one": 1, "half": 0.5, "endless": math.inf, "mixed": [1, "a"], "none": None})
    assert (record.number("half"), record.optional("none"), record.optional("train")) == (0.5, None, None)
    with pytest.raises(RunError, match=f"^{message}$"):
        read(record)


def test_epochs_are_read_in_one_way(tmp_path):
    run = make_run(tmp_path, finished=False)
    directory, file = RunDirectory(run), run / "metrics.jsonl"
    assert [m["epoch"] for m in directory.metrics()] == [epoch.epoch for epoch in read_run(run).metrics]
    file.write_text(file.read_text()[:-9])  # a line that is being written
    assert len(directory.metrics()) == len(read_run(run).metrics) == EPOCHS - 1
    directory.keep_epochs(3)
    assert len(directory.metrics()) == len(read_run(run).metrics) == 3
    file.write_text("{}\n[]\n")
    with pytest.raises(RunError, match=rf"^{file}, line 2 must hold a JSON object, but holds \[\]$"):
        directory.metrics()


def test_a_result_says_when_it_was_computed(tmp_path):
    run = make_run(tmp_path, finished=False)
    path = write_result(run, "sharpness", {"rho": 0.1, "worst_case": math.inf, "list": (1.0, math.nan)})
    assert result_files(run) == [path]
    found = read_result(run, "sharpness")
    assert found.pop("versions").keys() == {"sparsam", "torch"}
    assert found == {"rho": 0.1, "worst_case": None, "list": [1.0, None], "epochs": EPOCHS}
    assert outdated(run, found) == ""
    RunDirectory(run).keep_epochs(5)
    assert outdated(run, found) == f"{run} was measured after epoch 12, but has 5 epochs now: measure it again"
    with pytest.raises(RunError, match=r"^there is no .*hessian\.json; compute it with: sparsam hessian "):
        read_result(run, "hessian")
    path.write_text("{")
    with pytest.raises(RunError, match=r"sharpness\.json is not valid JSON: "):
        read_result(run, "sharpness")


def test_results_compare_if_the_same_was_asked_for(tmp_path):
    runs = [tmp_path / "a", tmp_path / "b"]
    check_shared(runs, [{"samples": 40, "samples_asked": 50}, {"samples": 50}], ["samples"])
    message = "runs must have the same settings to be compared, but rho is 0.1 for .*a and 0.2 for .*b$"
    with pytest.raises(UserError, match=message):
        check_shared(runs, [{"rho": 0.1}, {"rho": 0.2}], ["samples", "rho"])


@pytest.mark.parametrize(
    ("environment", "commits"),
    [
        ({"git": "own"}, ["own"]),
        ({}, [None]),
        ({"git": "own", "start": {"run": "x", "steps": 5}}, ["own"]),  # not noted
        ({"git": "own", "start": {"run": "x", "git": "own"}}, ["own"]),
        ({"git": "own", "start": {"run": "x", "git": "first"}}, ["first", "own"]),
        ({"git": "own", "start": {"git": "second", "start": {"git": "first"}}}, ["first", "second", "own"]),
        ({"git": "own", "resumed": [{"steps": 3}, {"steps": 4, "git": "late+"}]}, ["own", "late+"]),
    ],
)
def test_all_commits_that_steps_were_taken_with(tmp_path, environment, commits):
    assert read_run(make_run(tmp_path, environment=environment)).commits == commits


def test_a_recipe_of_another_version_has_a_name(tmp_path):
    run = make_run(tmp_path, "sam", finished=False)
    assert read_run(run).method == "SAM"
    recipe = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps(recipe | {"unknown": 1}))
    assert read_run(run).method == "sam"
