"""The passes of a step without a closure, as trainers with a step of their own take them; packages that are missing."""

from __future__ import annotations

import copy
import sys
from importlib import import_module

import pytest
import torch
from torch import nn

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
