"""The passes of a step without a closure, as trainers with a step of their own take them; packages that are missing."""

from __future__ import annotations

import copy
import sys
from importlib import import_module

import pytest
import torch
from plain_loops import smooth_network
from ranks import in_ranks
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import ASCENTS, SCHEDULES, Policy, optimizer, same, task, weights
from sparsam import SAM
from sparsam.errors import MissingPackageError
from sparsam.integrations.passes import current_scale, find_sam, run_passes


@pytest.mark.parametrize(
    "policy", [*(Policy(ascent=a) for a in ASCENTS), *(Policy(schedule=s) for s in SCHEDULES)], ids=str
)
def test_equals_a_step_with_a_closure(policy):
    one, other = task(dropout=0.25), task(dropout=0.25)
    opt, twin = (optimizer(t, **policy._asdict()) for t in (one, other))
    for step in range(5):
        torch.manual_seed(step)
        loss = run_passes(opt, lambda: _backward(one.loss()))
        opt.step()
        torch.manual_seed(step)
        assert torch.equal(loss, twin.step(other.closure(twin)))
        assert same(weights(one.model), weights(other.model))


def on_share(rank: int) -> dict[tuple[str, int], list[list[torch.Tensor]]]:
    """Train replicas with a closure and without one, by rows and by micro-batches, with batches of different sizes."""
    x, y, *_ = (t := task(samples=24)).x, t.y
    own = [(x[: 4 - rank], y[: 4 - rank]) for x, y in zip(x[rank::2].split(4), y[rank::2].split(4), strict=True)]
    results = {}
    for perturbation in ("global", "local"):
        for k in (1, 3):
            models = [DistributedDataParallel(smooth_network()) for _ in range(2)]
            closed, opt = (
                SAM(m.parameters(), rho=0.3, share=0.5, model=m, perturbation=perturbation, lr=0.1) for m in models
            )

            def backward(rows, model, k=k):
                parts = [F.cross_entropy(model(x), y) / k for x, y in rows.micro_batches(own[:k])]
                return _backward(torch.stack(parts).sum())

            for _ in range(3):
                closed.step(lambda rows, of=models[0], opt=closed: (opt.zero_grad(), backward(rows, of))[1])
                run_passes(opt, lambda rows, of=models[1]: backward(rows, of))
                opt.step()
            results[perturbation, k] = [[p.detach() for p in m.parameters()] for m in models]
    return results


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
def test_a_share_on_replicas_equals_that_of_a_closure():
    first, second = in_ranks(on_share)
    for key, (closed, run) in first.items():
        torch.testing.assert_close(run, closed, rtol=1e-12, atol=1e-12)
        assert same(run, second[key][1])
    assert not same(first["global", 1][1], first["local", 1][1])


def test_gradients_of_a_step_that_was_skipped_do_not_count():
    one, other = task(dropout=0.25), task(dropout=0.25)
    opt, twin = (optimizer(t, schedule="every-nth") for t in (one, other))
    for step in range(4):
        for skip in (True, False):
            torch.manual_seed(step)
            buffers = [b.clone() for b in one.model.buffers()]
            run_passes(opt, lambda: _backward(one.loss()))
            if skip:
                for b, old in zip(one.model.buffers(), buffers, strict=True):
                    b.copy_(old)
        opt.step()
        torch.manual_seed(step)
        twin.step(other.closure(twin))
        assert same(weights(one.model), weights(other.model))
        assert same(list(one.model.buffers()), list(other.model.buffers()))


def test_scale_is_read_on_the_device():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    scale = current_scale(scaler, torch.device("cpu"))
    assert isinstance(scale, torch.Tensor)
    assert scale == 2.0**7
    assert current_scale(None, torch.device("cpu")) is None
    assert current_scale(torch.amp.GradScaler("cpu", enabled=False), torch.device("cpu")) is None


def test_sam_is_found_inside_wrappers():
    base = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    opt = SAM.wrap(copy.deepcopy(base))

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    assert find_sam(Wrapper(Wrapper(opt))) is opt
    assert find_sam(Wrapper(base)) is find_sam(None) is None


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("lightning", "lightning.pytorch", "lightning"), ("huggingface", "transformers", "hf")],
)
def test_a_missing_package_is_named_with_its_extra(module, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"sparsam.integrations.{module}", raising=False)
    name = package.partition(".")[0]
    with pytest.raises(MissingPackageError, match=rf"need the package {name}: pip install 'sparsam\[{extra}\]'"):
        import_module(f"sparsam.integrations.{module}")


def _backward(loss):
    loss.backward()
    return loss
