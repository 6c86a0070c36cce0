"""Accelerate itself trains with SAM, without a helper: the same weights as a plain loop, under one seed.

`accelerator.prepare` hides `first_step`, `perturbed` and `needs_second_pass`. They are called on the optimizer that was
prepared; the step goes through the one that `prepare` returned.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from plain_loops import BASE, as_launched, scale_on_cpu, smooth_network, train, train_on_share, train_scaled
from ranks import in_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from cases import Policy, optimizer, same, task, weights
from sparsam import SAM, RandomMask
from sparsam.integrations.passes import run_passes
from sparsam.share import WHOLE

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
SHARED = [policy for policy in POLICIES if policy.mask != "suffix" and policy.ascent != "momentum"]


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

    def backward(rows=WHOLE):
        batches = rows.micro_batches(kept)
        for i, (x, y) in enumerate(batches):
            with accelerator.no_sync(model) if i < len(batches) - 1 else nullcontext():
                accelerator.backward(F.cross_entropy(model(x), y))

    def closure(rows=WHOLE):
        prepared.zero_grad()
        backward(rows)
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


@pytest.mark.parametrize("policy", SHARED, ids=str)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("way", ["closure", "run_passes"])
def test_a_share_equals_one_by_hand(policy, k, way):
    """Rows, or one micro-batch of three; the last step of an epoch has two rows."""
    t, other = task(dropout=0.25, samples=26), task(dropout=0.25, samples=26)
    opt, twin = optimizer(t, **policy._replace(share=0.4)._asdict()), optimizer(other, **policy._asdict())
    limit = 0.5 if way == "run_passes" else None
    torch.manual_seed(0)
    fit(t, opt, way=way, k=k, clip=limit)
    torch.manual_seed(0)
    clip = limit and (lambda params: nn.utils.clip_grad_norm_(params, limit))
    train_on_share(other.model, twin, other.dataset, 0.4, k=k, clip=clip)
    torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize("k", [1, 2])
def test_a_share_in_fp16(k):
    t, other = task(torch.float32, dropout=0.25), task(torch.float32, dropout=0.25)
    torch.manual_seed(0)
    fit(t, optimizer(t, ascent="friendly", share=0.5), way="run_passes", k=k, clip=0.1, scaled=True)
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    clip = lambda params: nn.utils.clip_grad_norm_(params, 0.1)  # noqa: E731
    twin = optimizer(other, ascent="friendly")
    train_on_share(other.model, twin, other.dataset, 0.5, k=k, clip=clip, scaler=scaler)
    torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-4, atol=1e-5)


def test_fp16_takes_no_closure():
    t = task(torch.float32)
    before = weights(t.model)
    with pytest.raises(AssertionError, match=r"script did not use scaler\.scale\(loss or outputs\) earlier"):
        fit(t, sam(t.model), way="closure", scaled=True)
    assert same(weights(t.model), before)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_state_that_is_saved_and_loaded(tmp_path, share):
    whole, half, resumed = (task() for _ in range(3))
    options = {"mask": RandomMask(0.5, interval=2), "share": share}
    fit(whole, sam(whole.model, **options), way="closure", k=2)
    fit(half, sam(half.model, **options), way="closure", k=2, epochs=1).save_state(tmp_path)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    opt = sam(resumed.model, **options)
    accelerator.prepare(resumed.model, opt)
    accelerator.load_state(tmp_path)
    assert opt.steps == 3
    if share == 1:
        train(resumed.model, opt, resumed.dataset, k=2, epochs=1)
        assert same(weights(resumed.model), weights(whole.model))
    else:
        train_on_share(resumed.model, opt, resumed.dataset, share, k=2, epochs=1)
        torch.testing.assert_close(weights(resumed.model), weights(whole.model), rtol=1e-12, atol=1e-12)


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


SHARES = [(way, k, 0.5) for way in ("closure", "run_passes") for k in (1, 3)]
JOBS = [("closure", 3, 1.0), ("two steps", 3, 1.0), *SHARES]
"""How to step, how many micro-batches, and which share."""


def distributed(rank: int) -> list[list[torch.Tensor]]:
    as_launched(rank)
    results = []
    for way, k, share in JOBS:
        t = task(samples=24)._replace(model=smooth_network())
        # Batches of 2 go to the ranks in turn: together they are batches of 4.
        clip = None if share < 1 and way == "closure" else 0.1
        assert fit(t, sam(t.model, share=share), way=way, k=k, batch=2, clip=clip).num_processes == 2
        results.append(weights(t.model))
        accelerate.state.GradientState._reset_state()
        accelerate.state.AcceleratorState._reset_state()
    return results


def test_ddp_equals_one_process_on_the_joined_batch():
    clip = lambda params: nn.utils.clip_grad_norm_(params, 0.1)  # noqa: E731
    for (way, k, share), a, b in zip(JOBS, *in_ranks(distributed), strict=True):
        t = task(samples=24)._replace(model=smooth_network())
        if share == 1:
            train(t.model, sam(t.model), t.dataset, batch=4, k=k, clip=clip)
        else:
            shares_first = Subset(t.dataset, [4 * i + j for i in range(6) for j in (0, 2, 1, 3)])
            options = {} if way == "closure" else {"clip": clip}
            train_on_share(t.model, sam(t.model), shares_first, share, batch=4, k=k, **options)
        assert same(a, b)
        torch.testing.assert_close(a, weights(t.model), rtol=1e-12, atol=1e-12)
