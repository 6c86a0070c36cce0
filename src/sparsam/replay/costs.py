"""What a step costs from each cut of a model, in steps of the base optimizer alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsam.distributed.broadcast import value_of_rank_zero
from sparsam.passes import no_trace
from sparsam.perturbation import perturb, restore
from sparsam.replay.clock import Clock
from sparsam.replay.cuts import Cut, find_cuts

TIMINGS = 5
AT_MOST = 1.2  # what takes longer than two whole passes by this factor was held up by something else
CLOSE = 1.05  # an estimate that is at most so much above a limit is looked into


def cut_costs(
    model: nn.Module,
    closure: Callable[[], Any],
    base: Optimizer,
    rehearsal: Callable[[str], Callable[[], None]],
    *,
    device_time: bool = False,
    adaptive: bool = False,
    limit: float | None = None,
) -> dict[Cut, float]:
    r"""Measure what a step costs from each cut, in base steps; earliest cut first.

    With the share f of a pass that lies behind the cut, the share of the weights that does, and the time of
    perturbing all weights and of the base optimizer's own step in passes, p and b:

    .. math::  1 + \frac{f + \text{weights} \cdot p}{1 + b}

    That is an estimate: the first pass of a real step stops right before the cut, and Python has more to do. With a
    limit, real steps are timed, from the earliest cut that may fit on to the first that does.

    Of several timings the shortest counts, since what else a machine does only adds to them; no step costs less than
    one base step, and none more than from an earlier cut. All are rounded to hundredths, which is about as exact as
    they are: a cost that reads 1.25 keeps a limit of 1.25.

    Args:
        model: The network.
        closure: One pass, as for an optimizer; it is called several times.
        base: The base optimizer. Its step is timed on a copy.
        rehearsal: Returns, for a cut, what a step from there does before the base optimizer's (:meth:`SAM.rehearsal`).
        device_time: See :func:`sparsam.find_cuts`.
        adaptive: Whether the perturbation is ASAM's, which takes longer.
        limit: What a step may cost; None: no real step is timed.
    """
    cuts = find_cuts(model, closure, device_time=device_time)
    if not cuts:
        return {}
    with no_trace(model), torch.enable_grad():
        parts = _Parts(closure, base, device_time, adaptive)
        # Rank 0's, because all ranks must measure the same cuts below: the closure communicates.
        costs = value_of_rank_zero(
            {
                cut: 1 + ((cut.step or 0.0) * parts.one_pass + cut.weights * parts.perturbing) / parts.base_step
                for cut in cuts
            }
        )
        _settle(costs)
        for cut, estimate in costs.items():
            if limit is not None and estimate <= CLOSE * limit:
                costs[cut] = value_of_rank_zero(parts.measured(rehearsal(cut.name)))
                _settle(costs)
                if costs[cut] <= limit:
                    break
    return costs


def late_costs(
    model: nn.Module,
    closure: Callable[[], Any],
    base: Optimizer,
    rehearsal: Callable[[], None],
    *,
    device_time: bool = False,
    adaptive: bool = False,
) -> tuple[float, float]:
    """Measure what a step of one pass at perturbed weights costs, and a real one of two, in base steps.

    Args:
        model, closure, base, device_time, adaptive: As for :func:`cut_costs`.
        rehearsal: What a step of two passes does before the base optimizer's.
    """
    with no_trace(model), torch.enable_grad():
        parts = _Parts(closure, base, device_time, adaptive)
        last = max(1.0, round(parts.measured(rehearsal), 2))
        return min(last, round(1 + parts.perturbing / parts.base_step, 2)), last


class _Parts:
    """The parts of a step, timed: a pass, the base optimizer's own step, and perturbing all weights."""

    def __init__(self, closure: Callable[[], Any], base: Optimizer, device_time: bool, adaptive: bool) -> None:
        params = [p for group in base.param_groups for p in group["params"]]
        self.clock = Clock(params[0].device, device_time)
        closure()
        works = (closure, _stepping(base), _perturbing(params, adaptive))
        times = [[self.clock.time(work) for work in works] for _ in range(1 + TIMINGS)][1:]  # the first warms up
        self.one_pass, self.stepping, self.perturbing = map(min, zip(*times, strict=True))
        self.closure = closure

    @property
    def base_step(self) -> float:
        """The time of a step of the base optimizer alone."""
        return float(self.one_pass + self.stepping)

    def measured(self, two_passes: Callable[[], None]) -> float:
        """Return what a step costs whose passes are these, in base steps."""
        two_passes()
        # In turn with the base's pass: a machine that was busy while that was timed would make two passes look cheap.
        times = [(self.clock.time(self.closure), self.clock.time(two_passes)) for _ in range(TIMINGS)]
        one, two = map(min, zip(*times, strict=True))
        self.one_pass = min(self.one_pass, one)
        whole = 2 * self.one_pass + self.perturbing
        return float((min(two, AT_MOST * whole) + self.stepping) / self.base_step)


def _settle(costs: dict[Cut, float]) -> None:
    """Make possible costs of measured ones."""
    least = math.inf
    for cut, cost in costs.items():
        least = costs[cut] = max(1.0, min(least, round(cost, 2)))


def _perturbing(params: Sequence[Tensor], adaptive: bool) -> Callable[[], None]:
    used = [p for p in params if p.grad is not None]
    grads, rhos = [p.grad for p in used], [torch.zeros((), device=p.device) for p in used[:1]] * len(used)

    @torch.no_grad()
    def work() -> None:
        if used:
            everything = [True] * len(used)
            restore(perturb(used, grads, everything, rhos, adaptive=adaptive, guard=False))  # type: ignore[arg-type]

    return work


def _stepping(base: Optimizer) -> Callable[[], object]:
    """Return the step of a copy of an optimizer; where it cannot be copied, a step that takes no time."""
    try:
        twin = copy.deepcopy(base)
        for group, other in zip(base.param_groups, twin.param_groups, strict=True):
            for p, q in zip(group["params"], other["params"], strict=True):
                q.grad = p.grad
        return twin.step
    except Exception:  # a base of one's own that no copy works for, or too little memory
        return lambda: None
