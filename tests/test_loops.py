"""SAM in a training loop: accumulation, clipping, autocast, GradScaler, BatchNorm, dropout, frozen weights."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsam
from cases import magnitude, optimizer, same, task, weights
from reference import Reference
from sparsam import SAM, EveryStep, LastSteps, MomentumAscent, SuffixMask, TopKMask

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


@pytest.mark.parametrize("kind", ["all weights", "replay", "momentum"])
def test_the_first_outputs_in_the_closure_are_those_at_w(kind):
    """As docs/loops.md takes a metric; a step along the momentum has its only call at w + eps."""
    t = task()
    policy = {
        "all weights": {"model": t.model},
        "replay": {"mask": SuffixMask(t.model, "6")},
        "momentum": {"ascent": MomentumAscent(), "model": t.model},
    }[kind]
    opt = SAM(t.model.parameters(), torch.optim.SGD, rho=0.3, **policy, **BASE)
    outputs = []

    def closure():
        opt.zero_grad()
        logits = t.model(t.x)
        outputs.append(logits.detach())
        loss = F.cross_entropy(logits, t.y)
        loss.backward()
        return loss

    for step in range(4):  # replay proves its path in the first two
        with torch.no_grad():
            at_w = copy.deepcopy(t.model)(t.x)
        outputs.clear()
        opt.step(closure)
        assert len(outputs) == {"all weights": 2, "replay": 3 if step < 2 else 2, "momentum": 1}[kind]
        assert torch.equal(outputs[0], at_w) == (kind != "momentum" or step == 0)  # no momentum yet


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


def smooth_task(samples=24):
    """A network without BatchNorm: the mean gradient of equal parts is that of the joined batch."""
    t = task(samples=samples)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.GroupNorm(2, 6), nn.Tanh(), nn.Linear(6, 3))
    return t._replace(model=model.double())


@pytest.mark.parametrize("mask", [None, sparsam.RandomMask(0.5, interval=2)], ids=["dense", "random"])
@pytest.mark.parametrize("ascent", [None, sparsam.FriendlyAscent()], ids=["gradient", "friendly"])
def test_accumulation_is_sam_on_the_joined_batch(mask, ascent):
    t = smooth_task()
    joined = t._replace(model=copy.deepcopy(t.model))
    opt, other = (
        SAM(each.model.parameters(), torch.optim.SGD, rho=0.3, mask=mask, ascent=ascent, **BASE) for each in (t, joined)
    )
    reference = reference_for(
        t,
        friendly=(1.0, 0.6) if ascent else None,
        mask=mask and (lambda r: [m.reshape(-1).numpy() for m in other.masks()]),
    )

    def closure():
        opt.zero_grad()
        for x, y in zip(t.x.chunk(4), t.y.chunk(4), strict=True):
            (F.cross_entropy(t.model(x), y) / 4).backward()

    for _ in range(5):
        opt.step(closure)
        other.step(joined.closure(other))
        reference.step()
        close(t.model, reference.model)
        close(t.model, joined.model)


@pytest.mark.parametrize("model", [True, False], ids=["with model=", "without"])
def test_ascent_by_the_first_micro_batch_alone(model):
    """The ascent costs 1/k of a pass: k + 1 forward passes a step instead of 2 k."""
    t, k = smooth_task(), 4
    parts = list(zip(t.x.chunk(k), t.y.chunk(k), strict=True))
    reference = Reference(
        copy.deepcopy(t.model), lambda m, i: F.cross_entropy(m(parts[i][0]), parts[i][1]), rho=0.3, **BASE
    )
    opt = SAM(t.model.parameters(), torch.optim.SGD, rho=0.3, model=t.model if model else None, **BASE)
    forwards = []
    t.model.register_forward_hook(lambda *_: forwards.append(1))
    for _ in range(5):
        opt.zero_grad()
        F.cross_entropy(t.model(parts[0][0]), parts[0][1]).backward()
        with opt.perturbed():
            opt.zero_grad()
            for x, y in parts:
                (F.cross_entropy(t.model(x), y) / k).backward()
        opt.step()
        reference.step(micro_batches=k, ascent_batches=1)
        close(t.model, reference.model)
    assert len(forwards) == 5 * (k + 1)


def test_statistics_of_the_first_micro_batch_alone():
    """What docs/loops.md says of BatchNorm, where the ascent is by the first micro-batch."""
    t = task()
    plain = t._replace(model=copy.deepcopy(t.model), x=t.x[:8], y=t.y[:8])
    opt = SAM(t.model.parameters(), torch.optim.SGD, rho=0.3, model=t.model, **BASE)
    opt.zero_grad()
    F.cross_entropy(t.model(t.x[:8]), t.y[:8]).backward()
    with opt.perturbed():
        opt.zero_grad()
        for x, y in zip(t.x.chunk(3), t.y.chunk(3), strict=True):
            (F.cross_entropy(t.model(x), y) / 3).backward()
    opt.step()
    plain.loss()
    assert same(list(t.model.buffers()), list(plain.model.buffers()))


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


class Noisy(torch.optim.SGD):
    """A base optimizer that draws random numbers, as private training does."""

    def step(self, closure=None):
        torch.rand(3)
        return super().step(closure)


@pytest.mark.parametrize("base", [torch.optim.SGD, Noisy])
@pytest.mark.parametrize(
    "schedule", [EveryStep(), LastSteps(0.5, 4), LastSteps(0.5, 4, before=MomentumAscent())], ids=["two", "none", "one"]
)
def test_two_step_use_after_closures_repeats_dropout(schedule, base):
    """Whatever kind of step the closure took before, and although nobody calls opt.zero_grad()."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    opt = SAM(model.parameters(), base, schedule=schedule, model=model, lr=0.1, momentum=0.9)
    x, y, kept = torch.randn(32, 8), torch.randint(2, (32,)), []

    def backward():
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        opt.step(backward)
    model[1].register_forward_hook(lambda module, inputs, output: kept.append(output != 0))
    for _ in range(2):
        backward()
        opt.first_step()
        backward()
        opt.second_step()
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[2], kept[3])
    assert not torch.equal(kept[0], kept[2])


def test_a_closure_may_leave_gradients_off():
    weights = []
    for leaves_off in (False, True):
        t = task()
        opt = SAM(t.model.parameters(), torch.optim.SGD, rho=0.3, lr=0.1)
        plain = t.closure(opt)

        def closure(plain=plain, leaves_off=leaves_off):
            loss = plain()
            torch.set_grad_enabled(not leaves_off)
            return loss

        opt.step(closure)
        assert torch.is_grad_enabled()
        weights.append([p.detach().clone() for p in t.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
