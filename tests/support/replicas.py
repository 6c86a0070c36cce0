"""A small network without BatchNorm, its batch, and ways to train it on one process or on several."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from sparsam import (
    SAM,
    DynamicMask,
    FisherMask,
    FriendlyAscent,
    LastSteps,
    MomentumAscent,
    NMMask,
    RandomMask,
    SuffixMask,
    TopKMask,
)

STEPS = 6
CUT = "2"
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)
        return nn.Sequential(*layers).double()


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, dtype=torch.float64, generator=generator)
    return x, torch.randn(8, 3, dtype=torch.float64, generator=generator)


def share(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank gets of a batch: each `size`-th sample. So the first rows of all ranks are the first of the batch."""
    x, y = batch(step)
    return x[rank::size], y[rank::size]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def gradient_size(params: list[torch.Tensor]) -> list[torch.Tensor]:
    return [p.grad.abs() for p in params]


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def fisher(model: nn.Module) -> FisherMask:
    return FisherMask(0.5, model, squared_error, TensorDataset(*batch()), samples=5, interval=2, method="exact")


# What is trained, as arguments of SAM; each function gets the model, or the DistributedDataParallel around it.
POLICIES: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "dense": lambda model: {},
    "adaptive": lambda model: {"adaptive": True, "rho": 1.0},
    "random": lambda model: {"mask": RandomMask(0.5, interval=2, seed=1)},
    "random-fixed": lambda model: {"mask": RandomMask(0.5, seed=1)},
    "dynamic": lambda model: {"mask": DynamicMask(0.5, interval=2, total_steps=STEPS)},
    "fisher": lambda model: {"mask": fisher(model)},
    "top-k": lambda model: {"mask": TopKMask(0.6, gradient_size, interval=2)},
    "n:m": lambda model: {"mask": NMMask(1, 2, gradient_size, interval=2)},
    "suffix": lambda model: {"mask": SuffixMask(model, CUT)},
    "suffix-dynamic": lambda model: {
        "mask": SuffixMask(model, CUT, inner=DynamicMask(0.5, interval=2, total_steps=STEPS))
    },
    "friendly": lambda model: {"ascent": FriendlyAscent()},
    "friendly-top-k": lambda model: {"ascent": FriendlyAscent(), "mask": TopKMask(0.6, gradient_size, interval=2)},
    "friendly-suffix": lambda model: {"ascent": FriendlyAscent(), "mask": SuffixMask(model, CUT)},
    "thrifty": lambda model: {
        "ascent": FriendlyAscent(),
        "mask": SuffixMask(model, CUT),
        "schedule": LastSteps(0.7, STEPS),
    },
    "momentum": lambda model: {"ascent": MomentumAscent(0.2)},
    "adamw": lambda model: {"base_optimizer": torch.optim.AdamW, "lr": 0.01},
    "adamw-suffix": lambda model: {"base_optimizer": torch.optim.AdamW, "lr": 0.01, "mask": SuffixMask(model, CUT)},
}


class Trained(NamedTuple):
    """What is left of a training."""

    weights: list[list[torch.Tensor]]  # after each step
    masks: list[list[torch.Tensor]]  # of each step
    losses: list[torch.Tensor]
    opt: SAM


def build(policy: str, model: nn.Module, **options: Any) -> SAM:
    arguments = {"rho": 0.3, "model": model, "base_optimizer": torch.optim.SGD, **POLICIES[policy](model), **options}
    base = {} if arguments["base_optimizer"] is torch.optim.AdamW else SGD
    return SAM(model.parameters(), **{**base, **arguments})


def train(opt: SAM, model: nn.Module, rank: int = 0, size: int = 1) -> Trained:
    """Take steps by closure, on a rank's part of the batches."""
    trained = Trained([], [], [], opt)
    for step in range(STEPS):

        def closure(rows: Callable[[Any], Any] = lambda batch: batch, step: int = step) -> torch.Tensor:
            opt.zero_grad()
            loss = loss_of(model, *rows(share(step, rank, size)))
            loss.backward()
            return loss

        trained.losses.append(opt.step(closure).detach())
        trained.weights.append([p.detach().clone() for p in model.parameters()])
        trained.masks.append(opt.masks())
    return trained


def train_replica(rank: int, size: int, policy: str, ddp_options: dict[str, Any] | None = None, **options: Any) -> Any:
    """Train in a DistributedDataParallel; return weights, masks and losses."""
    model = DistributedDataParallel(network(), **(ddp_options or {}))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the second pass is computed in full")
        return train(build(policy, model, **options), model, rank, size)._replace(opt=None)


def assert_same_weights(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]], tolerance: float) -> None:
    for at_one, at_other in zip(one, other, strict=True):
        for a, b in zip(at_one, at_other, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
