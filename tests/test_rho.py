"""rho follows its formula, group by group, and goes on after a resume."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from sparsam import SAM, ConstantRho, CosineRho, InverseSqrtRho, LastSteps, ProportionalRho, RampRho


def optimizer(**options) -> SAM:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    return SAM([{"params": [a]}, {"params": [b], "rho": 0.4, "lr": 0.5}], torch.optim.SGD, rho=0.1, lr=1.0, **options)


FORMULAS = {
    "constant": (ConstantRho, {}, lambda t: 1.0),
    "inverse square root": (InverseSqrtRho, {}, lambda t: 1 / math.sqrt(t)),
    "cosine": (CosineRho, {"total_steps": 6}, lambda t: (1 + math.cos(math.pi * min(t - 1, 6) / 6)) / 2),
    "ramp": (RampRho, {"steps": 4}, lambda t: (None, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1)[t]),
    "late ramp": (RampRho, {"steps": 3, "start": 2}, lambda t: (None, 0, 0, 1 / 3, 2 / 3, 1, 1, 1, 1, 1)[t]),
    "jump": (RampRho, {"steps": 1, "start": 5}, lambda t: (None, 0, 0, 0, 0, 0, 1, 1, 1, 1)[t]),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_formula(name, as_tensor):
    cls, arguments, factor = FORMULAS[name]
    opt = optimizer()
    if as_tensor:
        for group in opt.param_groups:
            group["rho"] = torch.tensor(group["rho"], dtype=torch.float64)
    tensors = [group["rho"] for group in opt.param_groups]
    schedule = cls(opt, **arguments)
    for t in range(1, 10):
        assert schedule.get_last_rho() == pytest.approx([0.1 * factor(t), 0.4 * factor(t)], abs=1e-15)
        if as_tensor:  # written in place: a captured CUDA graph goes on reading it
            assert all(group["rho"] is tensor for group, tensor in zip(opt.param_groups, tensors, strict=True))
        schedule.step()


@pytest.mark.parametrize("name", FORMULAS)
def test_any_t_can_be_gone_to(name):
    cls, arguments, factor = FORMULAS[name]
    schedule = cls(optimizer(), **arguments)
    for t in (7, 2, 2, 9, 1):
        schedule.go_to(t)
        assert schedule.get_last_rho() == pytest.approx([0.1 * factor(t), 0.4 * factor(t)], abs=1e-15)
    schedule.step()
    assert schedule.get_last_rho() == pytest.approx([0.1 * factor(2), 0.4 * factor(2)], abs=1e-15)


def test_cosine_ends_at_the_final_value():
    opt = optimizer()
    schedule = CosineRho(opt, total_steps=4, final=0.02)
    for _ in range(9):
        schedule.step()
    assert schedule.get_last_rho() == pytest.approx([0.02, 0.02])


def test_proportional_follows_any_learning_rate_scheduler():
    opt = optimizer()
    lr = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)
    rho = ProportionalRho(opt)
    opt._opt_called = True  # no training here: spare us the scheduler's warning
    for t in range(11):
        cosine = (1 + math.cos(math.pi * t / 10)) / 2
        assert rho.get_last_rho() == pytest.approx([0.1 * cosine, 0.4 * cosine], abs=1e-9)
        lr.step()
        rho.step()


RESUMED = {
    "inverse square root": InverseSqrtRho,
    "proportional": ProportionalRho,
    "ramp": partial(RampRho, steps=4, start=3),
    "before the ramp": partial(RampRho, steps=2, start=6),  # rho is 0 where it is saved
}


@pytest.mark.parametrize("cls", RESUMED.values(), ids=RESUMED)
@pytest.mark.parametrize("built_before_loading", [False, True])
def test_resume(cls, built_before_loading):
    opt = optimizer()
    schedule = cls(opt)
    for t in range(5):
        opt.param_groups[0]["lr"] = 1.0 / (t + 2)
        schedule.step()
    opt_state, schedule_state = opt.state_dict(), schedule.state_dict()

    new = optimizer()
    resumed = cls(new) if built_before_loading else None
    new.load_state_dict(opt_state)
    resumed = resumed or cls(new)
    resumed.load_state_dict(schedule_state)
    assert resumed.get_last_rho() == schedule.get_last_rho()
    for _ in range(4):
        schedule.step()
        resumed.step()
        assert resumed.get_last_rho() == schedule.get_last_rho()
    assert all(rho > 0 for rho in resumed.get_last_rho())


def test_a_schedule_shows_where_it_is():
    ramp, cosine = RampRho(optimizer(), steps=4, start=1), CosineRho(optimizer(), total_steps=4, final=0.02)
    ramp.go_to(2)
    assert repr(ramp) == "RampRho(steps=4, start=1, t=2, rho=[0.025, 0.1])"
    assert repr(cosine) == "CosineRho(total_steps=4, final=0.02, t=1, rho=[0.1, 0.4])"
    assert repr(ProportionalRho(optimizer())) == "ProportionalRho(t=1, rho=[0.1, 0.4])"


def test_a_new_schedule_starts_from_the_present_rho():
    opt = optimizer()
    InverseSqrtRho(opt)
    opt.param_groups[0]["rho"] = 0.5
    assert CosineRho(opt, 10).get_last_rho() == [0.5, 0.4]
    assert "initial_rho" not in opt.param_groups[0]
    assert "initial_lr" not in opt.param_groups[0]


def test_groups_that_share_a_tensor_go_separate_ways():
    shared = torch.tensor(0.1)
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    opt = SAM([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 1.0}], torch.optim.SGD, rho=shared, lr=1.0)
    schedule = ProportionalRho(opt)
    opt.param_groups[0]["lr"] = 0.5
    schedule.step()
    assert schedule.get_last_rho() == pytest.approx([0.05, 0.1])


@pytest.mark.parametrize("rho", [0.2, torch.tensor(0.2)], ids=["float", "tensor"])
def test_a_group_that_is_added_starts_from_the_first_rho(rho):
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    opt = SAM([a], torch.optim.SGD, rho=rho, lr=0.1)
    schedule = CosineRho(opt, total_steps=10)
    for p in (b, c):
        schedule.go_to(6)  # half way
        opt.add_param_group({"params": [p]})
    schedule.go_to(6)
    assert schedule.get_last_rho() == pytest.approx([0.1, 0.1, 0.1])


def test_proportional_without_a_scheduler():
    opt = optimizer()
    schedule = ProportionalRho(opt)
    opt.param_groups[1]["lr"] = 0.25
    schedule.step()
    assert schedule.get_last_rho() == pytest.approx([0.1, 0.2])


def test_the_first_step_uses_rho_at_t_1_and_the_second_at_t_2():
    w = nn.Parameter(torch.tensor([3.0, 4.0]))
    opt = SAM([w], torch.optim.SGD, rho=1.0, lr=0.0)
    schedule = InverseSqrtRho(opt)
    for t in (1, 2, 3):
        opt.zero_grad()
        w.square().sum().backward()
        with opt.perturbed():
            torch.testing.assert_close(w.detach(), torch.tensor([3.0, 4.0]) * (1 + 1 / math.sqrt(t) / 5))
        opt.step()
        schedule.step()


def test_a_ramp_begins_with_the_first_step_that_is_sharpness_aware():
    """The eps of each step, measured: of 7 steps the last 4 perturb, and the ramp takes 3 of them."""
    w = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    schedule = LastSteps(4 / 7, total_steps=7)
    opt = SAM([w], torch.optim.SGD, rho=0.6, schedule=schedule, lr=0.0)
    ramp = RampRho(opt, steps=3, start=schedule.first)
    lengths = []
    for _ in range(7):
        opt.zero_grad()
        w.square().sum().backward()
        with opt.perturbed():
            lengths.append(w.detach().norm().item() - 5)
        opt.step()
        ramp.step()
    assert lengths == pytest.approx([0, 0, 0, 0.2, 0.4, 0.6, 0.6])
