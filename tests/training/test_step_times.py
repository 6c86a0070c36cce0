"""Step times in turn, with a clock that counts passes: what a step costs is then known."""

from __future__ import annotations

import itertools

import pytest
import torch
from digits_runs import CPU

from sparsam.errors import UserError
from sparsam.fisher import diagonal_fisher
from sparsam.runs.directory import RunDirectory
from sparsam.runs.recipe import load_recipe
from sparsam.step_cost import Clock, StepRatio
from sparsam.training.comparison import compare_recipes
from sparsam.training.environment import git_commit
from sparsam.training.step_times import WARM_UP, Part, step_ratios


class Told(Clock):
    """A clock that is told the time."""

    def __init__(self, now):
        super().__init__(CPU)
        self.now = now


class PassClock(Clock):
    """Each backward pass takes a second, and each Fisher information four."""

    def __init__(self, monkeypatch):
        super().__init__(CPU)
        self.seconds = 0.0
        backward = torch.Tensor.backward

        def counted(*arguments, **options):
            self.seconds += 1
            return backward(*arguments, **options)

        def fisher(*arguments, **options):
            before = self.seconds
            try:
                return diagonal_fisher(*arguments, **options)
            finally:
                self.seconds = before + 4

        monkeypatch.setattr(torch.Tensor, "backward", counted)
        monkeypatch.setattr("sparsam.masks.fisher.diagonal_fisher", fisher)

    def now(self):
        return self.seconds


# In base steps of one pass. An epoch has 12 steps, and a run 24.
COSTS = {
    "sgd": ("digits-sgd", [], 1),
    "sam": ("digits-sam", [], 2),
    "momentum": ("digits-sam", ["ascent=momentum"], 1),
    "every-nth": ("digits-sam", ["schedule=every-nth", "schedule.n=3"], 1 + 1 / 3),
    "last-steps": ("digits-sam", ["schedule=last-steps", "schedule.fraction=0.25"], 1.25),
    "before": ("digits-sam", ["schedule=last-steps", "schedule.fraction=0.25", "schedule.before=momentum"], 1.25),
    "fisher": ("digits-ssam-f", [], 2 + 4 / 12),  # a new mask in one of 12 steps
    "fixed": ("digits-ssam-f", ["mask.interval_epochs=none"], 2),
    "rarely": ("digits-ssam-f", ["schedule=every-nth", "schedule.n=2"], 0.5 + 0.5 * (2 + 4 / 12)),
    "inner": ("digits-sam", ["mask=suffix", "mask.cut=layer3", "mask.inner=fisher", "mask.inner.interval_epochs=2"], 2 + 4 / 24),
}  # fmt: skip


@pytest.mark.slow
def test_each_sort_of_step_counts_as_often_as_it_comes(monkeypatch):
    recipes = [load_recipe(name, ["train.epochs=2", *settings]) for name, settings, _ in COSTS.values()]
    found = step_ratios(recipes, device=CPU, rounds=2, clock=PassClock(monkeypatch))
    ratios = dict(zip(COSTS, found, strict=True))
    for name, (_, _, cost) in COSTS.items():
        ratio = ratios[name]
        assert (ratio.median, ratio.low, ratio.high) == pytest.approx((cost, cost, cost)), name


def test_methods_take_turns_and_are_compared_within_a_round(monkeypatch):
    """A machine that becomes three times slower from round to round changes nothing."""
    taken, seconds = [], [0.0]

    def part(fraction, recipe, loader, batch, ascent=None, mask=None):
        name, passes = ("base", 1) if mask is None else ("sam", 2)

        def take():
            seconds[0] += passes * 3.0 ** (len(taken) // 2)
            taken.append(name)

        return Part(fraction, take)

    monkeypatch.setattr("sparsam.training.step_times._part", part)
    recipe = load_recipe("digits-sam", ["train.epochs=1"])
    (ratio,) = step_ratios([recipe], device=CPU, rounds=5, clock=Told(lambda: seconds[0]))
    assert ratio == StepRatio(2.0, 2.0, 2.0, 5)
    assert taken == ["base"] * WARM_UP + ["sam"] * WARM_UP + ["base", "sam"] * 5


@pytest.mark.parametrize("setting", ["threads=2", "cuda_graph=false", "deterministic=true"])
def test_what_computes_in_another_way_has_base_steps_of_its_own(monkeypatch, setting):
    bases = []

    def part(fraction, recipe, loader, batch, ascent=None, mask=None):
        bases.extend([recipe] if mask is None else [])
        return Part(fraction, lambda: None)

    monkeypatch.setattr("sparsam.training.step_times._part", part)
    recipes = [load_recipe("digits-sam", ["train.max_steps=1", *more]) for more in ([], [], [f"train.{setting}"])]
    ticks = itertools.count(1)
    threads = torch.get_num_threads()
    try:
        step_ratios(recipes, device=CPU, rounds=1, clock=Told(lambda: float(next(ticks))))
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    assert bases == [recipes[0], recipes[2]]


def test_too_little_memory_for_all_methods_is_said(tmp_path, monkeypatch):
    def time(*arguments, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("sparsam.training.turns.step_ratios", time)
    with pytest.raises(UserError, match=r"all runs are finished, but .* name fewer, or leave it out"):
        compare_recipes(["digits-sgd"], 1, tmp_path, overrides=["train.max_steps=1"], device=CPU, rounds=1)
    assert RunDirectory(tmp_path / "digits-sgd-seed0").finished


def test_a_comparison_keeps_the_ratios_of_all_methods_in_the_summaries(tmp_path, monkeypatch):
    timed = []

    def time(recipes, *, device, rounds):
        timed.append([recipe.name for recipe in recipes])
        return [StepRatio(1.0 + i, 1.0, 3.0, rounds) for i in range(len(recipes))]

    monkeypatch.setattr("sparsam.training.turns.step_ratios", time)
    options = {"overrides": ["train.max_steps=1"], "device": CPU, "rounds": 7}
    for _ in range(2):  # the second time all is known
        runs = compare_recipes(["digits-sgd", "digits-sam"], 2, tmp_path, **options)
    assert timed == [["digits-sgd", "digits-sam"]]
    ratios = [RunDirectory(run).summary()["step_ratio"] for run in runs]
    assert [ratio["median"] for ratio in ratios] == [1.0, 1.0, 2.0, 2.0]
    assert ratios[0] == {"median": 1.0, "low": 1.0, "high": 3.0, "rounds": 7}
    about = {"device": "cpu", "torch": torch.__version__, "git": git_commit()}
    assert [RunDirectory(run).summary()["measured"] for run in runs] == [{"step_ratio": about}] * 4
