"""A small task whose model is sharded over processes, the policies it is trained with, and what processes send."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

import sparsam
from sparsam import SAM
from sparsam.selection import flatten

STEPS = 6


class Network(nn.Module):
    """Blocks that are registered in another order than they are called, and a parameter between them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(10, 3)
        self.up = nn.Linear(8, 10)  # column-wise, where tensor parallel
        self.norm = nn.LayerNorm(8)
        self.stem = nn.Linear(6, 8)
        self.shift = nn.Parameter(torch.linspace(-1, 1, 8))
        self.down = nn.Linear(10, 10)  # row-wise, where tensor parallel

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.stem(x)) + self.shift)
        return self.head(self.down(torch.tanh(self.up(h))))


def network(dtype: torch.dtype = torch.float64) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network().to(dtype)


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 3, (8,), generator=generator)


def magnitude(params: list[Tensor]) -> list[Tensor]:
    return [p.detach().abs() for p in params]


def tied(params: list[Tensor]) -> list[Tensor]:
    """Scores of which most are equal."""
    return [(p.detach() * 4).round() for p in params]


def whole_scores(params: list[Tensor]) -> list[Tensor]:
    """Scores that are not sharded, whatever the parameters are."""
    return [torch.arange(p.numel(), dtype=torch.float64).reshape(p.shape).sin() for p in params]


class SmallWeightsMask(sparsam.masks.SparseMask):
    """A mask as a user writes it, who thinks of one process."""

    def flat_scores(self, params, step, previous):
        return flatten(-p.detach().abs() for p in params)


class PowerAscent(sparsam.Ascent):
    """An ascent as a user writes it, who thinks of one process."""

    def direction(self, params, grads, memory, base):
        return [p.detach().abs() * g.sign() * g.abs().sqrt() for p, g in zip(params, grads, strict=True)]


def _fisher(model: nn.Module, method: str) -> sparsam.Mask:
    data = TensorDataset(*batch())
    return sparsam.FisherMask(0.5, model, F.cross_entropy, data, samples=6, interval=2, method=method)


Options = dict[str, Any]
POLICIES: dict[str, Callable[[nn.Module], Options]] = {
    "dense": lambda m: {},
    "adaptive": lambda m: {"adaptive": True},
    "random": lambda m: {"mask": sparsam.RandomMask(0.5, interval=2, seed=1)},
    "random-adaptive": lambda m: {"mask": sparsam.RandomMask(0.9, interval=2), "adaptive": True},
    "topk": lambda m: {"mask": sparsam.TopKMask(0.7, magnitude, interval=2)},
    "topk-tied": lambda m: {"mask": sparsam.TopKMask(0.6, tied, interval=2)},
    "topk-whole": lambda m: {"mask": sparsam.TopKMask(0.6, whole_scores)},
    "dynamic": lambda m: {"mask": sparsam.DynamicMask(0.5, interval=2, total_steps=STEPS)},
    "dynamic-random": lambda m: {
        "mask": sparsam.DynamicMask(0.2, interval=2, total_steps=STEPS, criterion="random"),
    },
    "fisher": lambda m: {"mask": _fisher(m, "signs")},
    "fisher-exact": lambda m: {"mask": _fisher(m, "exact")},
    "norm": lambda m: {"mask": sparsam.NormMask(m)},
    "suffix": lambda m: {"mask": sparsam.SuffixMask(m, "up")},
    "suffix-random": lambda m: {"mask": sparsam.SuffixMask(m, "head", inner=sparsam.RandomMask(0.5))},
    "suffix-dynamic": lambda m: {
        "mask": sparsam.SuffixMask(m, "up", inner=sparsam.DynamicMask(0.5, interval=2, total_steps=STEPS)),
    },
    "friendly": lambda m: {"ascent": sparsam.FriendlyAscent()},
    "random-friendly": lambda m: {
        "mask": sparsam.RandomMask(0.5, interval=2),
        "ascent": sparsam.FriendlyAscent(0.5, 0.9),
    },
    "momentum": lambda m: {"ascent": sparsam.MomentumAscent()},
    "last-steps": lambda m: {"schedule": sparsam.LastSteps(0.5, STEPS, before=sparsam.MomentumAscent(0.3))},
    "custom": lambda m: {"mask": SmallWeightsMask(0.5, interval=2), "ascent": PowerAscent()},
    "every-nth": lambda m: {"schedule": sparsam.EveryNth(2)},
    "adamw": lambda m: {"base_optimizer": torch.optim.AdamW, "lr": 0.01},
    "dynamic-adamw": lambda m: {**POLICIES["dynamic"](m), **POLICIES["adamw"](m)},
}


def optimizer(model: nn.Module, policy: str, **overrides: Any) -> SAM:
    options = {"rho": 0.1, "lr": 0.1, "model": model, **POLICIES[policy](model), **overrides}
    sgd = {"base_optimizer": torch.optim.SGD, "momentum": 0.9, "weight_decay": 1e-3}
    return SAM(model.parameters(), **(options if "base_optimizer" in options else {**sgd, **options}))


def closure(opt: torch.optim.Optimizer, model: nn.Module, x: Tensor, y: Tensor) -> Callable[..., Tensor]:
    def closure(rows: Callable[[Tensor], Tensor] = lambda batch: batch) -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(rows(x)), rows(y))
        loss.backward()
        return loss

    return closure


def train(model: nn.Module, policy: str, x: Tensor, y: Tensor, steps: int = STEPS, **overrides: Any) -> SAM:
    opt = optimizer(model, policy, **overrides)
    for _ in range(steps):
        opt.step(closure(opt, model, x, y))
    return opt


def whole(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Gather DTensors."""
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for t in tensors]


def apart(one: Iterable[Tensor], other: Iterable[Tensor]) -> float:
    """Return the largest difference."""
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


class Traffic(TorchDispatchMode):
    """Lists what this process hands to collectives: (operation, bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.sent.append((func.__name__.split(".")[0], sum(t.numel() * t.itemsize for t in tensors)))
        return func(*args, **(kwargs or {}))
