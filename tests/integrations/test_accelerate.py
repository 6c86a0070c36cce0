"""Accelerate itself trains with SAM, without a helper: the same weights as a plain loop, under one seed.

`accelerator.prepare` hides `first_step`, `perturbed` and `needs_second_pass`. They are called on the optimizer that was
prepared; the step goes through the one that `prepare` returned.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from plain_loops import BASE, as_launched, scale_on_cpu, smooth_network, train, train_scaled
from ranks import in_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from cases import Policy, optimizer, same, task, weights
from sparsam import SAM, RandomMask
from sparsam.integrations.passes import run_passes

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:this is step"),  # LastSteps of tests/cases.py ends before these runs do
    pytest.mark.filterwarnings("ignore:the second pass is computed in full"),  # with a cut
]
POLICIES = [
    Policy(),
    Policy("dynamic"),
    Policy("suffix"),
    Policy(ascent="friendly"),
    Policy(ascent="momentum"),
    Policy(schedule="last-steps-momentum"),
    Policy("random", schedule="every-nth"),
]


@pytest.fixture(autouse=True)
def fresh_state():
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def sam(model, **options):
    return SAM(model.parameters(), torch.optim.SGD, **{"rho": 0.3, "model": model, **BASE, **options})


def fit(t, opt, *, way, k=1, batch=4, clip=None, scaled=False, mixed_precision=None, epochs=2, accelerator=None):
    """Train as docs/integrations.md shows, with a closure or in two steps; `opt` is the SAM itself."""
    accelerator = accelerator or accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=k, mixed_precision=mixed_precision
    )
    scaler = scale_on_cpu(accelerator) if scaled else None
    loader = DataLoader(t.dataset, batch_size=batch)
    model, prepared, loader = accelerator.prepare(t.model, opt, loader)
    assert not hasattr(prepared, "perturbed")
    kept = []

    def backward():
        for i, (x, y) in enumerate(kept):
            with accelerator.no_sync(model) if i < len(kept) - 1 else nullcontext():
                accelerator.backward(F.cross_entropy(model(x), y))

    def closure():
        prepared.zero_grad()
        backward()
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), clip)

    for _ in range(epochs):
        for data in loader:
            with accelerator.accumulate(model):
                kept.append(data)
                if not accelerator.sync_gradients:
                    continue
                if way == "closure":
                    prepared.step(closure)
                elif way == "run_passes":
                    run_passes(opt, backward, scaler and torch.tensor(scaler.get_scale()))
                    if clip:
                        accelerator.clip_grad_norm_(model.parameters(), clip)
                    prepared.step()
                else:
                    opt.zero_grad()
                    if opt.needs_second_pass:
                        backward()
                    with opt.perturbed(scale=scaler and scaler.get_scale()):
                        opt.zero_grad()
                        backward()
                    if clip:
                        accelerator.clip_grad_norm_(model.parameters(), clip)
                    prepared.step()
                kept.clear()
    return accelerator


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("way", ["closure", "two steps", "run_passes"])
def test_equals_a_plain_loop(policy, k, way):
    """With BatchNorm, dropout, clipping, and fewer than k batches in each epoch's last step."""
    t, other = task(dropout=0.25, samples=28), task(dropout=0.25, samples=28)
    opt, twin = (optimizer(each, **policy._asdict()) for each in (t, other))
    torch.manual_seed(0)
    fit(t, opt, way=way, k=k, clip=0.5)
    torch.manual_seed(0)
    clip = lambda params: nn.utils.clip_grad_norm_(params, 0.5)  # noqa: E731
    train(other.model, twin, other.dataset, k=k, clip=clip, clip_first=way == "closure")
    if policy.mask == "suffix" and way != "closure":  # replayed in the plain loop
        torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-12, atol=1e-12)
    else:
        assert same(weights(t.model), weights(other.model))


@pytest.mark.parametrize("way", ["closure", "two steps"])
def test_bf16(way):
    t, other = task(torch.float32), task(torch.float32)
    fit(t, sam(t.model), way=way, k=2, mixed_precision="bf16")
    train(other.model, sam(other.model), other.dataset, k=2, autocast=torch.bfloat16)
    torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ascent", ["gradient", "friendly"])
@pytest.mark.parametrize("way", ["two steps", "run_passes"])
def test_fp16_without_a_closure(ascent, way):
    t, other = task(torch.float32, dropout=0.25), task(torch.float32, dropout=0.25)
    torch.manual_seed(0)
    fit(t, optimizer(t, ascent=ascent), way=way, k=2, clip=0.1, scaled=True)
    torch.manual_seed(0)
    train_scaled(other.model, optimizer(other, ascent=ascent), other.dataset, k=2)
    torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-4, atol=1e-5)


def test_fp16_takes_no_closure():
    t = task(torch.float32)
    before = weights(t.model)
    with pytest.raises(AssertionError, match=r"script did not use scaler\.scale\(loss or outputs\) earlier"):
        fit(t, sam(t.model), way="closure", scaled=True)
    assert same(weights(t.model), before)


def test_a_state_that_is_saved_and_loaded(tmp_path):
    whole, half, resumed = (task() for _ in range(3))
    mask = RandomMask(0.5, interval=2)
    fit(whole, sam(whole.model, mask=mask), way="closure", k=2)
    fit(half, sam(half.model, mask=mask), way="closure", k=2, epochs=1).save_state(tmp_path)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    opt = sam(resumed.model, mask=mask)
    accelerator.prepare(resumed.model, opt)
    accelerator.load_state(tmp_path)
    assert opt.steps == 3
    train(resumed.model, opt, resumed.dataset, k=2, epochs=1)
    assert same(weights(resumed.model), weights(whole.model))


def test_schedulers_are_prepared_too():
    t, other = task(), task()
    accelerator = accelerate.Accelerator(cpu=True)
    model, opt, loader = accelerator.prepare(t.model, sam(t.model), DataLoader(t.dataset, batch_size=4))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(opt, 1, 0.5))
    twin = sam(other.model)
    halved = torch.optim.lr_scheduler.StepLR(twin, 1, 0.5)
    for (x, y), (u, v) in zip(loader, DataLoader(other.dataset, batch_size=4), strict=True):
        opt.step(lambda x=x, y=y: (opt.zero_grad(), accelerator.backward(F.cross_entropy(model(x), y))))
        scheduler.step()
        twin.step(lambda u=u, v=v: (twin.zero_grad(), F.cross_entropy(other.model(u), v).backward()))
        halved.step()
    assert twin.param_groups[0]["lr"] == opt.param_groups[0]["lr"] == BASE["lr"] / 2**6
    assert same(weights(t.model), weights(other.model))


def distributed(rank: int) -> list[list[torch.Tensor]]:
    as_launched(rank)
    results = []
    for way in ("closure", "two steps"):
        t = task(samples=24)._replace(model=smooth_network())
        # Batches of 2 go to the ranks in turn: together they are batches of 4.
        assert fit(t, sam(t.model), way=way, k=3, batch=2, clip=0.1).num_processes == 2
        results.append(weights(t.model))
        accelerate.state.GradientState._reset_state()
        accelerate.state.AcceleratorState._reset_state()
    return results


def test_ddp_equals_one_process_on_the_joined_batch():
    first, second = in_ranks(distributed)
    t = task(samples=24)._replace(model=smooth_network())
    clip = lambda params: nn.utils.clip_grad_norm_(params, 0.1)  # noqa: E731
    train(t.model, sam(t.model), t.dataset, batch=4, k=3, clip=clip)
    for a, b in zip(first, second, strict=True):
        assert same(a, b)
        torch.testing.assert_close(a, weights(t.model), rtol=1e-12, atol=1e-12)
