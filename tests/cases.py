"""The cases that generic tests run over. A new mask or base optimizer joins every battery by being named here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import sparsam
from sparsam import SAM

STEPS = 7  # an interval of 3 in MASKS makes step 5, where runs are cut, the middle of one


class Task(NamedTuple):
    """A small network and what it learns."""

    model: nn.Module
    x: torch.Tensor
    y: torch.Tensor

    @property
    def dataset(self) -> TensorDataset:
        return TensorDataset(self.x, self.y)

    def loss(self) -> torch.Tensor:
        return F.cross_entropy(self.model(self.x), self.y)

    def closure(self, opt: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return closure


def task(dtype: torch.dtype = torch.float64, *, dropout: float = 0.0, samples: int = 24, seed: int = 0) -> Task:
    """Convolutions with BatchNorm, a linear head, and data that it can learn."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(24, 3),
        ).to(dtype)
    x = torch.randn(samples, 1, 8, 8, generator=generator, dtype=dtype)
    y = torch.randint(0, 3, (samples,), generator=generator)
    return Task(model, x, y)


def magnitude(params: list[torch.Tensor]) -> list[torch.Tensor]:
    return [p.abs() for p in params]


MASKS: dict[str, Callable[[Task], sparsam.Mask | None]] = {
    "none": lambda t: None,
    "dense": lambda t: sparsam.DenseMask(),
    "random": lambda t: sparsam.RandomMask(0.5, interval=3, seed=1),
    "random-fixed": lambda t: sparsam.RandomMask(0.9),
    "topk": lambda t: sparsam.TopKMask(0.7, magnitude, interval=3),
    "fisher": lambda t: sparsam.FisherMask(0.5, t.model, F.cross_entropy, t.dataset, samples=16, interval=3),
    "fisher-exact": lambda t: sparsam.FisherMask(
        0.5, t.model, F.cross_entropy, t.dataset, samples=9, interval=3, method="exact"
    ),
    "dynamic": lambda t: sparsam.DynamicMask(0.5, interval=3, total_steps=STEPS),
    "dynamic-sharpest": lambda t: sparsam.DynamicMask(0.8, interval=3, total_steps=STEPS, criterion="sharpest"),
    "dynamic-random": lambda t: sparsam.DynamicMask(0.2, interval=3, total_steps=STEPS, criterion="random"),
    "norm": lambda t: sparsam.NormMask(t.model),
    "nm": lambda t: sparsam.NMMask(2, 4, magnitude, interval=3),
    "budget": lambda t: sparsam.BudgetMask(t.model, cut="3"),
    "budget-full": lambda t: sparsam.BudgetMask(t.model, cut="4", full=0.4, full_rho=0.2),
    "budget-whole": lambda t: sparsam.BudgetMask(t.model, cut="3", norm="whole", full=0.3),
    "budget-fisher": lambda t: sparsam.BudgetMask(t.model, cut="3", within=MASKS["fisher"](t)),
    "budget-momentum": lambda t: sparsam.BudgetMask(
        t.model, cut="3", total_steps=STEPS, late_share=0.5, momentum_rho=0.3
    ),
    "budget-dynamic": lambda t: sparsam.BudgetMask(t.model, cut="1", within=MASKS["dynamic"](t), full=0.3),
}

NEED_CLOSURES = {"budget-momentum"}

SPARSE: dict[str, Callable[[Task, float], sparsam.Mask]] = {
    "random": lambda t, s: sparsam.RandomMask(s, interval=2),
    "topk": lambda t, s: sparsam.TopKMask(s, magnitude, interval=2),
    "fisher": lambda t, s: sparsam.FisherMask(s, t.model, F.cross_entropy, t.dataset, samples=8, interval=2),
    "dynamic": lambda t, s: sparsam.DynamicMask(s, interval=2, total_steps=9),
}

BASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}


def optimizer(t: Task, mask: str = "none", base: str = "SGD", **overrides) -> SAM:
    cls, arguments = BASES[base]
    if mask == "budget-momentum" and base == "Adagrad":
        pytest.skip("Adagrad has no momentum")
    options = {"rho": 0.1, "mask": MASKS[mask](t), "model": t.model, **arguments, **overrides}
    return SAM(t.model.parameters(), cls, **options)


def weights(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters and buffers."""
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Bit for bit, so that -0.0 is not 0.0 and NaN is itself."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().flatten().view(torch.uint8).equal(b.contiguous().flatten().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )
