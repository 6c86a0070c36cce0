"""Replay under DistributedDataParallel where it cannot work: it falls back, on all ranks alike, and is exact."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from ranks import in_ranks
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsam import SAM, SuffixMask

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed"),
]
STEPS = 4
REASONS = {
    "static graph": r"DistributedDataParallel\(static_graph=True\) allows one way through the graph only",
    "bare model": "the closure runs a DistributedDataParallel around the model; give the mask that one",
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)


def train(model: nn.Module, network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[str]:
    """Take steps of SSAM-C; return the warnings."""
    opt = SAM(network.parameters(), torch.optim.SGD, rho=0.3, mask=SuffixMask(network, "2"), lr=0.1)

    def closure():
        opt.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            opt.step(closure)
    return [str(w.message) for w in record if "second pass" in str(w.message)]


def run(rank: int) -> dict:
    x, y = batch()
    results = {}
    for name in REASONS:
        model = network()
        replica = DistributedDataParallel(model, static_graph=name == "static graph")
        messages = train(replica, replica if name == "static graph" else model, x[rank::2], y[rank::2])
        results[name] = [p.detach() for p in model.parameters()], messages
    return results


@pytest.fixture(scope="module")
def ranks():
    return in_ranks(run)


@pytest.mark.parametrize("name", REASONS)
def test_it_falls_back_with_one_warning_and_is_that_of_one_process(ranks, name):
    model = network()
    assert train(model, model, *batch()) == []
    for results in ranks:
        weights, messages = results[name]
        assert len(messages) == 1
        assert re.search(REASONS[name], messages[0])
        for w, expected in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(w, expected.detach(), rtol=1e-12, atol=1e-14)


class Branches(nn.Module):
    """Takes another path, with a skip past the cut, where the batch is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.extra, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if x.mean() > 0:
            return self.c(self.b(self.extra(h)).tanh() + h[:, :8])
        return self.c(self.b(h).tanh())


def run_apart(rank: int) -> list[torch.Tensor]:
    """From the fifth step on rank 1 alone gives replay up."""
    torch.manual_seed(0)
    model = Branches().double()
    replica = DistributedDataParallel(model, find_unused_parameters=True)
    opt = SAM(replica.parameters(), torch.optim.SGD, rho=0.3, mask=SuffixMask(replica, "b"), lr=0.1)
    x, y = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(8):
            mine = x[rank::2].abs() * (1 if rank and step >= 4 else -1)

            def closure(mine=mine):
                opt.zero_grad()
                loss = (replica(mine) - y[rank::2]).square().mean()
                loss.backward()
                return loss

            opt.step(closure)
    return [p.detach() for p in model.parameters()]


def expected_apart() -> list[torch.Tensor]:
    """Take the same steps in one process: a mean of gradients, an eps of the suffix, a mean of gradients there."""
    torch.manual_seed(0)
    model = Branches().double()
    x, y = batch()

    def mean_gradient(step: int) -> list[torch.Tensor]:
        total = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(2):
            mine = x[rank::2].abs() * (1 if rank and step >= 4 else -1)
            loss = (model(mine) - y[rank::2]).square().mean()
            grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            total = [t if g is None else t + g / 2 for t, g in zip(total, grads, strict=True)]
        return total

    suffix = [not name.startswith("a.") for name, _ in model.named_parameters()]  # as all ranks saw it at first
    for step in range(8):
        w = [p.detach().clone() for p in model.parameters()]
        g = mean_gradient(step)
        norm = torch.stack([gi.square().sum() for gi, inside in zip(g, suffix, strict=True) if inside]).sum().sqrt()
        with torch.no_grad():
            for p, gi, inside in zip(model.parameters(), g, suffix, strict=True):
                p += 0.3 * inside * gi / norm
        g = mean_gradient(step)
        with torch.no_grad():
            for p, before, gi in zip(model.parameters(), w, g, strict=True):
                p.copy_(before - 0.1 * gi)
    return [p.detach() for p in model.parameters()]


def test_a_rank_that_gives_replay_up_alone_stays_with_the_others():
    one, other = in_ranks(run_apart)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for w, expected in zip(one, expected_apart(), strict=True):
        torch.testing.assert_close(w, expected, rtol=1e-10, atol=1e-12)
