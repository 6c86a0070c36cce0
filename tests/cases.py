"""The cases that generic tests run over. A mask, ascent, schedule or base joins every battery by one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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

    def loss(self, rows: Callable[[Any], Any] = lambda batch: batch) -> torch.Tensor:
        return F.cross_entropy(self.model(rows(self.x)), rows(self.y))

    def closure(self, opt: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
        def closure(rows: Callable[[Any], Any] = lambda batch: batch) -> torch.Tensor:
            opt.zero_grad()
            loss = self.loss(rows)
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
    "suffix": lambda t: sparsam.SuffixMask(t.model, "3"),
    "suffix-fisher": lambda t: sparsam.SuffixMask(t.model, "3", inner=MASKS["fisher"](t)),
    "suffix-dynamic": lambda t: sparsam.SuffixMask(t.model, "1", inner=MASKS["dynamic"](t)),
}

ASCENTS: dict[str, Callable[[], sparsam.Ascent | None]] = {
    "none": lambda: None,
    "gradient": lambda: sparsam.GradientAscent(),
    "friendly": lambda: sparsam.FriendlyAscent(),
    "friendly-half": lambda: sparsam.FriendlyAscent(sigma=0.5, decay=0.9),
    "momentum": lambda: sparsam.MomentumAscent(0.3),
    "momentum-group": lambda: sparsam.MomentumAscent(),
}

SCHEDULES: dict[str, Callable[[], sparsam.Schedule | None]] = {
    "none": lambda: None,
    "every-step": lambda: sparsam.EveryStep(),
    "every-nth": lambda: sparsam.EveryNth(2),
    "last-steps": lambda: sparsam.LastSteps(0.5, STEPS),
    "last-steps-friendly": lambda: sparsam.LastSteps(0.4, STEPS, before=sparsam.FriendlyAscent(0.5)),
    "last-steps-momentum": lambda: sparsam.LastSteps(0.6, STEPS, before=sparsam.MomentumAscent(0.3)),
}

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


class Policy(NamedTuple):
    """The names of a mask, an ascent, a schedule and a base optimizer, and the share of the batch."""

    mask: str = "none"
    ascent: str = "none"
    schedule: str = "none"
    base: str = "SGD"
    share: float = 1.0

    def __str__(self) -> str:
        share = [] if self.share == 1 else [f"share{self.share:g}"]
        return "+".join([*(part for part in self[:4] if part != "none"), *share])

    @property
    def always_one_pass(self) -> bool:
        ascent = ASCENTS[self.ascent]()
        return ascent is not None and ascent.passes == 1 and self.schedule in ("none", "every-step", "every-nth")


def policies() -> list[Any]:
    """Every mask, ascent, schedule and base at least once, and the pairs that meet; all products are slow cases."""
    two_passes = [name for name in ASCENTS if not Policy(ascent=name).always_one_pass]
    cases = [Policy(mask=mask) for mask in MASKS]
    cases += [Policy(mask=mask, base=base) for mask in ("none", "dynamic") for base in BASES]
    cases += [Policy(ascent=ascent, base=base) for ascent in ASCENTS for base in ("SGD", "Adam")]
    cases += [Policy(schedule=schedule) for schedule in SCHEDULES]
    cases += [Policy(mask, "friendly") for mask in ("random", "fisher", "suffix")]
    cases += [Policy("suffix-fisher", "friendly", schedule) for schedule in SCHEDULES]
    cases += [Policy("none", "momentum", schedule) for schedule in ("every-nth", "last-steps")]
    cases += [Policy(mask, share=0.25) for mask in ("none", "fisher", "dynamic")]
    cases += [Policy(ascent="friendly", share=0.1), Policy(schedule="last-steps", base="Adam", share=0.25)]
    slow = [Policy(mask=mask, base=base) for mask in MASKS for base in BASES]
    slow += [Policy(mask, share=0.1) for mask in MASKS if not mask.startswith("suffix")]
    slow += [Policy("random", "friendly", schedule, share=0.25) for schedule in SCHEDULES]
    slow += [Policy(ascent=ascent, base=base) for ascent in ASCENTS for base in BASES]
    slow += [Policy(mask, ascent, schedule) for mask in MASKS for ascent in two_passes for schedule in SCHEDULES]
    quick = dict.fromkeys(cases)
    every = [case for case in dict.fromkeys([*cases, *slow]) if not _without_momentum(case)]
    return [pytest.param(case, id=str(case), marks=() if case in quick else pytest.mark.slow) for case in every]


def _without_momentum(case: Policy) -> bool:
    return case.base == "Adagrad" and (case.ascent.startswith("momentum") or case.schedule.endswith("momentum"))


def optimizer(
    t: Task, mask: str = "none", base: str = "SGD", ascent: str = "none", schedule: str = "none", **overrides
) -> SAM:
    cls, arguments = BASES[base]
    policy = {"mask": MASKS[mask](t), "ascent": ASCENTS[ascent](), "schedule": SCHEDULES[schedule]()}
    options = {"rho": 0.1, "model": t.model, **policy, **arguments, **overrides}
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
