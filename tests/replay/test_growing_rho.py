"""A path that was proven where weights hardly moved is proven again when they do."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from replay_models import BASE, Plain
from torch import nn

from sparsam import SAM, SuffixMask

RHO = 0.5


class Reads(nn.Module):
    """Adds the mean of another module's weights, without a gradient and out of replay's sight."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.linear, self.others = nn.Linear(6, 6), [other]

    def forward(self, x):
        return torch.tanh(self.linear(x)) + self.others[0].weight.detach().mean()


def network(leaks: bool) -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Linear(6, 3)
    stem = Reads(head) if leaks else nn.Linear(6, 6)
    return nn.Sequential(stem, nn.Linear(6, 6), nn.Tanh(), head)


def steps(model, rhos, scales=None, make=float):
    """Take a step for each rho; return how often the closure was called, the warnings, and how far weights are off."""
    x = torch.linspace(-2, 2, 48).sin().view(8, 6).to(model[1].weight.dtype)
    plain = Plain(copy.deepcopy(model), ("0.",))
    opt = SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=SuffixMask(model, "1"), **BASE)
    calls, off, said = [], [], []
    for rho, scale in zip(rhos, scales or [1.0] * len(rhos), strict=True):

        def closure_of(network, zero_grad, scale=scale):
            def closure():
                calls[-1] += 1
                zero_grad()
                loss = network(x).square().mean() * scale
                loss.backward()
                return loss

            return closure

        opt.param_groups[0]["rho"], plain.rho = make(rho), rho
        calls.append(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt.step(closure_of(model, opt.zero_grad))
        said += [str(w.message) for w in caught]
        count = calls[-1]
        plain.step(closure_of(plain.model, plain.zero_grad))
        calls[-1] = count
        pairs = zip(model.parameters(), plain.model.parameters(), strict=True)
        off += [float((p - q).detach().abs().max()) for p, q in pairs]
    return calls, said, max(off)


@pytest.mark.parametrize("make", [float, torch.tensor], ids=["a float", "a tensor"])
def test_rho_that_is_zero_at_first(make):
    calls, said, off = steps(network(leaks=True).double(), [0.0] * 4 + [RHO] * 3, make=make)
    assert off < 1e-12
    assert len(said) == 1
    assert "a pass from '1' is not equal to a whole one: its loss is another one" in said[0]
    assert calls == [3, 2, 2, 2, 4, 2, 2]


def test_gradients_that_are_zero_at_first():
    calls, said, off = steps(network(leaks=True).double(), [RHO] * 6, scales=[0.0] * 3 + [1.0] * 3)
    assert off < 1e-12
    assert len(said) == 1
    assert calls == [3, 2, 2, 4, 2, 2]


def test_rho_that_grows():
    """At first the leak is less than what two passes in float32 may differ by."""
    calls, said, off = steps(network(leaks=True), [1e-4] * 4 + [RHO] * 3)
    assert off < 1e-5
    assert len(said) == 1
    assert calls == [3, 3, 2, 2, 4, 2, 2]


def test_a_path_that_is_proven_again_is_replayed():
    ramp = [RHO * share for share in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)]
    calls, said, off = steps(network(leaks=False).double(), ramp)
    assert off < 1e-12
    assert said == []
    assert calls == [3, 3, 2, 3, 2, 2, 2, 3, 2, 2, 2]
