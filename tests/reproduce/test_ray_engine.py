"""Runs as Ray tasks on a cluster of this machine: a worker that is killed neither loses nor repeats an epoch."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch
from commands import sparsam
from digits_runs import numbers

from sparsam.errors import MissingPackageError
from sparsam.reproduce.experiments import Experiment, Row
from sparsam.reproduce.plan import plan_runs
from sparsam.reproduce.progress import RunsProgress
from sparsam.reproduce.ray_engine import check_address, train_with_ray
from sparsam.runs.directory import RunDirectory
from sparsam.training.turns import train_runs

EPOCHS = 30


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    planned = plan_runs([Experiment("t", "t", (Row("digits-sgd"),))], 1, tmp_path)
    with pytest.raises(MissingPackageError, match=r"need the package ray: pip install 'sparsam\[ray\]'"):
        train_with_ray(planned)


def test_an_address_where_nothing_answers_is_refused_at_once():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        port = closed.getsockname()[1]
        with pytest.raises(ValueError, match=rf"but 127.0.0.1:{port} does not answer .*`ray start --head` prints"):
            check_address(f"127.0.0.1:{port}")
        closed.listen()
        check_address(f"ray://127.0.0.1:{port}")
    check_address("auto")


def test_each_epoch_that_is_seen_and_each_finished_run_has_a_line_in_a_log(tmp_path, capsys):
    planned = plan_runs([Experiment("t", "t", (Row("digits-sgd"),))], 2, tmp_path)
    first, second = (RunDirectory(run.path) for run in planned)
    with RunsProgress(planned) as progress:
        progress.look()
        first.create(planned[0].recipe, {})
        progress.look()
        assert not capsys.readouterr().err  # no epoch has ended
        first.add_metrics({"epoch": 1, "test_accuracy": 0.5})
        second.create(planned[1].recipe, {})
        second.add_metrics({"epoch": 1, "test_accuracy": 0.25})
        for _ in range(2):
            progress.look()
        assert capsys.readouterr().err == (
            "digits-sgd-seed0: epoch 1 of 15, 50.00 %\ndigits-sgd-seed1: epoch 1 of 15, 25.00 %\n"
        )
        for epoch in (2, 3):
            first.add_metrics({"epoch": epoch, "test_accuracy": epoch / 4})
        first.write_summary({"test_accuracy": 0.75})
        for _ in range(2):
            progress.look()
        assert capsys.readouterr().err == "digits-sgd-seed0: epoch 3 of 15, 75.00 %\ndigits-sgd-seed0: 75.00 %\n"


def workers(run: Path) -> list[int]:
    """Return the processes that hold a run's lock."""
    found = []
    for process in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if process.readlink() == run / ".lock":
                found.append(int(process.parts[2]))
        except OSError:
            continue  # it has ended, or has closed the file
    return found


@pytest.mark.slow
def test_a_killed_worker_loses_and_repeats_nothing(tmp_path):
    pytest.importorskip("ray", reason="needs the extra [ray]")
    rows = (Row("digits-sgd"), Row("digits-ssam-d"))
    changes = [f"train.epochs={EPOCHS}", "train.deterministic=true", "train.threads=1"]
    planned = plan_runs([Experiment("t", "t", rows)], 1, tmp_path / "ray", changes)
    victim = planned[1].path

    class Killer:
        """Kills the worker of a run after its second epoch, in place of a progress bar."""

        killed: list[int] = []  # noqa: RUF012

        def __init__(self, runs: object) -> None: ...

        def __enter__(self):
            return self

        def __exit__(self, *error: object) -> None: ...

        def look(self) -> None:
            if not self.killed and RunDirectory(victim).exists and len(RunDirectory(victim).metrics()) >= 2:
                for process in workers(victim):
                    os.kill(process, signal.SIGKILL)
                    self.killed.append(process)

    device = torch.device("cpu")
    assert train_with_ray(planned, device="cpu", progress=Killer) == []
    assert Killer.killed
    alone = plan_runs([Experiment("t", "t", rows)], 1, tmp_path / "alone", changes)
    train_runs(alone, device=device)
    for one, other in zip(planned, alone, strict=True):
        assert numbers(RunDirectory(one.path).metrics()) == numbers(RunDirectory(other.path).metrics())
        assert [m["epoch"] for m in RunDirectory(one.path).metrics()] == list(range(1, EPOCHS + 1))


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_the_others_are_trained(tmp_path):
    pytest.importorskip("ray", reason="needs the extra [ray]")
    file = tmp_path / "own.toml"
    file.write_text("[t]\nrows = [{ recipe = 'digits-sgd' }, { recipe = 'cifar10-resnet18-sgd' }]\n")
    done = sparsam(
        "reproduce", file, "--engine", "ray", "--epochs", 1, "-o", tmp_path / "runs", "--device", "cpu", code=1
    )
    assert (
        "1 of 2 runs failed; the same command goes on with them\ncifar10-resnet18-sgd-epochs1, seed 0:" in done.stderr
    )
    assert "data" in done.stderr
    assert RunDirectory(tmp_path / "runs" / "digits-sgd-epochs1-seed0").finished
    shared = ("--engine", "ray", "--at-once", 2, "--epochs", 1, "-o", tmp_path / "other", "--device", "cpu")
    done = sparsam("reproduce", file, *shared, code=1)
    assert "--at-once is for runs that share a GPU, but is 2 on CPUs; leave it out" in done.stderr
