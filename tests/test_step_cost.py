"""What a step takes: the ratio in each round, of steps that leave no trace."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from replay_models import CASES, closure_of, differences, snapshot

from sparsam import SAM, FriendlyAscent, LastSteps, StepRatio, SuffixMask, measure_cost, thrifty
from sparsam.step_cost import WARM_UP, Clock

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


def test_quartiles():
    assert StepRatio.of([1.5]) == StepRatio(1.5, 1.5, 1.5, 1)
    assert StepRatio.of([1.0, 2.0, 3.0, 4.0, 100.0]) == StepRatio(3.0, 2.0, 4.0, 5)


def test_the_ratio_of_each_round_counts_and_base_steps_are_plain_ones():
    model, opt, closure, calls = build()
    rounds = [(1.0, 1.5), (2.0, 2.8), (10.0, 16.0), (1.0, 9.0)]  # ratios 1.5, 1.4, 1.6, 9
    clock = Script([99.0] * 2 * WARM_UP + [seconds for pair in rounds for seconds in pair], calls)
    cost = measure_cost(model, closure, opt, rounds=4, clock=clock)
    assert cost == StepRatio(median=pytest.approx(1.55), low=pytest.approx(1.475), high=pytest.approx(3.45), rounds=4)
    assert clock.called == [1, 3, 1, 3, 1, 2] + [1, 2] * 4  # the first two on a path prove it


@pytest.mark.parametrize(("seconds", "argument"), [(1.618, "1.62"), (0.98, "1.00")])
def test_printed_the_cost_of_a_thrifty_optimizer_names_the_argument_that_spends_the_budget_by_it(seconds, argument):
    model, opt, closure, calls = build()
    script = [1.0, seconds] * (WARM_UP + 2)
    assert "thrifty" not in str(measure_cost(model, closure, opt, rounds=2, clock=Script(script, calls)))
    batch = CASES["vgg"].batch()
    for whole_passes in (False, True):
        given = {"total_steps": 100, "budget": 1.3, "whole_passes": whole_passes}
        opt = thrifty(model, opt.base_optimizer, batch[0], **given)
        passes = closure_of(model, opt.zero_grad, batch)
        cost = measure_cost(model, passes, opt, rounds=2, clock=Script(script, calls))
        line = re.fullmatch(r"\d\.\d\d base steps \(.*\); thrifty\(\.\.\., step_cost=(\S+)\) spends .*", str(cost))[1]
        assert line == argument
        choice = thrifty(model, opt.base_optimizer, batch[0], step_cost=float(line), **given).choice
        assert (choice.cut, choice.measured) == (opt.choice.cut, True)
        assert choice.cost <= 1.3


def tensors(value, path=""):
    """Return all tensors of an optimizer's state, by where they lie."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {key: t for name, inner in items for key, t in tensors(inner, f"{path}.{name}").items()}


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
    assert differences(before, snapshot(model)) == []
    now, then = tensors(opt.state_dict()), tensors(state)
    assert now.keys() == then.keys()
    assert all(torch.equal(now[key], then[key]) for key in now)
    for _ in range(10 - steps_before):
        for _, opt, closure, _ in runs:
            torch.manual_seed(2)
            opt.step(closure)
    assert differences(snapshot(model), snapshot(twin)) == []


def test_the_optimizer_keeps_its_tensors_its_hooks_are_left_alone_and_so_are_weights_that_it_does_not_have():
    model, batch = CASES["vgg"].model(), CASES["vgg"].batch()
    own = list(model.parameters())[2:]
    rho, lr = torch.tensor(0.1), torch.tensor(0.01)
    opt = SAM(own, torch.optim.Adam, rho=rho, model=model, lr=lr)
    closure, hooked = closure_of(model, opt.zero_grad, batch), []
    opt.step(closure)
    opt.register_step_post_hook(lambda *_: hooked.append(1))
    foreign = next(model.parameters())
    gradient, values = foreign.grad, foreign.grad.clone()
    moments = {p: dict(opt.state[p]) for p in own}
    group, weights = dict(opt.param_groups[0]), [p.detach().clone() for p in own]
    measure_cost(model, closure, opt, rounds=1)
    assert hooked == []
    assert foreign.grad is gradient
    assert torch.equal(gradient, values)
    assert all(opt.param_groups[0][key] is value for key, value in group.items() if not isinstance(value, tuple))
    assert (rho.item(), lr.item()) == (pytest.approx(0.1), pytest.approx(0.01))
    assert all(opt.state[p][key] is value for p, kept in moments.items() for key, value in kept.items())
    assert all(opt.state[p]["step"] == 1 for p in own)
    assert all(torch.equal(p, w) for p, w in zip(own, weights, strict=True))


def test_state_of_another_dtype_stays():
    """As master weights in float32 are kept beside weights in bfloat16."""
    model = torch.nn.Linear(3, 2).bfloat16()
    opt = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    opt.state[model.weight]["master"] = torch.full((2, 3), 1 + 2.0**-20)
    measure_cost(
        model,
        closure_of(model, opt.zero_grad, (torch.ones(4, 3).bfloat16(), torch.zeros(4, dtype=torch.int64))),
        opt,
        rounds=1,
    )
    assert opt.state[model.weight]["master"].eq(1 + 2.0**-20).all()


class WithLists(torch.optim.SGD):
    """Keeps a mean of gradients and a history in lists, as SOAP does."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("means", [torch.zeros_like(p)])[0].add_(p.grad)
            state.setdefault("history", []).append(1)


def test_state_in_lists_stays():
    model, batch = CASES["vgg"].model(), CASES["vgg"].batch()
    opt = SAM(model.parameters(), WithLists, rho=0.1, lr=0.01)
    closure = closure_of(model, opt.zero_grad, batch)
    opt.step(closure)
    means = {p: (state["means"][0], state["means"][0].clone()) for p, state in opt.state.items()}
    measure_cost(model, closure, opt, rounds=1)
    assert all(opt.state[p]["means"][0] is mean for p, (mean, _) in means.items())
    assert all(torch.equal(mean, values) for mean, values in means.values())
    assert all(state["history"] == [1] for state in opt.state.values())


def test_a_buffer_that_the_first_forward_fills_is_empty_again():
    class Fills(torch.nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.register_buffer("seen", None)

        def forward(self, x):
            self.seen = x.mean(0) if self.seen is None else self.seen
            return super().forward(x - self.seen)

    model = Fills()
    opt = SAM(model.parameters(), torch.optim.SGD, model=model, lr=0.1)
    measure_cost(
        model, closure_of(model, opt.zero_grad, (torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))), opt, rounds=1
    )
    assert model.seen is None


def test_gradients_that_a_step_has_used_are_still_known_to_be_used():
    """Else the closure would be said to add to gradients from before the step."""
    model, batch = CASES["vgg"].model(), CASES["vgg"].batch()
    opt = SAM(model.parameters(), torch.optim.SGD, model=model, **BASE)
    closure = closure_of(model, lambda: model.zero_grad(set_to_none=False), batch)
    twin = copy.deepcopy(model)
    other = SAM(twin.parameters(), torch.optim.SGD, model=twin, **BASE)
    same = closure_of(twin, lambda: twin.zero_grad(set_to_none=False), batch)
    for measured in (False, True, False):
        if measured:
            measure_cost(model, closure, opt, rounds=1)
        for step, run in ((opt.step, closure), (other.step, same)):
            torch.manual_seed(3)
            step(run)
    assert differences(snapshot(model), snapshot(twin)) == []


@pytest.mark.parametrize("zeros", [False, True])
def test_a_step_that_was_begun_goes_on(zeros):
    """A backward pass was made, whose dropout the second pass repeats."""
    results = []
    for measured in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(), torch.nn.Linear(8, 3))
        batch = torch.randn(5, 6), torch.arange(5) % 3
        opt = SAM(model.parameters(), torch.optim.SGD, model=model, **BASE)
        closure = closure_of(model, opt.zero_grad, batch)
        backward = closure_of(model, lambda: None, batch)
        opt.zero_grad(set_to_none=not zeros)
        backward()
        if measured:
            measure_cost(model, closure, opt, rounds=1)
        opt.first_step(zero_grad=True)
        backward()
        if measured:
            with pytest.raises(RuntimeError, match="measure_cost cannot be called while the optimizer is at the pert"):
                measure_cost(model, closure, opt, rounds=1)
        opt.second_step()
        results.append(snapshot(model))
    assert differences(*results) == []


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
    with pytest.raises(TypeError, match=r"closure must be a function, as for opt\.step, but is a NoneType"):
        measure_cost(model, None, opt)
    with pytest.raises(ValueError, match="model must be the one that opt trains, but does not have all of"):
        measure_cost(copy.deepcopy(model), closure, opt)
    with pytest.raises(ValueError, match="rounds must be a whole number >= 1, but is 0"):
        measure_cost(model, closure, opt, rounds=0)
