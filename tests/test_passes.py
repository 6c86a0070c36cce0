"""What both passes share: every buffer moves once a step, whatever keeps it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from sparsam import SAM, LastSteps, SuffixMask
from sparsam.passes import SMALL


class Means(nn.Module):
    """A running mean of its own, and a count that is replaced, not changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.count = self.count + 1
        return x - self.mean


def linear(out: int = 6) -> nn.Module:
    return nn.Linear(6, out)


MODELS = {
    "batch norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(6), linear(3)),
    "batch norm, cumulative": lambda: nn.Sequential(linear(), nn.BatchNorm1d(6, momentum=None), linear(3)),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), linear(3)
    ),
    "spectral norm": lambda: nn.Sequential(
        parametrizations.spectral_norm(linear()), nn.Tanh(), parametrizations.spectral_norm(linear(3))
    ),
    "means of one's own": lambda: nn.Sequential(linear(), Means(), linear(3)),
    "all of them": lambda: nn.Sequential(
        parametrizations.spectral_norm(linear()), nn.BatchNorm1d(6), Means(), parametrizations.spectral_norm(linear(3))
    ),
}


def pass_of(model, x):
    model.zero_grad()
    model(x).square().mean().backward()


# A prefix whose buffers change what it computes is another function in the second pass, and cannot be replayed.
@pytest.mark.filterwarnings("ignore:the second pass .* is not equal to a whole one")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["closure", "two steps", "base step", "suffix"])
def test_every_buffer_moves_once_a_step(name, way):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x = torch.randn(8, 6, dtype=torch.float64)
    mask = SuffixMask(model, str(len(model) - 1)) if way == "suffix" else None
    schedule = LastSteps(0.01, 1000) if way == "base step" else None
    opt = SAM(model.parameters(), torch.optim.SGD, rho=0.5, lr=0.1, model=model, mask=mask, schedule=schedule)

    def closure():
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        once = copy.deepcopy(model)
        pass_of(once, x)
        if way == "two steps":
            pass_of(model, x)
            opt.first_step(zero_grad=True)
            model(x).square().mean().backward()
            opt.second_step()
        else:
            opt.step(closure)
        for (key, buffer), (_, expected) in zip(model.named_buffers(), once.named_buffers(), strict=True):
            assert torch.equal(buffer, expected), key


class OwnForward(nn.BatchNorm1d):
    """Which cannot be told to track no statistics."""

    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize("kind", ["torch's own", "own forward", "compiled"])
def test_statistics_of_a_wide_batch_norm_move_once(kind):
    """torch counts no versions of them."""
    features = SMALL + 1
    norm = OwnForward(features) if kind == "own forward" else nn.BatchNorm1d(features)
    model, x = nn.Sequential(norm), torch.linspace(-1, 1, 4 * features).reshape(4, features).sin()
    plain = copy.deepcopy(model)
    if kind == "compiled":
        model.compile(backend="aot_eager")
    opt = SAM(model.parameters(), torch.optim.SGD, rho=0.5, lr=0.0, model=model)

    def closure():
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure)
        plain(x)
    torch.testing.assert_close(norm.running_var, plain[0].running_var)
    torch.testing.assert_close(norm.running_mean, plain[0].running_mean)


def test_constant_buffers_are_not_copied():
    """A causal mask of many megabytes, say: only buffers that have moved are kept."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model.register_buffer("constant", torch.ones(2**17))
    opt = SAM(model.parameters(), torch.optim.SGD, rho=0.5, lr=0.1, model=model)
    model(torch.ones(2, 4)).sum().backward()
    with opt.perturbed():
        assert not any(saved.places for saved in opt._passes._buffers)


class ThroughData(nn.Module):
    """Counts without leaving a version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.data.add_(1)
        return x


def test_a_buffer_that_moves_through_data_moves_once():
    model = nn.Sequential(nn.Linear(4, 4), ThroughData(), nn.Linear(4, 2))
    opt = SAM(model.parameters(), torch.optim.SGD, rho=0.5, lr=0.1, model=model)

    def closure():
        opt.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    for _ in range(5):
        opt.step(closure)
    assert model[1].count == 5
