"""What a sharpness-aware step takes on this machine, in steps of the base optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

import torch
from torch import nn

from sparsam.checks import check_module, check_whole
from sparsam.errors import UserTypeError
from sparsam.passes import preserve_state
from sparsam.replay.clock import Clock
from sparsam.sam import SAM
from sparsam.sam.coming import Coming
from sparsam.schedules import EveryStep

ROUNDS, WARM_UP = 20, 3  # two steps prove a path to a cut


@dataclass(frozen=True)
class StepRatio:
    """Of the ratios of a method's step to the base optimizer's in the same round: the median and the quartiles."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> StepRatio:
        """Return what matters of the ratios of all rounds.

        >>> StepRatio.of([1.9, 2.0, 9.0])
        StepRatio(median=2.0, low=1.95, high=5.5, rounds=3)
        >>> print(StepRatio.of([1.9, 2.0, 9.0]))
        2.00 base steps (quartiles 1.95 and 5.50 of 3 rounds)
        """
        low, middle, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * [*ratios]
        return cls(middle, low, high, len(ratios))

    def __str__(self) -> str:
        return f"{self.median:.2f} base steps (quartiles {self.low:.2f} and {self.high:.2f} of {self.rounds} rounds)"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def measure_cost(
    model: nn.Module,
    closure: Callable[[], Any],
    opt: SAM,
    *,
    rounds: int = ROUNDS,
    clock: Clock | None = None,
) -> StepRatio:
    r"""Measure what a sharpness-aware step of an optimizer takes on this machine, in steps of its base optimizer.

    Both take a step in turn, round after round, so that whatever else the machine does meets both. What counts is the
    ratio in each round. The result has the median and the quartiles: if these lie far apart, the machine is busy. With
    the median c, a training whose last fraction q of the steps is sharpness-aware takes :math:`1 + q\,(c - 1)` times
    as long as with the base optimizer alone.

    The steps are real ones. Afterwards weights, buffers, random numbers and the optimizer are what they were, and
    gradients are cleared.

    Args:
        model: The network.
        closure: As for `opt.step`, on a batch as in training.
        opt: Whatever its schedule, steps with its mask and its ascent are measured.
        rounds: How many, after three steps of each to warm up.
        clock: What to take the time with; None: a clock of the model's device.
    """
    check_module("model", model, optional=False)
    if not isinstance(opt, SAM):
        raise UserTypeError(f"opt must be a SAM, but is a {type(opt).__name__}")
    check_whole("rounds", rounds)
    params = [p for group in opt.param_groups for p in group["params"]]
    clock = clock or Clock(params[0].device)
    weights, state, coming = [p.detach().clone() for p in params], copy.deepcopy(opt.state_dict()), opt._coming

    def base_step() -> None:
        closure()
        opt.base_optimizer.step()

    def one_round() -> float:
        plain = clock.time(base_step)
        opt.zero_grad()  # a step refuses to add to gradients that it has not used
        return clock.time(lambda: opt.step(closure)) / plain

    opt._coming = Coming(EveryStep(), opt.ascent, [opt.ascent])
    try:
        with preserve_state(model), torch.enable_grad():
            ratios = [one_round() for _ in range(WARM_UP + rounds)]
    finally:
        opt._coming = coming
        with torch.no_grad():
            for p, w in zip(params, weights, strict=True):
                p.copy_(w)
        opt.load_state_dict(state)
        opt.zero_grad()
    return StepRatio.of(ratios[WARM_UP:])
