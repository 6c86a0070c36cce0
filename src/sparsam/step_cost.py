"""What a sharpness-aware step takes on this machine, in steps of the base optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from sparsam.checks import check_module, check_whole
from sparsam.errors import UserTypeError, UserValueError
from sparsam.passes import preserve_state
from sparsam.replay.clock import Clock
from sparsam.sam import SAM
from sparsam.sam.phase import UsedGradients
from sparsam.share import WHOLE

ROUNDS, WARM_UP = 20, 3  # two steps prove a path to a cut


@dataclass(frozen=True)
class StepRatio:
    """Median and quartiles of the ratio of a method's step time to the base optimizer's in the same round."""

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

    @property
    def spread(self) -> float:
        """Half of the range between the quartiles."""
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return f"{self.median:.2f} base steps (quartiles {self.low:.2f} and {self.high:.2f} of {self.rounds} rounds)"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def measure_cost(
    model: nn.Module,
    closure: Callable[..., Any],
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

    The steps are real ones, by a SAM of their own around the same base optimizer. Afterwards weights, gradients,
    buffers, random numbers and the base optimizer's groups and state are what they were, and `opt` has taken no step.
    Step hooks of the base optimizer run; those of `opt` do not.

    Args:
        model: The network that the closure runs.
        closure: As for `opt.step`, on a batch as in training.
        opt: Whatever its schedule, steps with its mask and its ascent are measured.
        rounds: How many, after three steps of each to warm up.
        clock: What to take the time with; None: a clock of the model's device.
    """
    check_module("model", model, optional=False)
    if not isinstance(opt, SAM):
        raise UserTypeError(f"opt must be a SAM, but is a {type(opt).__name__}")
    if not callable(closure):
        raise UserTypeError(f"closure must be a function, as for opt.step, but is a {type(closure).__name__}")
    check_whole("rounds", rounds)
    params = [p for group in opt.param_groups for p in group["params"]]
    if not set(model.parameters()).issuperset(p for p in params if p.requires_grad):
        raise UserValueError("model must be the one that opt trains, but does not have all of opt's parameters")
    clock, base = clock or Clock(params[0].device), opt.base_optimizer

    def base_step() -> None:
        closure() if opt.share == 1 else closure(WHOLE)
        base.step()

    def one_round(sam: SAM) -> float:
        plain = clock.time(base_step)
        opt.zero_grad()  # a step refuses to add to gradients that it has not used
        return clock.time(lambda: sam.step(closure)) / plain

    every = list(dict.fromkeys([*model.parameters(), *params]))
    with _between_steps(opt), _preserved(base, every), preserve_state(model), torch.enable_grad():
        sam = SAM.wrap(
            base,
            mask=opt.mask if opt.ascent.passes == 2 else None,
            ascent=opt.ascent,
            adaptive=opt.adaptive,
            model=opt._passes.model,
            perturbation="local" if opt._replicas.local else "global",
            process_group=opt._replicas.group,
            share=opt.share,
        )
        ratios = [one_round(sam) for _ in range(WARM_UP + rounds)]
    return StepRatio.of(ratios[WARM_UP:])


@contextmanager
def _between_steps(opt: SAM) -> Iterator[None]:
    """Let the block's closures call `opt.zero_grad()`; afterwards `opt` knows what it knew of the coming step."""
    opt._phase.refuse_inside_step("measure_cost")
    phase, used, random = opt._phase, opt._used_gradients, opt._passes._before_first
    opt._used_gradients = UsedGradients()
    try:
        yield
    finally:
        opt._phase, opt._used_gradients = phase, used
        opt._passes._start_from(random)


@contextmanager
def _preserved(base: Optimizer, params: Sequence[Tensor]) -> Iterator[None]:
    """Let the block take steps; afterwards weights, gradients, groups and state are as before, in the same tensors."""
    grads = [(p, p.grad) for p in params]
    tables: list[dict[str, Any]] = [*base.param_groups, *base.state.values()]
    kept = [
        (table, {key: value if key == "params" else tree_map(_same_tensor, value) for key, value in table.items()})
        for table in tables
    ]
    tensors = {t for t in tree_leaves([values for _, values in kept]) if isinstance(t, Tensor)}.union(params)
    copies = [(t, t.detach().clone()) for t in tensors]
    stateful = set(base.state)
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for t, values in copies:
                t.copy_(values)
        for p, grad in grads:
            p.grad = grad
        for table, entries in kept:
            table.clear()
            table.update(entries)
        for p in [p for p in base.state if p not in stateful]:
            del base.state[p]


def _same_tensor(leaf: Any) -> Any:
    return leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf)
