"""The protocol of a step, and what an optimizer keeps between steps."""

from __future__ import annotations

import copy
import warnings
from typing import get_overloads

import numpy as np
import pytest
import torch
from torch import nn

import sparsam
from cases import magnitude, optimizer, same, task, weights
from sparsam import SAM, EveryNth, RandomMask, SuffixMask, TopKMask

BASE = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


def test_the_closure_is_called_twice_and_the_loss_at_w_returned():
    for rho, mask in [(0.3, None), (0.0, None), (0.3, RandomMask(1.0))]:
        t = task()
        opt = SAM(t.model.parameters(), torch.optim.SGD, rho=rho, mask=mask, lr=0.1)
        seen = []

        def closure(t=t, opt=opt, seen=seen):
            loss = t.closure(opt)()
            seen.append(loss.item())
            return loss

        returned = opt.step(closure)
        assert len(seen) == 2
        assert returned.item() == seen[0]
        assert (seen[0] == seen[1]) == (rho == 0 or mask is not None)


def test_the_closure_may_return_anything():
    t = task()
    opt = optimizer(t)
    closure = t.closure(opt)
    assert opt.step(lambda: (closure(), "and more"))[1] == "and more"
    assert opt.step(lambda: closure() and None) is None


def test_groups_have_their_own_rho_and_share_the_norm():
    a, b = nn.Parameter(torch.tensor([3.0])), nn.Parameter(torch.tensor([4.0]))
    opt = SAM([{"params": [a], "rho": 1.0}, {"params": [b]}], torch.optim.SGD, rho=10.0, lr=0.1)
    (a.square() / 2 + b.square() / 2).sum().backward()
    with opt.perturbed():
        torch.testing.assert_close(a.data, torch.tensor([3 + 1 * 3 / 5]))
        torch.testing.assert_close(b.data, torch.tensor([4 + 10 * 4 / 5]))
    opt.param_groups[1]["rho"] = 0.0
    with opt.perturbed():
        assert b.item() == 4.0


def test_the_masks_seed_is_the_saved_runs():
    one, other = task(), task()
    opt = SAM(one.model.parameters(), torch.optim.SGD, mask=RandomMask(0.5, interval=1, seed=5), lr=0.1)
    opt.step(one.closure(opt))
    resumed = SAM(other.model.parameters(), torch.optim.SGD, mask=RandomMask(0.5, interval=1, seed=6), lr=0.1)
    resumed.load_state_dict(opt.state_dict())
    other.model.load_state_dict(one.model.state_dict())
    opt.step(one.closure(opt))
    resumed.step(other.closure(resumed))
    assert same(opt.masks(), resumed.masks())


def test_numpy_numbers_leave_plain_values_in_the_state(tmp_path):
    t = task()
    mask = sparsam.NMMask(np.int64(2), np.int64(4), magnitude, interval=np.int64(3))
    opt = SAM(t.model.parameters(), torch.optim.SGD, rho=np.float32(0.1), mask=mask, lr=0.1)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], "rho": np.float64(0.2)})
    opt.step(t.closure(opt))
    torch.save(opt.state_dict(), tmp_path / "state.pt")
    torch.load(tmp_path / "state.pt", weights_only=True)


def test_resuming_a_two_step_run_is_bit_exact():
    """In the order of docs/loops.md: random numbers first."""

    def step(t, opt):
        t.loss().backward()
        opt.first_step(zero_grad=True)
        t.loss().backward()
        opt.second_step(zero_grad=True)

    whole, resumed = task(dropout=0.5), task(dropout=0.5)
    torch.manual_seed(1)
    opt = optimizer(whole, "dynamic")
    for _ in range(2):
        step(whole, opt)
    saved = copy.deepcopy({"model": whole.model.state_dict(), "opt": opt.state_dict(), "rng": torch.get_rng_state()})
    for _ in range(3):
        step(whole, opt)
    again = optimizer(resumed, "dynamic")
    torch.manual_seed(99)
    resumed.model.load_state_dict(saved["model"])
    torch.set_rng_state(saved["rng"])
    again.load_state_dict(saved["opt"])
    for _ in range(3):
        step(resumed, again)
    assert same(weights(whole.model), weights(resumed.model))


def test_a_failure_on_the_way_to_the_second_pass_leaves_w(monkeypatch):
    t = task()
    opt = optimizer(t)
    t.loss().backward()
    before = weights(t.model)

    def fails(*_, **__):
        raise MemoryError

    monkeypatch.setattr("sparsam.passes.SavedBuffers", fails)
    with pytest.raises(MemoryError), opt.perturbed():
        pass
    assert same(weights(t.model), before)
    monkeypatch.undo()
    opt.step(t.closure(opt))


def test_step_may_end_the_step_from_inside_the_context():
    inside, after = task(), task()
    results = []
    for t in (inside, after):
        opt = optimizer(t)
        t.loss().backward()
        with opt.perturbed():
            opt.zero_grad()
            t.loss().backward()
            if t is inside:
                opt.step()
        if t is after:
            opt.step()
        results.append(weights(t.model))
    assert same(*results)


def test_restore_gives_a_step_up():
    t = task(dropout=0.3)
    opt = optimizer(t)
    opt.restore()
    t.loss().backward()
    before = weights(t.model)
    opt.first_step()
    t.loss()
    opt.restore()
    assert same(weights(t.model), before)
    with pytest.raises(RuntimeError, match="second_step"):
        opt.second_step()


def test_a_failing_closure_changes_nothing():
    for failing_call in (1, 2):
        t = task(dropout=0.3)
        opt = optimizer(t, "dynamic")
        calls = []

        def closure(t=t, opt=opt, calls=calls, failing_call=failing_call):
            calls.append(1)
            if len(calls) == failing_call:
                raise ZeroDivisionError
            return t.closure(opt)()

        before = [p.detach().clone() for p in t.model.parameters()]
        with pytest.raises(ZeroDivisionError):
            opt.step(closure)
        assert same([p.detach() for p in t.model.parameters()], before)
        opt.step(t.closure(opt))  # and the optimizer is usable


def test_schedulers_do_not_warn_in_two_step_use():
    t = task()
    opt = optimizer(t)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    t.loss().backward()
    opt.first_step(zero_grad=True)
    t.loss().backward()
    opt.second_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_step_hooks_run_once_a_step():
    t = task()
    opt = optimizer(t)
    calls = []
    opt.register_step_post_hook(lambda *_: calls.append("post"))
    opt.step(t.closure(opt))
    assert calls == ["post"]


def test_groups_and_state_are_the_base_optimizers_own():
    t = task()
    opt = optimizer(t)
    assert opt.param_groups is opt.base_optimizer.param_groups
    opt.step(t.closure(opt))
    assert opt.state is opt.base_optimizer.state
    assert len(opt.state) == len(list(t.model.parameters()))
    opt.base_optimizer.load_state_dict(torch.optim.SGD(t.model.parameters(), lr=0.3).state_dict())
    assert opt.param_groups is opt.base_optimizer.param_groups
    assert opt.param_groups[0]["lr"] == 0.3
    opt.step(t.closure(opt))  # the groups have lost their rho; the default is used


def test_groups_can_be_added():
    extra = nn.Parameter(torch.ones(5, dtype=torch.float64))
    t = task()
    opt = optimizer(t, "random-fixed")
    opt.step(t.closure(opt))
    opt.add_param_group({"params": [extra], "rho": 0.7})
    assert opt.param_groups[-1]["rho"] == 0.7
    assert opt.param_groups[-1]["lr"] == 0.05
    opt.load_state_dict(opt.state_dict())  # also before the first step with the new one
    opt.step(t.closure(opt))
    total = sum(p.numel() for p in t.model.parameters()) + 5
    assert sum(int(m.sum()) for m in opt.masks()) == round((1 - 0.9) * total)


def test_masks_are_copies():
    t = task()
    opt = optimizer(t, "random")
    opt.step(t.closure(opt))
    for m in opt.masks():
        m.fill_(True)
    assert not all(m.all() for m in opt.masks())


def test_the_masks_model_is_the_default_model():
    t = task()
    opt = SAM(t.model.parameters(), torch.optim.SGD, mask=sparsam.NormMask(t.model), lr=0.1)
    opt.step(t.closure(opt))
    assert t.model[1].num_batches_tracked == 1


def test_the_model_carries_nothing():
    t = task()
    opt = optimizer(t, "fisher")
    opt.step(t.closure(opt))
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in t.model.modules())
    assert not opt._perturber.saved


class OwnNorm(nn.BatchNorm1d):
    """A norm that moves its statistics whatever it is told about tracking them."""

    def forward(self, x):
        self.running_mean.lerp_(x.detach().mean(0), 0.1)
        self.num_batches_tracked += 1
        return x - x.mean(0)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, momentum=None),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.BatchNorm1d(4).eval(),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        OwnNorm(4),
    ],
    ids=lambda norm: str(norm).split(", eps")[0] + f" {norm.momentum} {norm.training}",
)
def test_running_statistics_of_every_kind_move_once(norm):
    torch.manual_seed(0)
    channels = isinstance(norm, nn.InstanceNorm1d)
    x = torch.randn(6, 4, 5) if channels else torch.randn(6, 4)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(20 if channels else 4, 2))
    once = copy.deepcopy(model)
    with torch.no_grad():
        once(x)
    tracking = norm.track_running_stats
    opt = SAM(model.parameters(), torch.optim.SGD, rho=0.5, model=model, lr=0.0)

    def closure():
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    opt.step(closure)
    assert norm.track_running_stats == tracking
    assert same([b.clone() for b in model.buffers()], [b.clone() for b in once.buffers()])


def test_it_shows_how_it_perturbs():
    t = task()
    opt = SAM(t.model.parameters(), torch.optim.SGD, mask=RandomMask(0.25), schedule=EveryNth(3), lr=0.1)
    shown = repr(opt).splitlines()
    assert shown[0] == "SAM ("
    assert shown[-3:] == [
        "mask: RandomMask(interval=None, sparsity=0.25)",
        "ascent: GradientAscent()",
        "schedule: EveryNth(n=3)",
    ]


def test_a_type_checker_knows_what_a_step_returns():
    without, with_closure = get_overloads(SAM.step)
    assert without.__annotations__ == {"closure": "None", "return": "None"}
    assert with_closure.__annotations__ == {"closure": "Callable[[], T] | Callable[[Rows], T]", "return": "T"}


def run_with_scores(scores_of, cut=None):
    """Take steps with a mask whose scores are gradients; return the weights, and torch's random numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    x = torch.linspace(-1, 1, 24).double().view(6, 4)

    def scores(params):
        with torch.enable_grad():
            return scores_of(model, opt, params, model(x.flip(0)).square().sum())

    mask = TopKMask(0.5, scores, interval=2)
    if cut:
        mask = SuffixMask(model, cut, inner=mask)
    opt = SAM(model.parameters(), torch.optim.SGD, rho=0.5, mask=mask, model=model, lr=0.1)

    def closure():
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(5):
        opt.step(closure)
    return [p.detach() for p in model.parameters()], torch.get_rng_state()


@pytest.mark.parametrize("clear", ["model", "optimizer"])
@pytest.mark.parametrize("cut", [None, "3"])
def test_scores_may_come_from_a_backward_pass_of_their_own(cut, clear):
    """The perturbation goes along the first pass' gradient all the same, and dropout is that of the first pass."""

    def by_backward(model, opt, params, loss):
        (model if clear == "model" else opt).zero_grad()
        loss.backward()
        return [p.grad.abs() for p in params]

    def by_autograd(model, opt, params, loss):
        return [g.abs() for g in torch.autograd.grad(loss, params)]

    weights, numbers = run_with_scores(by_backward, cut)
    expected, expected_numbers = run_with_scores(by_autograd, cut)
    assert all(map(torch.equal, weights, expected))
    assert torch.equal(numbers, expected_numbers)


def test_scores_that_add_to_the_gradients_are_refused():
    def added(model, opt, params, loss):
        loss.backward()
        return [p.grad.abs() for p in params]

    message = r"^a mask must leave the gradients of the first pass as they are, but has changed that of parameter 0 in"
    with pytest.raises(RuntimeError, match=message):
        run_with_scores(added)


@pytest.mark.parametrize("adaptive", [False, True])
def test_repr_says_how_it_steps(adaptive):
    w = nn.Parameter(torch.ones(3))
    shown = repr(SAM([w], torch.optim.SGD, adaptive=adaptive, lr=0.1))
    assert f"\nbase: SGD{', adaptive' if adaptive else ''}, 0 steps taken\nmask: DenseMask(" in shown
