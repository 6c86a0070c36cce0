"""Runs that die or are stopped, and are continued: the result is that of a run that was never stopped."""

from __future__ import annotations

import json
import os
import signal
import warnings
from datetime import datetime

import pytest
from digits_runs import CPU, METHODS, SHORT, final_weights, last_checkpoint, recipe
from killed_runs import assert_same_run, finish, saved_at, start, wait_for

from cases import same
from sparsam.runs.checkpoint import load_checkpoint, save_checkpoint
from sparsam.runs.directory import RunDirectory
from sparsam.runs.files import RunError
from sparsam.training import Trainer, resume, train
from sparsam.training.launch import new_run, old_run
from sparsam.training.ranks import ReadOnlyDirectory

EVERY_STEP = ("train.checkpoint_steps=1", "train.epochs=3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the run of a method that nothing interrupts; each is trained once."""
    runs = {}

    def run(method):
        if method not in runs:
            runs[method] = tmp_path_factory.mktemp(method) / "whole"
            train(recipe(method, *EVERY_STEP), runs[method], device=CPU)
        return RunDirectory(runs[method])

    return run


# Where: after the last batch of epoch 2, whose metrics are yet to come; before batch 4 of epoch 2.
DEATHS = {"evaluate": (2, (1, 12)), "_step": (16, (1, 3))}
# Thrifty SAM is in: as "ramp", which dies while rho rises, and in the test of kill -9.
QUICK = {("ssam-f", "evaluate"), *((method, "_step") for method in METHODS if method != "thrifty")}


@pytest.mark.parametrize(
    ("method", "where"),
    [
        pytest.param(method, where, marks=[] if (method, where) in QUICK else [pytest.mark.slow])
        for method in METHODS
        for where in DEATHS
    ],
)
def test_dying_and_resuming_is_bit_exact(tmp_path, method, where, whole, monkeypatch):
    works, calls, (fatal, saved_at) = getattr(Trainer, where), [], DEATHS[where]

    def dies(*arguments):
        calls.append(1)
        if len(calls) == fatal:
            raise MemoryError
        return works(*arguments)

    monkeypatch.setattr(Trainer, where, dies)
    with pytest.raises(MemoryError):
        train(recipe(method, *EVERY_STEP), tmp_path / "died", device=CPU)
    monkeypatch.undo()
    saved = last_checkpoint(tmp_path / "died")
    assert (saved["epoch"], saved["batch"]) == saved_at
    with (tmp_path / "died" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "half a li')
    resume(tmp_path / "died", device=CPU)
    assert_same_run(whole(method), RunDirectory(tmp_path / "died"))


def start_run(method, path, *settings):
    name, own = METHODS[method]
    return start(name, "--output", path, *(part for s in (*SHORT, *own, *settings) for part in ("--set", s)))


SWEEP = [pytest.param(m, marks=() if m == "thrifty" else pytest.mark.slow) for m in METHODS]


@pytest.mark.parametrize("method", SWEEP)
def test_kill_9_in_mid_epoch_and_resume_is_bit_exact(tmp_path, method, whole):
    """In processes of their own: the run that is killed and the one that continues it."""
    run = RunDirectory(tmp_path / "killed")

    killed = start_run(method, run.path, *EVERY_STEP)
    wait_for(lambda: saved_at(run, epoch=1, batch=3))
    killed.kill()
    finish(killed, code=-signal.SIGKILL)
    assert not run.finished
    finish(start("--resume", run.path))
    assert_same_run(whole(method), run)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_signals_save_and_exit_cleanly(tmp_path, number):
    run = RunDirectory(tmp_path / "stopped")
    stopped = start_run("ssam-d", run.path, "train.epochs=8")
    wait_for((run.path / "metrics.jsonl").exists)
    stopped.send_signal(number)
    output = finish(stopped, code=1)
    assert "stopped in epoch" in output
    assert "--resume" in output
    assert "Traceback" not in output
    assert last_checkpoint(run.path)["epoch"] >= 1
    resume(run.path, device=CPU)
    assert [m["epoch"] for m in run.metrics()] == list(range(1, 9))


def test_resuming_a_finished_run_returns_its_summary(whole):
    run = whole("sgd")
    assert resume(run.path, device=CPU) == run.summary()


def test_resume_without_a_checkpoint_starts_again(tmp_path, whole):
    RunDirectory(tmp_path / "run").create(recipe("sgd", *EVERY_STEP), {})
    resume(tmp_path / "run", device=CPU)
    assert same(final_weights(tmp_path / "run"), final_weights(whole("sgd").path))
    assert [entry["steps"] for entry in RunDirectory(tmp_path / "run").read("environment.json").values["resumed"]] == [
        0
    ]


def test_resume_without_environment_json_writes_none(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create(recipe("sgd", *EVERY_STEP), {})
    (run.path / "environment.json").unlink()
    resume(run.path, device=CPU)
    assert run.finished
    assert not (run.path / "environment.json").exists()


@pytest.mark.parametrize(
    ("begun", "moved"),
    [
        ({"processes": 2}, "processes: 2 at its start, 1 now"),
        ({"device": "NVIDIA H200"}, "device: NVIDIA H200 at its start, cpu now"),
        ({"processes": 4, "device": "mps"}, "processes: 4 at its start, 1 now; device: mps at its start, cpu now"),
        ({}, None),
    ],
)
def test_a_run_that_goes_on_elsewhere_says_so_once(tmp_path, begun, moved):
    run = RunDirectory(tmp_path / "run")
    stopped = new_run(recipe("sgd", *EVERY_STEP), run.path, device=CPU)
    environment = run.read("environment.json").values
    steps = stopped.steps()
    next(steps)
    steps.close()
    (run.path / "environment.json").write_text(json.dumps({**environment, **begun}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resume(run.path, device=CPU)
    words = [str(w.message) for w in caught]
    assert words == ([f"{run.path} will not end with the numbers of an uninterrupted run: {moved}"] if moved else [])


def test_a_run_notes_each_time_it_goes_on_and_what_has_changed(tmp_path):
    run = RunDirectory(tmp_path / "run")

    def take(trainer, steps):
        taken = trainer.steps()
        for _ in range(steps):
            next(taken)
        taken.close()

    take(new_run(recipe("sgd", *EVERY_STEP), run.path, device=CPU), 14)
    begun = run.read("environment.json").values
    assert "resumed" not in begun
    take(old_run(run.path, device=CPU), 3)
    here = run.read("environment.json").values
    (entry,) = here.pop("resumed")
    assert here == begun
    assert entry.keys() == {"steps", "started"}
    assert entry["steps"] == 14
    assert datetime.fromisoformat(entry["started"]) >= datetime.fromisoformat(begun["started"])

    began_elsewhere = {**begun, "torch": "2.0", "processes": 2, "git": "0123456789ab", "resumed": [{"steps": 14}]}
    del began_elsewhere["threads"]  # as in runs of older versions, which did not write it
    (run.path / "environment.json").write_text(json.dumps(began_elsewhere))
    with pytest.warns(UserWarning, match="processes: 2 at its start, 1 now"):
        resume(run.path, device=CPU)
    first, entry = run.read("environment.json").values["resumed"]
    assert first == {"steps": 14}
    del entry["started"]
    assert entry == {"steps": 17, **{key: begun[key] for key in ("torch", "threads", "processes", "git")}}


def test_processes_that_write_nothing_note_nothing(tmp_path):
    RunDirectory(tmp_path / "run").create(recipe("sgd"), {"torch": "2.0"})
    ReadOnlyDirectory(tmp_path / "run").note_resumed(0, {"torch": "2.1"})
    assert RunDirectory(tmp_path / "run").read("environment.json").values == {"torch": "2.0"}


def test_masks_measured_before_base_steps_survive_a_death(tmp_path, monkeypatch):
    """In an epoch of 12 steps, 0, 5 and 10 read the mask; the run dies in step 11."""
    settings = ["train.epochs=1", "train.checkpoint_steps=1", "schedule=every-nth", "schedule.n=5"]
    train(recipe("ssam-d", *settings), tmp_path / "whole", device=CPU)
    step = Trainer._step

    def dies(self, x, y):
        if self.batch == 11:
            raise MemoryError
        return step(self, x, y)

    monkeypatch.setattr(Trainer, "_step", dies)
    with pytest.raises(MemoryError):
        train(recipe("ssam-d", *settings), tmp_path / "died", device=CPU)
    monkeypatch.undo()
    resume(tmp_path / "died", device=CPU)
    runs = [RunDirectory(tmp_path / name) for name in ("whole", "died")]
    assert_same_run(*runs)
    assert runs[1].metrics()[0]["perturbed"] == pytest.approx(0.5 * 3 / 12, abs=1e-4)


def test_a_run_can_move_to_a_device_that_keeps_numbers_in_tensors(tmp_path, whole):
    """As on CUDA, where a captured step reads lr and rho from tensors: loading must leave them there."""
    import torch

    trainer = Trainer(recipe("sam", *EVERY_STEP), RunDirectory(tmp_path / "run"), device=CPU)
    group = trainer.opt.param_groups[0]
    group["lr"], group["rho"], group["fused"] = torch.tensor(9.0), torch.tensor(9.0), True
    lr, rho = group["lr"], group["rho"]
    trainer.load(whole("sam").last)
    group = trainer.opt.param_groups[0]
    assert group["lr"] is lr
    assert group["rho"] is rho
    assert rho.item() == pytest.approx(0.1)
    assert 0 < lr.item() < 0.05
    assert group["fused"] is True


def test_checkpoints_are_atomic_and_need_no_pickle(tmp_path, monkeypatch):
    import torch

    last = tmp_path / "last.pt"
    save_checkpoint(last, {"model": {"w": torch.ones(1000)}})
    before = last.read_bytes()
    monkeypatch.setattr(torch, "save", lambda content, file: (file.write(b"half"), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        save_checkpoint(last, {})
    assert last.read_bytes() == before
    sentinel = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {sentinel}",)

    monkeypatch.undo()
    torch.save({"model": Evil()}, last)
    with pytest.raises(RunError, match=r"last\.pt cannot be read"):
        load_checkpoint(last, CPU)
    assert not sentinel.exists()
    last.write_bytes(before[:1000])
    with pytest.raises(RunError, match=r"last\.pt cannot be read"):
        load_checkpoint(last, CPU)
    with pytest.raises(RunError, match="there is no checkpoint at"):
        load_checkpoint(tmp_path / "none.pt", CPU)
