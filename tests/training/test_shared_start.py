"""Runs that begin with the same steps take them once, and end as they would have ended alone."""

from __future__ import annotations

import signal

import pytest
from digits_runs import CPU, SHORT, final_weights, numbers

from cases import same
from sparsam.runs.directory import RunDirectory
from sparsam.training import Interrupted, RecipeError, Trainer
from sparsam.training.comparison import compare_recipes

ROWS = {  # 24 steps, 12 an epoch
    "third": "sam.rho = 0.2\nschedule.fraction = 0.333",
    "wider": "sam.rho = 0.5\nschedule.fraction = 0.333",
    "all of it": "mask = 'dense'\nschedule.fraction = 0.5",  # from the end of the first epoch on
    "longer": "ascent = 'gradient'\nschedule.fraction = 0.8",
    "random": "mask = {name = 'random', sparsity = 0.5}\nschedule.fraction = 0.2",
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
        for key in ("test_accuracy", "best_accuracy", "best_epoch", "perturbed", "theoretical_flops", "steps"):
            assert one.summary()[key] == other.summary()[key]


@pytest.mark.parametrize("at_once", [1, 3])
def test_runs_end_as_they_would_have_alone(tmp_path, alone, recipes, steps_of, at_once):
    compare_recipes(recipes, 1, tmp_path, overrides=SHORT, device=CPU, at_once=at_once, share_start=True)
    assert_same_runs(alone, tmp_path)
    assert steps_of == {"digits-sgd": 24, **{name: 24 - FIRST.get(name, 0) for name in ROWS}}
    for name, first in FIRST.items():
        run = RunDirectory(tmp_path / f"{name}-seed0")
        assert run.read("environment.json").values["start"] == {"run": "digits-sgd-seed0", "steps": first}
        assert run.summary()["seconds"] is None  # another run has taken some of its time


def test_the_run_with_most_base_steps_is_the_first(tmp_path, alone, recipes, steps_of):
    compare_recipes(recipes[:5], 1, tmp_path, overrides=SHORT, device=CPU, share_start=True)
    assert_same_runs(alone, tmp_path)
    assert steps_of["random"] == 24
    assert sum(steps_of.values()) == 5 * 24 - sum(FIRST.values()) + FIRST["random"]


SOME = [pytest.param(step, marks=() if step == 14 else pytest.mark.slow) for step in (3, 14, 20, 26)]


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


def test_runs_do_not_wait_for_one_that_is_past_their_step_or_fails(tmp_path, alone, recipes, steps_of, monkeypatch):
    options = {"overrides": SHORT, "device": CPU}
    compare_recipes(["digits-sgd"], 1, tmp_path / "past", **options)
    compare_recipes([recipes[0], "digits-sgd"], 1, tmp_path / "past", **options, share_start=True)
    assert steps_of == {"digits-sgd": 24, "third": 24}
    counting = Trainer._step

    def fails(self, x, y):
        if self.recipe.name == "digits-sgd" and steps_of.get("digits-sgd") == 30:
            raise RecipeError("something is wrong")
        return counting(self, x, y)

    monkeypatch.setattr(Trainer, "_step", fails)
    with pytest.raises(RecipeError, match=r"^digits-sgd, seed 0: something is wrong$"):
        compare_recipes([recipes[0], "digits-sgd"], 1, tmp_path / "fails", **options, share_start=True)
    assert [path.name for path in (tmp_path / "fails").iterdir()] == ["digits-sgd-seed0"]
