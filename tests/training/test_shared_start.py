"""Runs that begin with the same steps take them once, and end as they would have ended alone."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from digits_runs import CPU, SHORT, equal, final_weights, numbers

from cases import same
from sparsam.runs.checkpoint import load_checkpoint
from sparsam.runs.directory import RunDirectory
from sparsam.runs.lock import Locked
from sparsam.training import Interrupted, RecipeError, Trainer, load_recipe
from sparsam.training.comparison import compare_recipes
from sparsam.training.launch import open_run
from sparsam.training.planned import PlannedRun
from sparsam.training.progress import LogProgress
from sparsam.training.shared_start import SharedStart
from sparsam.training.turns import train_runs

ROWS = {  # 24 steps, 12 an epoch
    "third": "sam.rho = 0.2\nschedule.fraction = 0.333",
    "wider": "sam = {rho = 0.5, ramp_epochs = 0.4}\nschedule.fraction = 0.333",
    "all of it": "mask = 'dense'\nschedule.fraction = 0.5",  # from the end of the first epoch on
    "longer": "ascent = 'gradient'\nschedule.fraction = 0.8",
    "random": "mask = {name = 'random', sparsity = 0.5}\nsam.ramp_epochs = 0.25\nschedule.fraction = 0.2",
    "sam": "mask = 'dense'\nschedule = 'every-step'",
    "before": "schedule.before = {name = 'momentum', rho = 0.1}",
    "decay": "optimizer.weight_decay = 0.01\nschedule.fraction = 0.2",
}
FIRST = {"third": 16, "wider": 16, "all of it": 12, "longer": 4, "random": 19}  # the steps that they need not take


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    for name, settings in ROWS.items():
        (folder / f"{name}.toml").write_text(f'extends = "digits-thrifty"\n{settings}\n')
    return [*(folder / f"{name}.toml" for name in ROWS), "digits-sgd"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, recipes):
    output = tmp_path_factory.mktemp("alone")
    compare_recipes(recipes, 1, output, overrides=SHORT, device=CPU)
    return output


@pytest.fixture
def steps_of(monkeypatch):
    """Count the steps that each run takes itself."""
    counts, step = {}, Trainer._step

    def counting(self, x, y):
        counts[self.recipe.name] = counts.get(self.recipe.name, 0) + 1
        return step(self, x, y)

    monkeypatch.setattr(Trainer, "_step", counting)
    return counts


def assert_same_runs(output, others):
    for path in others.iterdir():
        one, other = RunDirectory(output / path.name), RunDirectory(path)
        assert numbers(one.metrics()) == numbers(other.metrics())
        assert same(final_weights(one.path), final_weights(other.path))
        assert equal(load_checkpoint(one.best, CPU), load_checkpoint(other.best, CPU))
        for key in ("test_accuracy", "best_accuracy", "best_epoch", "perturbed", "theoretical_flops", "steps"):
            assert one.summary()[key] == other.summary()[key]


@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_runs_end_as_they_would_have_alone(tmp_path, alone, recipes, steps_of, at_once):
    compare_recipes(recipes, 1, tmp_path, overrides=SHORT, device=CPU, at_once=at_once, share_start=True)
    assert_same_runs(alone, tmp_path)
    assert steps_of == {"digits-sgd": 24, **{name: 24 - FIRST.get(name, 0) for name in ROWS}}
    for name, first in FIRST.items():
        run = RunDirectory(tmp_path / f"{name}-seed0")
        own = RunDirectory(tmp_path / "digits-sgd-seed0").environment()
        assert run.environment()["start"] == {"run": "digits-sgd-seed0", "steps": first, **own}
        assert run.summary()["seconds"] is None  # another run has taken some of its time


@pytest.mark.slow
def test_the_run_with_most_base_steps_is_the_first(tmp_path, alone, recipes, steps_of):
    compare_recipes(recipes[:5], 1, tmp_path, overrides=SHORT, device=CPU, share_start=True)
    assert_same_runs(alone, tmp_path)
    assert steps_of["random"] == 24
    assert sum(steps_of.values()) == 5 * 24 - sum(FIRST.values()) + FIRST["random"]


SOME = [pytest.param(step, marks=() if step == 14 else pytest.mark.slow) for step in (3, 14, 20, 26)]


@pytest.mark.slow
@pytest.mark.parametrize("fatal", SOME)  # of all steps; the first run takes 24
def test_a_command_that_was_stopped_goes_on(tmp_path, alone, recipes, steps_of, monkeypatch, fatal):
    counting = Trainer._step

    def stops(self, x, y):
        if sum(steps_of.values()) == fatal:
            signal.raise_signal(signal.SIGTERM)
        return counting(self, x, y)

    chosen = [recipes[0], recipes[2], "digits-sgd"]
    options = {"overrides": SHORT, "device": CPU, "share_start": True}
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Trainer, "_step", stops)
        compare_recipes(chosen, 1, tmp_path, **options)
    compare_recipes(chosen, 1, tmp_path, **options)
    assert_same_runs(alone, tmp_path)
    assert steps_of == {"digits-sgd": 24, "third": 8, "all of it": 12}


def plan(tmp_path, *names, **settings):
    """Return the runs of some rows."""
    overrides = [*SHORT, *(f"train.{key}={value}" for key, value in settings.items())]
    sources = [tmp_path / name if name.endswith(".toml") else name for name in names]
    return [PlannedRun(r, tmp_path / f"{r.name}-seed0") for r in (load_recipe(s, overrides) for s in sources)]


@pytest.fixture
def rows(tmp_path, recipes):
    """Put the recipes where the runs are."""
    for path in recipes[:-1]:
        (tmp_path / path.name).write_text(path.read_text())


@pytest.mark.slow
def test_no_run_waits_for_one_that_is_past_its_step(tmp_path, alone, rows, steps_of, monkeypatch):
    counting, order = Trainer._step, []

    def stops(self, x, y):
        order.append(self.recipe.name)
        if len(order) == 20:
            signal.raise_signal(signal.SIGTERM)
        return counting(self, x, y)

    monkeypatch.setattr(Trainer, "_step", stops)
    planned = plan(tmp_path, "digits-sgd", "third.toml", "wider.toml")
    with pytest.raises(Interrupted):
        train_runs(planned[:1], device=CPU)
    train_runs(planned, device=CPU, at_once=2, share_start=True)
    assert steps_of == {"digits-sgd": 24, "third": 24, "wider": 8}  # those that come too late share with each other
    assert order.index("third") < 22  # beside it, not after it
    for name in ("third-seed0", "wider-seed0"):
        assert same(final_weights(tmp_path / name), final_weights(alone / name))


def test_runs_do_not_wait_for_one_that_fails(tmp_path, alone, rows, steps_of, monkeypatch):
    counting = Trainer._step

    def fails(self, x, y):
        if self.recipe.name == "digits-sgd" and steps_of.get("digits-sgd") == 6:
            raise RecipeError("something is wrong")
        return counting(self, x, y)

    monkeypatch.setattr(Trainer, "_step", fails)
    planned = plan(tmp_path, "third.toml", "digits-sgd")
    failed = train_runs(planned, device=CPU, keep_going=True, share_start=True)
    assert failed == ["digits-sgd, seed 0: something is wrong"]
    assert same(final_weights(tmp_path / "third-seed0"), final_weights(alone / "third-seed0"))


LOCKING = """
import sys
from sparsam.runs.directory import RunDirectory
RunDirectory(sys.argv[1]).lock()
print("locked", flush=True)
input()
"""


@contextmanager
def another_process_trains(path):
    source = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    process = subprocess.Popen(
        [sys.executable, "-c", LOCKING, str(path)], env=source, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "locked\n"
        yield
        process.communicate("\n")


@pytest.mark.slow
def test_a_run_that_another_process_trains_is_left_to_it(tmp_path, rows, steps_of):
    planned = plan(tmp_path, "third.toml", "digits-sgd")
    with another_process_trains(tmp_path / "third-seed0"):
        failed = train_runs(planned, device=CPU, keep_going=True, share_start=True)
    assert RunDirectory(tmp_path / "digits-sgd-seed0").finished
    assert failed == [
        f"third, seed 0: {tmp_path / 'third-seed0'} is being trained by another process; wait for it or stop it"
    ]
    assert steps_of == {"digits-sgd": 24}


@pytest.mark.slow
def test_no_run_is_trained_alone_while_another_process_takes_its_first_steps(tmp_path, rows, steps_of):
    first = tmp_path / "digits-sgd-seed0"
    with another_process_trains(first):
        failed = train_runs(plan(tmp_path, "third.toml", "digits-sgd"), device=CPU, keep_going=True, share_start=True)
    assert failed == [
        f"digits-sgd, seed 0: {first} is being trained by another process; wait for it or stop it",
        f"third, seed 0: another run takes its first steps: {first} is being trained by another process; wait for it "
        f"or stop it",
    ]
    assert steps_of == {}


def test_a_run_that_cannot_be_built_leaves_nothing(tmp_path, alone, rows):
    row = tmp_path / "third.toml"
    row.write_text(row.read_text() + "mask.cut = 'layr3'\n")  # which the commands refuse before, but not this function
    for mended in (False, True):
        failed = train_runs(
            plan(tmp_path, "third.toml", "digits-sgd"), device=CPU, keep_going=True, share_start=not mended
        )
        assert len(failed) == (0 if mended else 1)
        assert (tmp_path / "third-seed0").exists() == mended
        row.write_text(row.read_text().replace("layr3", "layer3"))
    assert same(final_weights(tmp_path / "third-seed0"), final_weights(alone / "third-seed0"))


def test_what_a_user_put_into_the_folder_of_a_run_stays(tmp_path, rows):
    row, notes = tmp_path / "third.toml", tmp_path / "third-seed0" / "notes" / "mine.txt"
    row.write_text(row.read_text() + "mask.cut = 'layr3'\n")
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    assert train_runs(plan(tmp_path, "third.toml", "digits-sgd"), device=CPU, keep_going=True, share_start=True)
    assert [path for path in (tmp_path / "third-seed0").rglob("*") if path.is_file()] == [notes]


@pytest.mark.slow
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, Locked])
def test_an_error_that_passes_leaves_the_start(tmp_path, alone, rows, steps_of, monkeypatch, error):
    def opens(recipe, *arguments, **options):
        if recipe.name == "third":
            raise error("this time")
        return open_run(recipe, *arguments, **options)

    planned = plan(tmp_path, "third.toml", "digits-sgd")
    with monkeypatch.context() as patch, pytest.raises((torch.OutOfMemoryError, RecipeError), match="this time"):
        patch.setattr("sparsam.training.turns.open_run", opens)
        train_runs(planned, device=CPU, share_start=True)
    train_runs(planned, device=CPU, share_start=True)
    assert steps_of == {"digits-sgd": 24, "third": 8}
    assert same(final_weights(tmp_path / "third-seed0"), final_weights(alone / "third-seed0"))


def test_a_schedule_that_cannot_be_built_fails_in_its_own_turn(tmp_path, rows, steps_of):
    row = tmp_path / "wider.toml"
    row.write_text(row.read_text().replace("0.333", "1e-9"))
    planned = plan(tmp_path, "wider.toml", "third.toml", "digits-sgd")
    failed = train_runs(planned, device=CPU, keep_going=True, share_start=True)
    reason = "schedule.fraction must be that of at least one of total_steps=24 steps, but is 1e-09"
    assert failed == [f"wider, seed 0: {reason}"]
    assert steps_of == {"digits-sgd": 24, "third": 8}
    assert not list(tmp_path.rglob(".lock"))


def test_trouble_in_the_folder_of_another_run_is_its_own(tmp_path, rows, steps_of):
    planned, lines = plan(tmp_path, "third.toml", "wider.toml", "digits-sgd"), io.StringIO()
    planned[0].path.write_text("a file")
    failed = train_runs(planned, device=CPU, keep_going=True, share_start=True, progress=lambda: LogProgress(lines))
    (error,) = failed
    assert error.startswith(f"third, seed 0: {planned[0].path} cannot be written: ")
    assert steps_of == {"digits-sgd": 24, "wider": 8}
    assert "third-seed0 has no shared start: " in lines.getvalue()


def test_a_start_that_cannot_be_written_is_trained_by_its_own_run(tmp_path, alone, rows, steps_of, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sparsam.training.shared_start.save_checkpoint", full)
    train_runs(plan(tmp_path, "third.toml", "digits-sgd"), device=CPU, share_start=True)
    assert steps_of == {"digits-sgd": 24, "third": 24}
    assert same(final_weights(tmp_path / "third-seed0"), final_weights(alone / "third-seed0"))


def test_no_run_goes_on_from_steps_that_are_not_base_steps(tmp_path, rows, steps_of):
    """Their fractions are too close to tell in 10,000 steps who takes more base steps."""
    for name, fraction in (("third", 0.33334), ("wider", 0.33331)):  # 15 and 16 of 24 steps
        row = tmp_path / f"{name}.toml"
        row.write_text(row.read_text().replace("0.333", str(fraction)))
    planned = plan(tmp_path, "third.toml", "wider.toml")
    train_runs(planned, device=CPU, share_start=True)
    assert steps_of == {"third": 24, "wider": 24}


def test_the_environment_tells_who_took_the_first_steps_with_what(tmp_path, rows, steps_of, monkeypatch):
    planned, counting = plan(tmp_path, "third.toml", "digits-sgd"), Trainer._step

    def stops(self, x, y):
        if steps_of.get("digits-sgd") == 9:
            signal.raise_signal(signal.SIGTERM)
        return counting(self, x, y)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Trainer, "_step", stops)
        train_runs(planned, device=CPU, share_start=True)
    file = tmp_path / "digits-sgd-seed0" / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "git": "0123456789ab+", "torch": "2.0"}))
    train_runs(planned, device=CPU, share_start=True)
    environment = RunDirectory(tmp_path / "third-seed0").environment()
    assert environment["torch"] == torch.__version__
    start = environment["start"]
    assert [start[key] for key in ("run", "steps", "git", "torch")] == ["digits-sgd-seed0", 16, "0123456789ab+", "2.0"]
    assert [(entry["steps"], entry["torch"]) for entry in start["resumed"]] == [(10, torch.__version__)]


def test_to_leave_a_start_the_first_run_does_not_save_itself(tmp_path, rows, monkeypatch):
    saved, save = [], Trainer.save

    def saving(self, path):
        saved.append((self.recipe.name, self.steps_taken))
        save(self, path)

    monkeypatch.setattr(Trainer, "save", saving)
    planned = plan(tmp_path, "third.toml", "digits-sgd", checkpoint_epochs="none")
    train_runs(planned, device=CPU, share_start=True)
    assert saved == [("digits-sgd", 24), ("third", 24)]


def test_dying_while_a_start_is_left_leaves_no_epochs_behind(tmp_path, alone, rows, monkeypatch):
    def dies(self, recipe, environment):
        if "start" in environment:
            raise MemoryError
        return create(self, recipe, environment)

    create, planned = RunDirectory.create, plan(tmp_path, "third.toml", "digits-sgd")
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(RunDirectory, "create", dies)
        train_runs(planned, device=CPU, share_start=True)
    train_runs(planned[:1], device=CPU)
    one, other = RunDirectory(tmp_path / "third-seed0"), RunDirectory(alone / "third-seed0")
    assert numbers(one.metrics()) == numbers(other.metrics())


def test_with_a_gradient_scaler_nothing_is_shared(tmp_path, rows):
    """It leaves out steps, and SAM's schedule counts those that are taken."""
    start = SharedStart(plan(tmp_path, "random.toml", "digits-sgd", precision="fp16"))
    assert all(start.is_ready(run) for run in plan(tmp_path, "random.toml", "digits-sgd", precision="fp16"))
    assert not SharedStart(plan(tmp_path, "random.toml", "digits-sgd")).is_ready(plan(tmp_path, "random.toml")[0])
