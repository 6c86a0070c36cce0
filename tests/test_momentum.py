"""Steps that perturb what lies before the cut along the momentum, and full steps that come last.

test_replay.py compares the steps with the slow reference.
"""

from __future__ import annotations

import io

import pytest
import torch

import sparsam
from cases import STEPS, same, task, weights
from sparsam import SAM, BudgetMask
from sparsam.masks.budget import choose_full
from sparsam.momentum import perturb_along_momentum
from sparsam.perturbation import restore

BASE = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


def sam(model, **options) -> SAM:
    adaptive = options.pop("adaptive", False)
    return SAM(
        model.parameters(), torch.optim.SGD, rho=0.1, mask=BudgetMask(model, **options), adaptive=adaptive, **BASE
    )


def test_both_passes_start_from_the_same_perturbed_weights_and_what_lies_before_is_computed_once():
    t = task()
    opt = sam(t.model, cut="3", momentum_rho=0.4)
    calls, seen = [], []
    t.model[0].register_forward_hook(lambda *_: calls.append(1))

    def closure():
        seen.append(t.model[0].weight.detach().clone())
        return t.closure(opt)()

    for step in range(3):
        before = weights(t.model)
        seen.clear()
        opt.step(closure)
        first, second = seen
        assert torch.equal(first, second)
        assert torch.equal(first, before[0]) == (step == 0)  # there is no momentum yet
    assert len(calls) == 3


def test_the_length_of_the_perturbation_is_rho():
    t = task()
    opt = sam(t.model, cut="3", momentum_rho=0.4)
    opt.step(t.closure(opt))
    before = weights(t.model)
    moved = list(t.model[:3].parameters())
    with torch.no_grad():
        saved = perturb_along_momentum(moved, opt.state, 0.4)
    length = sum((p - b).square().sum() for p, b in zip(moved, before, strict=False)).sqrt().item()
    assert length == pytest.approx(0.4, rel=1e-12)
    along = sum(((p - b) * opt.state[p]["momentum_buffer"]).sum() for p, b in zip(moved, before, strict=False)).item()
    assert along < 0  # where the next step goes, w - lr v
    with torch.no_grad():
        restore(saved)
    assert same(weights(t.model), before)


@pytest.mark.parametrize("call", [1, 2])
def test_weights_come_back_after_an_exception_in_a_closure(call):
    t = task()
    opt = sam(t.model, cut="3", momentum_rho=0.4)
    opt.step(t.closure(opt))
    before, calls = weights(t.model), []

    def closure():
        calls.append(1)
        loss = t.closure(opt)()
        if len(calls) == call:
            raise ZeroDivisionError
        return loss

    buffers = len(list(t.model.buffers()))
    with pytest.raises(ZeroDivisionError):
        opt.step(closure)
    assert same(weights(t.model)[:-buffers], before[:-buffers])
    opt.step(t.closure(opt))


@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_other_optimizers_have_a_momentum_too(base):
    arguments = {"momentum": 0.5} if base is torch.optim.RMSprop else {}
    results = []
    for rho in (None, 0.0, 0.4):
        t = task()
        mask = BudgetMask(t.model, cut="3", momentum_rho=rho)
        opt = SAM(t.model.parameters(), base, rho=0.1, mask=mask, lr=0.01, **arguments)
        for _ in range(3):
            opt.step(t.closure(opt))
        results.append(weights(t.model))
    assert same(results[0], results[1])
    assert not same(results[0], results[2])


# ---------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("base", "arguments"),
    [(torch.optim.SGD, {}), (torch.optim.Adagrad, {}), (torch.optim.Adam, {"betas": (0.0, 0.9)})],
)
def test_a_base_without_momentum_is_refused(base, arguments):
    t = task()
    message = (
        f"^momentum_rho needs a base optimizer with momentum, such as SGD with momentum=0.9 or AdamW, but "
        f"{base.__name__} has none in parameter group 0$"
    )
    with pytest.raises(ValueError, match=message):
        SAM(t.model.parameters(), base, mask=BudgetMask(t.model, cut="3", momentum_rho=0.4), lr=0.1, **arguments)


@pytest.mark.parametrize("options", [{"cut": "3"}, {"budget": 1.5}])
def test_without_a_closure_it_is_refused_and_nothing_changes(options):
    t = task()
    opt = sam(t.model, **options, momentum_rho=0.4)
    t.loss().backward()
    before = weights(t.model)
    with pytest.raises(RuntimeError, match=r"^momentum_rho perturbs before the first pass, which only step\(closure\)"):
        opt.first_step()
    assert same(weights(t.model), before)


REFUSED = {
    "a negative radius": ({"momentum_rho": -1}, "momentum_rho must be a finite number >= 0, but is -1$"),
    "no steps": ({"total_steps": 0}, "total_steps must be a whole number >= 1, but is 0$"),
    "half a step": ({"total_steps": 1.5}, "total_steps must be a whole number >= 1, but is 1.5$"),
    "a cut that leaves the share open": (
        {"cut": "3", "total_steps": 9},
        "total_steps must come with full where a cut is named: nothing is measured at '3', so the budget cannot buy",
    ),
    "last steps, but none": (
        {"full": 0.0, "total_steps": 9},
        r"total_steps is the place of full steps, but full is 0: there are none \(leave full out, and the budget buys some\)$",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_by_name(name):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{message}"):
        BudgetMask(task().model, **options)


# ------------------------------------------------------------------------------------------- full steps come last


@pytest.mark.parametrize(
    ("full", "steps", "first"), [(0.3, 10, 7), (0.21, 100, 79), (0.5, 7, 4), (0.57, 100, 43), (1.0, 4, 0)]
)
def test_full_steps_come_last(full, steps, first):
    mask = BudgetMask(task().model, cut="3", full=full, full_rho=0.2, total_steps=steps, momentum_rho=0.1)
    kinds = [mask.kind(step) for step in range(steps + 2)]  # and whatever comes after the end
    assert [kind.everything for kind in kinds] == [False] * first + [True] * (steps + 2 - first)
    assert {kind[1:] for kind in kinds[:first]} <= {(False, None, 0.1)}
    assert {kind[1:] for kind in kinds[first:]} == {(True, 0.2, None)}


@pytest.mark.parametrize(
    ("costs", "budget", "expected"),
    [
        ({"a": 1.9, "b": 1.2, "c": 1.05}, 1.25, ("c", 0.21)),  # 0.79 * 1.05 + 0.21 * 2 = 1.2495
        ({"a": 1.9, "b": 1.2, "c": 1.05}, 1.45, ("c", 0.421)),
        ({"a": 1.2, "b": 1.2}, 1.6, ("b", 0.5)),
        ({"a": 1.1}, 1.1, ("a", 0.0)),
        ({"a": 1.1}, 3.0, ("a", 1.0)),
        ({"a": 2.5}, 3.0, ("a", 1.0)),  # full steps only, which cost 2
    ],
)
def test_the_budget_buys_full_steps(costs, budget, expected):
    assert choose_full(costs, budget) == expected


def test_nothing_fits():
    with pytest.raises(ValueError, match=r"^budget must be at least 1.1, .* 'b', but is 1.05$"):
        choose_full({"a": 1.4, "b": 1.1}, 1.05)


def test_what_was_measured_is_kept(monkeypatch):
    """The costs are given: 1.5 from the first linear layer on, 1.05 from the last."""
    asked = []

    def costs(model, closure, base, rehearsal, **options):
        asked.append(options)
        return {sparsam.cuts.Cut("3", 0.9, 0.5): 1.5, sparsam.cuts.Cut("8", 0.1, 0.05): 1.05}

    monkeypatch.setattr(sparsam.behind, "cut_costs", costs)
    t = task()
    opt = sam(t.model, budget=1.4, total_steps=STEPS, momentum_rho=0.3)
    opt.step(t.closure(opt))
    assert (opt.mask.cut, opt.mask.full, opt.mask.cost) == ("8", 0.368, 1.05)  # 0.35 / 0.95
    assert asked[0]["cheapest"]
    assert asked[0]["everywhere"]
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other = sam(t.model, budget=1.4, total_steps=STEPS, momentum_rho=0.3)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert (other.mask.cut, other.mask.full) == ("8", 0.368)
    for _ in range(STEPS - 1):
        other.step(t.closure(other))
    assert all(m.all() for m in other.masks())
    assert len(asked) == 1


def test_the_cheapest_cut_is_really_measured():
    """With a clock, so only what holds of any clock is asserted."""
    t = task()
    opt = sam(t.model, budget=1000, total_steps=STEPS, momentum_rho=0.3)
    opt.step(t.closure(opt))
    assert opt.mask.cut == "8"
    assert opt.mask.cost >= 1
    assert opt.mask.full == 1.0


def test_a_measured_cost_counts_also_where_earlier_cuts_were_estimated_to_cost_less(monkeypatch):
    """A pass takes 1 s, the optimizer's step 0.25 s, perturbing 0.1 s; a real step from the last cut 1.5 s."""
    seconds = {"_perturbing": 0.1, "step": 0.25, "closure": 1.0, "_two_passes": 1.5}
    found = [sparsam.Cut("0", 1.0, 1.0), sparsam.Cut("3", 0.9, 0.1), sparsam.Cut("8", 0.1, 0.05)]
    monkeypatch.setattr(sparsam.costs, "find_cuts", lambda *_, **__: found)
    monkeypatch.setattr(
        sparsam.costs.Clock, "time", lambda self, work: next(s for n, s in seconds.items() if n in work.__qualname__)
    )
    t = task()
    opt = sam(t.model, budget=1.74, total_steps=100, momentum_rho=0.3)
    opt.step(t.closure(opt))
    assert opt.mask.cost == 1.47  # (1.5 + 0.9 * 0.1 + 0.25) / 1.25, not 1 + (0.1 + 0.1) / 1.25 as from "3"
    assert opt.mask.full == 0.509  # 0.27 / 0.53
    assert repr(opt.mask).endswith(" cut before '8', full=0.509")


def test_frozen_weights_stay():
    t = task()
    opt = sam(t.model, cut="3", momentum_rho=0.4)
    for _ in range(2):
        opt.step(t.closure(opt))
    t.model[0].requires_grad_(False)
    before, seen = weights(t.model[0]), []

    def closure():
        seen.append(weights(t.model[0]))
        return t.closure(opt)()

    opt.step(closure)
    assert all(same(s, before) for s in seen)


def test_a_momentum_of_another_name_is_missed():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for state in self.state.values():
                if "momentum_buffer" in state:
                    state["speed"] = state.pop("momentum_buffer")

    t = task()
    opt = SAM(t.model.parameters(), Own, mask=BudgetMask(t.model, cut="3", momentum_rho=0.4), lr=0.1, momentum=0.9)
    opt.step(t.closure(opt))
    before = weights(t.model)
    message = "^momentum_rho finds no momentum in the base optimizer's state, which has speed: it must be called "
    with pytest.raises(RuntimeError, match=message + "momentum_buffer or exp_avg$"):
        opt.step(t.closure(opt))
    assert same(weights(t.model), before)


def test_a_group_without_momentum_is_refused():
    t = task()
    base = torch.optim.SGD(t.model[3:].parameters(), lr=0.1, momentum=0.9)
    opt = SAM.wrap(base, mask=BudgetMask(t.model, cut="3", momentum_rho=0.4))
    with pytest.raises(ValueError, match=r"but SGD has none in parameter group 1$"):
        opt.add_param_group({"params": list(t.model[:3].parameters()), "momentum": 0.0})
    assert len(opt.param_groups) == 1
