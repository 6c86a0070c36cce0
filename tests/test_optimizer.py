"""The protocol of a step, and the company it keeps: accumulation, clipping, autocast, GradScaler, frozen weights."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsam
from cases import magnitude, optimizer, same, task, weights
from reference import Reference
from sparsam import SAM, RandomMask, TopKMask

BASE = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


def close(model, reference, tolerance=1e-12):
    for a, b in zip(
        (*model.parameters(), *model.buffers()), (*reference.parameters(), *reference.buffers()), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def reference_for(t, **options):
    def loss(model, k):
        return F.cross_entropy(model(t.x), t.y)

    return Reference(copy.deepcopy(t.model), loss, rho=0.3, **BASE, **options)


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


@pytest.mark.parametrize("way", ["closure", "two steps", "context"])
def test_accumulation_over_micro_batches(way):
    t = task(samples=24, dropout=0.25)
    parts = [slice(0, 8), slice(8, 16), slice(16, 24)]

    def part_loss(model, k):
        return F.cross_entropy(model(t.x[parts[k]]), t.y[parts[k]])

    reference = Reference(copy.deepcopy(t.model), part_loss, rho=0.3, **BASE)
    opt = SAM(t.model.parameters(), torch.optim.SGD, rho=0.3, model=t.model, **BASE)

    def accumulate():
        for k in range(3):
            (part_loss(t.model, k) / 3).backward()

    for step in range(5):
        torch.manual_seed(step)
        opt.zero_grad()
        if way == "closure":
            opt.step(lambda: (opt.zero_grad(), accumulate()))
        elif way == "two steps":
            accumulate()
            opt.first_step(zero_grad=True)
            accumulate()
            opt.second_step(zero_grad=True)
        else:
            accumulate()
            with opt.perturbed():
                opt.zero_grad()
                accumulate()
            opt.step()
        torch.manual_seed(step)
        reference.step(micro_batches=3)
        close(t.model, reference.model)
    assert t.model[1].num_batches_tracked == 15  # as often as plain training with accumulation


def test_clipping_in_both_passes():
    t = task()
    reference = reference_for(t, clip=0.05)
    opt = SAM(t.model.parameters(), torch.optim.SGD, rho=0.3, model=t.model, **BASE)

    def closure():
        loss = t.closure(opt)()
        norm = nn.utils.clip_grad_norm_(t.model.parameters(), 0.05)
        assert norm > 0.05  # it does clip
        return loss

    for _ in range(5):
        opt.step(closure)
        reference.step()
        close(t.model, reference.model)


def test_clipping_the_second_gradient_only_is_the_same_because_the_first_is_normalised():
    one, other = task(), task()
    both, second = (SAM(t.model.parameters(), torch.optim.SGD, rho=0.3, model=t.model, **BASE) for t in (one, other))
    for _ in range(5):
        one.closure(both)()
        nn.utils.clip_grad_norm_(one.model.parameters(), 0.05)
        both.first_step(zero_grad=True)
        one.loss().backward()
        nn.utils.clip_grad_norm_(one.model.parameters(), 0.05)
        both.second_step()
        other.closure(second)()
        second.first_step(zero_grad=True)
        other.loss().backward()
        nn.utils.clip_grad_norm_(other.model.parameters(), 0.05)
        second.second_step()
        close(one.model, other.model)


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


def test_frozen_parameters_take_no_part():
    t = task()
    for p in t.model[0].parameters():
        p.requires_grad_(False)
    frozen = [p.clone() for p in t.model[0].parameters()]
    opt = SAM(t.model.parameters(), torch.optim.SGD, rho=0.3, mask=TopKMask(0.5, magnitude), **BASE)
    for _ in range(3):
        opt.step(t.closure(opt))
    assert same([p.detach() for p in t.model[0].parameters()], frozen)
    trainable = sum(p.numel() for p in t.model.parameters() if p.requires_grad)
    assert sum(int(m.sum()) for m in opt.masks()) == round(0.5 * trainable)
    assert not opt.masks()[0].any()


@pytest.mark.parametrize("mask", ["none", "norm", "random-fixed", "dynamic", "fisher", "topk", "nm"])
def test_parameters_may_be_frozen_and_freed_on_the_way(mask):
    t = task()
    t.model[3].requires_grad_(False)
    opt = optimizer(t, mask)
    opt.step(t.closure(opt))
    assert not opt.masks()[4].any()
    t.model[3].requires_grad_(True)
    opt.step(t.closure(opt))
    assert opt.masks()[4].any() or mask == "norm"
    if opt.mask.settings().get("sparsity") is not None:
        total = sum(p.numel() for p in t.model.parameters())
        assert sum(int(m.sum()) for m in opt.masks()) == round((1 - opt.mask.sparsity) * total)


def test_parameters_without_gradient_in_one_of_the_passes():
    used, first_only, second_only, never = (nn.Parameter(torch.ones(2)) for _ in range(4))
    opt = SAM([used, first_only, second_only, never], torch.optim.SGD, rho=1.0, lr=0.5)
    (used.sum() + first_only.sum()).backward()
    opt.first_step(zero_grad=True)
    torch.testing.assert_close(first_only.data, torch.full((2,), 1.5))  # 1 + 1/|(1, 1, 1, 1)|
    assert second_only.tolist() == never.tolist() == [1, 1]
    (used.sum() + second_only.sum()).backward()
    opt.second_step()
    assert first_only.tolist() == never.tolist() == [1, 1]
    assert used.tolist() == second_only.tolist() == [0.5, 0.5]


def test_shared_weights_are_perturbed_once():
    layer = nn.Linear(3, 3, bias=False).double()
    model = nn.Sequential(layer, nn.Tanh(), layer)
    x = torch.randn(4, 3, dtype=torch.float64)
    reference = Reference(copy.deepcopy(model), lambda m, k: m(x).square().mean(), rho=0.3, lr=0.1)
    opt = SAM(model.parameters(), torch.optim.SGD, rho=0.3, lr=0.1)
    for _ in range(3):
        opt.step(lambda: (opt.zero_grad(), model(x).square().mean().backward()))
        reference.step()
    close(model, reference.model)


def test_running_statistics_move_once_a_step_also_with_cumulative_averages():
    for momentum in (0.1, None):
        plain = task()
        for module in plain.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = momentum
        sam = plain._replace(model=copy.deepcopy(plain.model))
        opt = SAM(sam.model.parameters(), torch.optim.SGD, rho=0.3, model=sam.model, lr=0.0)
        for _ in range(4):
            plain.loss()
            opt.step(sam.closure(opt))
        assert same(list(sam.model.buffers()), list(plain.model.buffers()))


def test_without_a_model_statistics_move_twice_and_dropout_differs():
    """What `model=` is for."""
    t = task(dropout=0.5)
    opt = SAM(t.model.parameters(), torch.optim.SGD, rho=0.0, lr=0.0)
    losses = []
    opt.step(lambda: losses.append(t.closure(opt)().item()))
    assert t.model[1].num_batches_tracked == 2
    assert losses[0] != losses[1]


def test_a_model_in_eval_mode_stays_as_it_is():
    t = task(dropout=0.5)
    t.model.eval()
    buffers = [b.clone() for b in t.model.buffers()]
    opt = optimizer(t)
    opt.step(t.closure(opt))
    assert same(list(t.model.buffers()), buffers)


def test_random_numbers_inside_the_closure_are_drawn_once():
    """Augmentation inside the closure, before zero_grad, is the same in both passes."""
    t = task(dropout=0.5)
    opt = optimizer(t)
    seen = []

    def closure():
        noise = torch.randn(3)
        seen.append(noise)
        return t.closure(opt)()

    opt.step(closure)
    opt.step(closure)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[0], seen[2])


def test_drawing_between_zero_grad_and_the_first_pass_gives_one_warning():
    t = task(dropout=0.5)
    opt = optimizer(t)

    def step():
        opt.zero_grad()
        torch.rand(1)
        t.loss().backward()
        opt.first_step(zero_grad=True)
        t.loss().backward()
        opt.second_step()

    with pytest.warns(UserWarning, match="drew different amounts of random numbers.*zero_grad"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()


def test_drawing_without_dropout_does_not_warn():
    t = task()
    opt = optimizer(t)
    opt.zero_grad()
    torch.rand(1)
    t.loss().backward()
    state = torch.get_rng_state()
    opt.first_step(zero_grad=True)
    t.loss().backward()
    opt.second_step()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("way", ["closure", "context"])
def test_two_passes_inside_one_autocast_block(way):
    """Without clearing autocast's cache of casts the second pass would see w again, and SAM be SGD."""
    t = task(torch.float32)
    twin = copy.deepcopy(t.model)
    opt = SAM(t.model.parameters(), torch.optim.SGD, rho=2.0, lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        if way == "closure":
            opt.step(t.closure(opt))
        else:
            t.loss().backward()
            with opt.perturbed():
                opt.zero_grad()
                t.loss().backward()
            opt.step()
        after = t.loss().item()

    def gradient():
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(twin(t.x), t.y)
        return torch.autograd.grad(loss, list(twin.parameters()))

    params = list(twin.parameters())
    w, g = [p.detach().clone() for p in params], gradient()
    norm = math.sqrt(sum(float(v) ** 2 for gradient in g for v in gradient.reshape(-1)))
    with torch.no_grad():
        for p, gp in zip(params, g, strict=True):
            p += 2.0 * gp / norm
    second = gradient()
    with torch.no_grad():
        for p, wp, gp in zip(params, w, second, strict=True):
            p.copy_(wp - 0.1 * gp)
    assert not torch.allclose(second[0], g[0], rtol=0.05)
    for a, b in zip(t.model.parameters(), params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert after == pytest.approx(F.cross_entropy(twin(t.x), t.y).item(), abs=1e-2)


def test_grad_scaler_with_an_overflow():
    """The idiom of README. An overflow skips the step and leaves w; the next step goes on as if nothing had been."""
    t = task(torch.float32)
    x = t.x.double()
    opt = SAM(t.model.parameters(), torch.optim.SGD, rho=0.3, model=t.model, **BASE)
    reference = Reference(copy.deepcopy(t.model).double(), lambda m, k: F.cross_entropy(m(x), t.y), rho=0.3, **BASE)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    for step in range(6):
        overflow = step in (0, 3)
        before = [p.detach().clone() for p in t.model.parameters()]
        opt.zero_grad()
        scaler.scale(t.loss()).backward()
        with opt.perturbed():
            opt.zero_grad()
            loss = t.loss() * (math.inf if overflow else 1.0)
            scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(t.model.parameters(), 1e3)
        scaler.step(opt)
        scaler.update()
        if overflow:
            assert same([p.detach() for p in t.model.parameters()], before)
            for a, b in zip(t.model.buffers(), reference.model.buffers(), strict=True):
                b.copy_(a)
        else:
            reference.step()
            close_32(t.model, reference.model)
    assert scaler.get_scale() == 2.0**8


@pytest.mark.parametrize("mask", ["random", "dynamic", "fisher", "topk"])
def test_a_skipped_step_that_is_due_for_a_mask_is_as_if_it_had_not_been(mask):
    """The overflow comes in the second pass, after the mask was made; the retry makes the same mask."""
    clean, skipping = task(), task()
    masks = []
    for t, overflows in ((clean, ()), (skipping, (0, 3))):
        opt = optimizer(t, mask)
        for step in range(5):
            for attempt in range(2 if step in overflows else 1):
                opt.zero_grad()
                buffers = [b.clone() for b in t.model.buffers()]
                t.loss().backward()
                with opt.perturbed():
                    opt.zero_grad()
                    t.loss().backward()
                if step in overflows and attempt == 0:  # what GradScaler does: it does not call step
                    saved = opt.state_dict()
                    for b, old in zip(t.model.buffers(), buffers, strict=True):
                        b.copy_(old)
                    if step == 3:  # a run that was saved here makes the same mask, too
                        opt = optimizer(t, mask)
                        opt.load_state_dict(saved)
                    continue
                opt.step()
        masks.append(opt.masks())
    assert same(*masks)
    assert same(weights(clean.model), weights(skipping.model))


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


def test_statistics_that_a_layer_replaces_move_once():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(3))
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            self.running_mean = 0.9 * self.running_mean + 0.1 * x.mean(0).detach()
            return x * self.weight

    model, x = Running(), torch.ones(2, 3)
    opt = SAM(model.parameters(), torch.optim.SGD, model=model, lr=0.1)
    opt.step(lambda: (opt.zero_grad(), model(x).sum().backward()))
    torch.testing.assert_close(model.running_mean, torch.full((3,), 0.1))


def test_a_failure_on_the_way_to_the_second_pass_leaves_w(monkeypatch):
    t = task()
    opt = optimizer(t)
    t.loss().backward()
    before = weights(t.model)

    def fails(*_):
        raise MemoryError

    monkeypatch.setattr("sparsam.passes.SavedBuffers", fails)
    with pytest.raises(MemoryError), opt.perturbed():
        pass
    assert same(weights(t.model), before)
    monkeypatch.undo()
    opt.step(t.closure(opt))


def test_the_warning_may_be_an_error_and_still_leaves_everything_in_order():
    t = task(dropout=0.5)
    opt = optimizer(t)
    opt.zero_grad()
    torch.rand(1)
    t.loss().backward()
    before = weights(t.model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="drew different amounts"), opt.perturbed():
            t.loss().backward()
    assert same(weights(t.model), before)
    opt.step(t.closure(opt))


def test_compiled_models():
    eager, compiled = task(dropout=0.3), task(dropout=0.3)
    for t, network in ((eager, eager.model), (compiled, torch.compile(compiled.model, backend="aot_eager"))):
        torch.manual_seed(0)
        run = t._replace(model=network)
        opt = SAM(network.parameters(), torch.optim.SGD, rho=0.1, mask=sparsam.NormMask(network), lr=0.1)
        for _ in range(2):
            opt.step(run.closure(opt))
    close(eager.model, compiled.model, 1e-10)


def close_32(model, reference):
    for a, b in zip(
        (*model.parameters(), *model.buffers()), (*reference.parameters(), *reference.buffers()), strict=True
    ):
        torch.testing.assert_close(a.to(b.dtype), b, rtol=2e-4, atol=2e-5)


def test_an_overflow_in_the_first_pass_perturbs_nothing():
    t = task(torch.float32)
    opt = optimizer(t)
    (t.loss() * math.inf).backward()
    before = [p.detach().clone() for p in t.model.parameters()]
    with opt.perturbed():
        assert same([p.detach() for p in t.model.parameters()], before)
    opt.zero_grad()
    with pytest.raises(RuntimeError, match="without closure"):
        opt.step()


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
    assert not opt._saved
