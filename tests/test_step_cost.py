"""What a step takes: the ratio in each round, of steps that leave no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from replay_models import CASES, closure_of, differences, snapshot

from sparsam import SAM, FriendlyAscent, LastSteps, StepRatio, SuffixMask, measure_cost
from sparsam.replay.clock import Clock
from sparsam.step_cost import WARM_UP

BASE = {"lr": 0.05, "momentum": 0.9}


class Script(Clock):
    """A clock by which works take what is given, one after the other; it notes what they call."""

    def __init__(self, seconds: list[float], calls: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self.seconds, self.calls, self.called = iter(seconds), calls, []

    def time(self, work) -> float:
        self.calls.clear()
        work()
        self.called.append(len(self.calls))
        return next(self.seconds)


def build(name="vgg", steps=10):
    """A SAM of which the last fifth of the steps are sharpness-aware."""
    model, batch = CASES[name].model(), CASES[name].batch()
    opt = SAM(
        model.parameters(),
        torch.optim.SGD,
        mask=SuffixMask(model, [*CASES[name].cuts][-1]),
        ascent=FriendlyAscent(),
        schedule=LastSteps(0.2, steps),
        **BASE,
    )
    calls: list[str] = []
    passes = closure_of(model, opt.zero_grad, batch)

    def closure():
        calls.append("closure")
        return passes()

    return model, opt, closure, calls


def test_the_ratio_of_each_round_counts_and_base_steps_are_plain_ones():
    model, opt, closure, calls = build()
    rounds = [(1.0, 1.5), (2.0, 2.8), (10.0, 16.0), (1.0, 9.0)]  # ratios 1.5, 1.4, 1.6, 9
    clock = Script([99.0] * 2 * WARM_UP + [seconds for pair in rounds for seconds in pair], calls)
    cost = measure_cost(model, closure, opt, rounds=4, clock=clock)
    assert cost == StepRatio(median=pytest.approx(1.55), low=pytest.approx(1.475), high=pytest.approx(3.45), rounds=4)
    assert clock.called == [1, 3, 1, 3, 1, 2] + [1, 2] * 4  # the first two on a path prove it


@pytest.mark.parametrize("steps_before", [0, 3, 9])
def test_nothing_moves(steps_before):
    """A run that was measured goes on as one that was not, before and after the switch."""
    runs = [build() for _ in range(2)]
    for _ in range(steps_before):
        for _, opt, closure, _ in runs:
            torch.manual_seed(1)
            opt.step(closure)
    (model, opt, closure, _), (twin, *_) = runs
    torch.manual_seed(5)
    before, state = snapshot(model), copy.deepcopy(opt.state_dict())
    cost = measure_cost(model, closure, opt, rounds=2)
    assert cost.rounds == 2
    assert 0 < cost.low <= cost.median <= cost.high
    assert [key for key in differences(before, snapshot(model)) if "gradient" not in key] == []
    assert all(p.grad is None for p in model.parameters())
    assert str(opt.state_dict()) == str(state)
    for _ in range(10 - steps_before):
        for _, opt, closure, _ in runs:
            torch.manual_seed(2)
            opt.step(closure)
    assert differences(snapshot(model), snapshot(twin)) == []


def test_nothing_moves_if_the_closure_fails():
    model, opt, closure, calls = build()

    def fails():
        if len(calls) == 8:
            raise RuntimeError("no more")
        return closure()

    before = snapshot(model)
    with pytest.raises(RuntimeError, match="no more"):
        measure_cost(model, fails, opt)
    assert [key for key in differences(before, snapshot(model)) if "gradient" not in key] == []
    assert opt.steps == 0
    assert not opt.needs_second_pass  # its schedule is back


def test_refused():
    model, opt, closure, _ = build()
    with pytest.raises(TypeError, match="opt must be a SAM, but is a SGD"):
        measure_cost(model, closure, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="model must be a module, but is a generator"):
        measure_cost(model.parameters(), closure, opt)
    with pytest.raises(ValueError, match="rounds must be a whole number >= 1, but is 0"):
        measure_cost(model, closure, opt, rounds=0)
