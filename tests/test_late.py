"""First steps of one pass, along the momentum, and last steps that perturb behind a cut."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.nn import functional as F

import sparsam
from cases import STEPS, same, task, weights
from reference import BehindReference, behind_cut, check_step
from sparsam import SAM, BudgetMask, RandomMask
from sparsam.masks import StepKind
from sparsam.masks.budget import choose_share
from sparsam.momentum import perturb_along_momentum
from sparsam.perturbation import restore

BASE = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
RHO = 0.1


def sam(model, *, adaptive=False, **options) -> SAM:
    mask = BudgetMask(model, **{"total_steps": STEPS, **options})
    return SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=mask, adaptive=adaptive, **BASE)


def along(model, **options) -> SAM:
    """Take no last step for a long time."""
    return sam(model, total_steps=10**6, late_share=1e-6, momentum_rho=0.4, **options)


# ---------------------------------------------------------------------------------------------------- the steps


@pytest.mark.parametrize("cut", ["3", "8", None])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("momentum_rho", [None, 0.4])
def test_it_equals_the_slow_reference(cut, adaptive, momentum_rho):
    t = task(dropout=0.25)
    twin = copy.deepcopy(t.model)
    masks = behind_cut(twin, int(cut or 0))
    reference = BehindReference(
        twin,
        lambda model, k: F.cross_entropy(model(t.x), t.y),
        adaptive=adaptive,
        mask=lambda reference: masks,
        momentum_rho=momentum_rho or 0.0,
        **BASE,
    )
    opt = sam(t.model, cut=cut, adaptive=adaptive, total_steps=20, late_share=0.5, momentum_rho=momentum_rho)
    for step in range(20):
        reference.rho = None if step < 10 else RHO
        check_step(reference, t.model, lambda: opt.step(t.closure(opt)), seed=step)


@pytest.mark.parametrize("cut", ["3", None])
def test_the_closure_is_called_once_then_twice_and_the_masks_say_what_was_perturbed(cut):
    t = task()
    opt = sam(t.model, cut=cut, total_steps=4, late_share=0.5, momentum_rho=0.4)
    calls, shares = [], []
    with pytest.raises(RuntimeError, match=r"^there is no mask before the first step"):
        opt.masks()
    for _ in range(4):
        count = []

        def closure(count=count):
            count.append(1)
            return t.closure(opt)()

        opt.step(closure)
        calls.append(len(count))
        shares.append([bool(m.all()) for m in opt.masks()])
    assert calls == [1, 1, 2, 2]
    behind = [cut is None or int(name.split(".")[0]) >= int(cut) for name, _ in t.model.named_parameters()]
    assert shares == [[False] * len(behind)] * 2 + [behind] * 2


def test_without_a_momentum_the_first_steps_are_those_of_the_base_optimizer():
    t, plain = task(), task()
    opt = sam(t.model, late_share=0.5)
    base = torch.optim.SGD(plain.model.parameters(), **BASE)
    for _ in range(STEPS // 2):
        opt.step(t.closure(opt))
        base.step(plain.closure(base))
    assert same(weights(t.model), weights(plain.model))


@pytest.mark.parametrize("at", [3, 6, 9])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("norm", ["perturbed", "whole"])
def test_a_resumed_run_is_the_same_in_both_phases(at, adaptive, norm):
    results = []
    for resumes in (False, True):
        t = task()
        options = {"cut": "3", "total_steps": 12, "late_share": 0.5, "momentum_rho": 0.4, "norm": norm}
        opt = sam(t.model, adaptive=adaptive, **options)
        for step in range(12):
            if resumes and step == at:
                state = copy.deepcopy(opt.state_dict())
                opt = sam(t.model, adaptive=adaptive, **options)
                opt.load_state_dict(state)
            opt.step(t.closure(opt))
        results.append(weights(t.model))
    assert same(*results)


def test_a_step_of_one_pass_makes_no_mask_and_needs_none_in_a_cuda_graph():
    t = task()
    opt = sam(t.model, cut="3", total_steps=4, late_share=0.5)
    due = []
    for _ in range(4):
        due.append(opt.mask_is_due())
        opt.step(t.closure(opt))
    assert due == [False, False, True, False]


def test_one_pass_inside_an_autocast_block():
    """Without clearing autocast's cache of casts the pass would see w, and the step be SGD's."""
    t, twin = task(torch.float32), task(torch.float32)
    opt = sam(t.model, total_steps=10**6, late_share=1e-6, momentum_rho=2.0)
    base = torch.optim.SGD(twin.model.parameters(), **BASE)
    opt.step(t.closure(opt))
    base.step(twin.closure(base))
    with torch.autocast("cpu", torch.bfloat16):
        t.loss()  # casts that are kept
        opt.step(t.closure(opt))
        after = t.loss().item()
    moved = [p.detach().clone() for p in twin.model.parameters()]
    velocities = [base.state[p]["momentum_buffer"] for p in twin.model.parameters()]
    norm = torch.stack([v.square().sum() for v in velocities]).sum().sqrt()
    with torch.no_grad():
        for p, v in zip(twin.model.parameters(), velocities, strict=True):
            p -= 2.0 * v / norm
    base.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        twin.loss().backward()
    with torch.no_grad():
        for p, w in zip(twin.model.parameters(), moved, strict=True):
            p.copy_(w)
    base.step()
    for a, b in zip(t.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert after == pytest.approx(t.loss().item(), rel=1e-6)


def test_steps_beyond_the_last_are_told_once():
    t = task()
    opt = sam(t.model, cut="3", total_steps=2, late_share=0.5)
    for _ in range(2):
        opt.step(t.closure(opt))
    with pytest.warns(UserWarning, match=r"^this is step 3, but the mask's total_steps are 2: .* not epochs$"):
        opt.step(t.closure(opt))
    opt.step(t.closure(opt))
    assert all(m.all() for m in opt.masks()[-2:])


def test_a_mask_within_selects_in_the_last_steps():
    t = task()
    opt = sam(t.model, cut="3", late_share=0.5, within=RandomMask(0.5, interval=2))
    for _ in range(STEPS):
        opt.step(t.closure(opt))
    behind = sum(p.numel() for p in t.model[3:].parameters())
    assert sum(int(m.sum()) for m in opt.masks()) == round(behind / 2)


def test_the_length_of_the_perturbation_is_rho():
    t = task()
    opt = along(t.model)
    opt.step(t.closure(opt))
    before, params = weights(t.model), list(t.model.parameters())
    with torch.no_grad():
        saved = perturb_along_momentum(params, opt.state, 0.4)
    moved = [p - b for p, b in zip(params, before[: len(params)], strict=True)]
    assert sum(m.square().sum() for m in moved).sqrt().item() == pytest.approx(0.4, rel=1e-12)
    dot = sum((m * opt.state[p]["momentum_buffer"]).sum() for m, p in zip(moved, params, strict=True)).item()
    assert dot < 0  # where the next step goes, w - lr v
    with torch.no_grad():
        restore(saved)
    assert same(weights(t.model), before)


def test_weights_come_back_after_an_exception_in_a_closure():
    t = task()
    opt = along(t.model)
    opt.step(t.closure(opt))
    before = weights(t.model)

    def closure():
        assert not same(weights(t.model), before)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        opt.step(closure)
    assert same(weights(t.model), before)
    opt.step(t.closure(opt))


@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_other_optimizers_have_a_momentum_too(base):
    arguments = {"momentum": 0.5} if base is torch.optim.RMSprop else {}
    results = []
    for rho in (None, 0.0, 0.4):
        t = task()
        mask = BudgetMask(t.model, cut="3", total_steps=9, late_share=0.2, momentum_rho=rho)
        opt = SAM(t.model.parameters(), base, rho=0.1, mask=mask, lr=0.01, **arguments)
        for _ in range(3):
            opt.step(t.closure(opt))
        results.append(weights(t.model))
    assert same(results[0], results[1])
    assert not same(results[0], results[2])


def test_frozen_weights_stay():
    t = task()
    opt = along(t.model)
    for _ in range(2):
        opt.step(t.closure(opt))
    t.model[0].requires_grad_(False)
    before, seen = weights(t.model[0]), []

    def closure():
        seen.append(weights(t.model[0]))
        return t.closure(opt)()

    opt.step(closure)
    assert all(same(s, before) for s in seen)


# ------------------------------------------------------------------------------------------ which steps, by budget


@pytest.mark.parametrize(
    ("share", "steps", "first"), [(0.3, 10, 7), (0.21, 100, 79), (0.5, 7, 4), (0.57, 100, 43), (1.0, 4, 0)]
)
def test_the_last_steps_perturb(share, steps, first):
    mask = BudgetMask(task().model, cut="3", total_steps=steps, late_share=share, momentum_rho=0.1)
    kinds = [mask.kind(step) for step in range(steps + 2)]  # and whatever comes after the end
    assert kinds == [StepKind(one_pass=True, momentum_rho=0.1)] * first + [StepKind(cut="3")] * (steps + 2 - first)


@pytest.mark.parametrize(
    ("first", "last", "budget", "share"),
    [
        (1.05, 2.0, 1.25, 0.21),  # 0.79 * 1.05 + 0.21 * 2 = 1.2495
        (1.05, 1.65, 1.25, 0.333),
        (1.0, 1.5, 1.45, 0.9),
        (1.0, 1.2, 1.2, 1.0),
        (1.0, 1.2, 3.0, 1.0),
        (1.2, 1.2, 1.3, 1.0),
    ],
)
def test_the_budget_buys_last_steps(first, last, budget, share):
    assert choose_share(first, last, budget) == share


@pytest.mark.parametrize(
    ("first", "last", "budget", "share", "least"),
    [
        (1.05, 1.65, 1.05, 0.001, 1.051),
        (1.05, 1.65, 1.0501, 0.001, 1.051),
        (1.05, 1.65, 1.02, 0.001, 1.051),
        (1.05, 1.65, 1.1, 0.25, 1.2),  # a single step of four
        (1.3, 1.3, 1.25, 0.001, 1.3),
    ],
)
def test_a_budget_that_buys_none_is_refused(first, last, budget, share, least):
    message = rf"^budget must be at least {least:g}, or no step can .* others cost {first:g}, but is {budget:g}$"
    with pytest.raises(ValueError, match=message):
        choose_share(first, last, budget, share)
    assert choose_share(first, last, least, share) >= share


@pytest.mark.parametrize("momentum_rho", [0.3, None])
def test_what_was_measured_is_kept(monkeypatch, momentum_rho):
    """The costs are given: 1.1 along the momentum, 1.6 from the cut."""
    asked = []
    monkeypatch.setattr(sparsam.behind, "late_costs", lambda *_, **__: asked.append(1) or (1.1, 1.6))
    t = task()
    options = {"cut": "3", "budget": 1.4, "momentum_rho": momentum_rho}
    opt = sam(t.model, **options)
    opt.step(t.closure(opt))
    share = 0.6 if momentum_rho else 0.666  # 0.3 / 0.5, 0.4 / 0.6
    assert (opt.mask.cut, opt.mask.late_share, opt.mask.cost) == ("3", share, 1.6)
    assert repr(opt.mask).endswith(f" with {100 * share:g} % of the steps perturbed")
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other = sam(t.model, **options)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert (other.mask.cut, other.mask.late_share) == ("3", share)
    for _ in range(STEPS - 1):
        other.step(t.closure(other))
    assert [bool(m.all()) for m in other.masks()] == [n[0] >= "3" for n, _ in t.model.named_parameters()]
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("cut", "passes", "cost", "share"),
    [
        ("3", 1.5, 1.4, 0.687),  # (1.5 + 0.25) / 1.25, and 0.22 / 0.32: before that 1 + 0.1 / 1.25
        (None, 2.25, 2.0, 0.239),  # 0.22 / 0.92
        ("3", 30.0, 2.22, 0.192),  # no more than 1.2 times two passes and the perturbation, 2.52
    ],
)
def test_both_kinds_of_steps_are_timed(monkeypatch, cut, passes, cost, share):
    """A pass takes 1 s, the optimizer's step 0.25 s, perturbing 0.1 s."""
    seconds = {"_perturbing": 0.1, "step": 0.25, "closure": 1.0, "_two_passes": passes}
    monkeypatch.setattr(
        sparsam.replay.costs.Clock,
        "time",
        lambda self, work: next(s for n, s in seconds.items() if n in work.__qualname__),
    )
    t = task()
    before = weights(t.model)
    opt = sam(t.model, cut=cut, budget=1.3, total_steps=100, momentum_rho=0.3)
    with torch.no_grad():
        opt._choose(t.closure(opt))
    assert same(weights(t.model), before)  # measuring leaves no trace
    assert (opt.mask.cost, opt.mask.late_share) == (cost, share)


def test_a_real_clock():
    """Only what holds of any clock is asserted."""
    t = task()
    opt = sam(t.model, cut="8", budget=1000, momentum_rho=0.3)
    opt.step(t.closure(opt))
    assert opt.mask.cut == "8"
    assert opt.mask.cost >= 1
    assert opt.mask.late_share == 1.0


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
        SAM(t.model.parameters(), base, mask=BudgetMask(t.model, total_steps=9, momentum_rho=0.4), lr=0.1, **arguments)


@pytest.mark.parametrize("options", [{"cut": "3"}, {"late_share": 0.5}, {"momentum_rho": 0.4}])
def test_without_a_closure_it_is_refused_and_nothing_changes(options):
    t = task()
    opt = sam(t.model, **options)
    t.loss().backward()
    before = weights(t.model)
    with pytest.raises(RuntimeError, match=r"^this step takes one pass, .* leave total_steps out$"):
        opt.first_step()
    assert same(weights(t.model), before)


NEEDS_STEPS = "tells training's first steps from its last, and needs total_steps, but that is None$"
REFUSED = {
    "a negative radius": (
        {"total_steps": 9, "momentum_rho": -1},
        "momentum_rho must be a finite number >= 0, but is -1$",
    ),
    "no steps": ({"total_steps": 0}, "total_steps must be a whole number >= 1, but is 0$"),
    "half a step": ({"total_steps": 1.5}, "total_steps must be a whole number >= 1, but is 1.5$"),
    "a share of how many?": ({"late_share": 0.5}, f"late_share {NEEDS_STEPS}"),
    "a momentum until when?": ({"momentum_rho": 0.5}, f"momentum_rho {NEEDS_STEPS}"),
    "no share": ({"total_steps": 9, "late_share": 0.0}, "late_share must be that of a step or more of total_steps=9, "),
    "less than a step": (
        {"total_steps": 9, "late_share": 0.1},
        "late_share must .*, but is 0.1 .leave it out, and the",
    ),
    "more than all": ({"total_steps": 9, "late_share": 1.5}, r"late_share must be a number in \[0, 1\], but is 1.5$"),
    "spread evenly and last": (
        {"total_steps": 9, "full": 0.2},
        "full must be 0 where only the last of total_steps steps perturb, but is 0.2$",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_by_name(name):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{message}"):
        BudgetMask(task().model, **options)


def test_a_momentum_of_another_name_is_missed():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for state in self.state.values():
                if "momentum_buffer" in state:
                    state["speed"] = state.pop("momentum_buffer")

    t = task()
    mask = BudgetMask(t.model, total_steps=9, late_share=0.2, momentum_rho=0.4)
    opt = SAM(t.model.parameters(), Own, mask=mask, lr=0.1, momentum=0.9)
    opt.step(t.closure(opt))
    before = weights(t.model)
    message = "^momentum_rho finds no momentum in the base optimizer's state, which has speed: it must be called "
    with pytest.raises(RuntimeError, match=message + "momentum_buffer or exp_avg$"):
        opt.step(t.closure(opt))
    assert same(weights(t.model), before)


def test_a_group_without_momentum_is_refused():
    t = task()
    base = torch.optim.SGD(t.model[3:].parameters(), lr=0.1, momentum=0.9)
    opt = SAM.wrap(base, mask=BudgetMask(t.model, total_steps=9, momentum_rho=0.4))
    with pytest.raises(ValueError, match=r"but SGD has none in parameter group 1$"):
        opt.add_param_group({"params": list(t.model[:3].parameters()), "momentum": 0.0})
    assert len(opt.param_groups) == 1
