"""What a step costs from each cut of a model, in steps of the base optimizer alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsam.cuts import Cut, find_cuts
from sparsam.distributed import value_of_rank_zero
from sparsam.passes import no_trace
from sparsam.perturbation import perturb, restore
from sparsam.timing import Clock

TIMINGS = 3
CLOSE = 1.05  # an estimate that is at most so much above a limit is looked into


def cut_costs(
    model: nn.Module,
    closure: Callable[[], Any],
    base: Optimizer,
    rehearsal: Callable[[str], Callable[[], None]],
    *,
    device_time: bool = False,
    limit: float | None = None,
    cheapest: bool = False,
    everywhere: bool = False,
) -> dict[Cut, float]:
    r"""Measure what a step costs from each cut, in base steps; earliest cut first.

    With the share f of a pass that lies behind the cut, the share of the weights that does, and the time of
    perturbing all weights and of the base optimizer's own step in passes, p and b:

    .. math::  1 + \frac{f + \text{weights} \cdot p}{1 + b}

    That is an estimate: the first pass of a real step stops right before the cut, and Python has more to do. With a
    limit, real steps are timed, from the earliest cut that may fit on to the first that does. Where what lies before
    the cut is perturbed as well, all weights count.

    Of several timings the shortest counts, since what else a machine does only adds to them; no step costs less than
    one base step, and none more than from an earlier cut. All are rounded to hundredths, which is about as exact as
    they are: a cost that reads 1.25 keeps a limit of 1.25.

    Args:
        model: The network.
        closure: One pass, as for an optimizer; it is called several times.
        base: The base optimizer. Its step is timed on a copy.
        rehearsal: Returns, for a cut, what a step from there does before the base optimizer's (:meth:`SAM.rehearsal`).
        device_time: See :func:`sparsam.find_cuts`.
        limit: What a step may cost; None: no real step is timed.
        cheapest: In place of a limit: real steps from the last cut are timed, which costs least.
        everywhere: What lies before the cut is perturbed as well, along the momentum.
    """
    cuts = find_cuts(model, closure, device_time=device_time)
    if not cuts:
        return {}
    params = [p for group in base.param_groups for p in group["params"]]
    clock = Clock(params[0].device, device_time)
    with no_trace(model), torch.enable_grad():
        closure()
        step = _stepping(base)
        works = (closure, step, _perturbing(params))
        times = [[clock.time(work) for work in works] for _ in range(1 + TIMINGS)][1:]  # the first warms up
        one_pass, stepping, perturbing = map(min, zip(*times, strict=True))
        base_step = one_pass + stepping

        def perturbation(cut: Cut) -> float:
            return float(perturbing) * (1.0 if everywhere else cut.weights)

        # Rank 0's, because all ranks must measure the same cuts below: the closure communicates.
        costs = value_of_rank_zero(
            {cut: 1 + ((cut.step or 0.0) * one_pass + perturbation(cut)) / base_step for cut in cuts}
        )
        _settle(costs)

        def measured(cut: Cut) -> float:
            work = rehearsal(cut.name)
            work()
            two_passes = min(clock.time(work) for _ in range(TIMINGS))
            before = perturbation(cut) - cut.weights * perturbing  # which has no momentum yet
            cost: float = value_of_rank_zero((two_passes + before + stepping) / base_step)
            return cost

        if cheapest:
            least = measured(next(reversed(costs)))
            costs = {cut: max(cost, least) for cut, cost in costs.items()}  # none costs less than what was measured
            costs[next(reversed(costs))] = least
            _settle(costs)
            return costs
        for cut, estimate in costs.items():
            if limit is not None and estimate <= CLOSE * limit:
                costs[cut] = measured(cut)
                _settle(costs)
                if costs[cut] <= limit:
                    break
    return costs


def _settle(costs: dict[Cut, float]) -> None:
    """Make possible costs of measured ones."""
    least = math.inf
    for cut, cost in costs.items():
        least = costs[cut] = max(1.0, min(least, round(cost, 2)))


def _perturbing(params: Sequence[Tensor]) -> Callable[[], None]:
    used = [p for p in params if p.grad is not None]
    grads, rhos = [p.grad for p in used], [torch.zeros((), device=p.device) for p in used[:1]] * len(used)

    @torch.no_grad()
    def work() -> None:
        if used:
            restore(perturb(used, grads, [True] * len(used), rhos, guard=False))  # type: ignore[arg-type]

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
