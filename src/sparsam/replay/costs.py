"""What a step costs from each cut of a model, in steps of the base optimizer alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsam.errors import UserValueError
from sparsam.passes import preserve_state
from sparsam.perturbation import perturb, restore
from sparsam.replay.clock import Clock
from sparsam.replay.cuts import Cut, find_cuts

TIMINGS = 5


def cut_costs(
    model: nn.Module,
    closure: Callable[[], Any],
    base: Optimizer,
    *,
    device_time: bool = False,
    adaptive: bool = False,
    clock: Clock | None = None,
) -> dict[Cut, float]:
    r"""Measure what a step costs from each cut, in base steps; earliest cut first.

    With f the fraction of a pass that follows the cut, the fraction of the weights that does, and the time of
    perturbing all weights and of the base optimizer's own step in passes, p and b:

    .. math::  1 + \frac{f + \text{weights} \cdot p}{1 + b}

    Of several timings the shortest counts, since what else a machine does only adds to them. No step costs less than
    one base step, and none more than from an earlier cut. All are rounded to hundredths, which is about as exact as
    they are.

    Args:
        model: The network.
        closure: One pass, as for an optimizer; it is called several times.
        base: The base optimizer. Its step is timed on a copy.
        device_time: See :func:`sparsam.find_cuts`.
        adaptive: Whether the perturbation is ASAM's, which takes longer.
        clock: What to take the time with; None: a clock of the model's device.
    """
    params = [p for group in base.param_groups for p in group["params"]]
    clock = clock or Clock(params[0].device, device_time)
    cuts = find_cuts(model, closure, clock=clock)
    if not cuts:
        return {}
    with preserve_state(model), torch.enable_grad():
        closure()
        works = (closure, _stepping(base), _perturbing(params, adaptive))
        times = [[clock.time(work) for work in works] for _ in range(1 + TIMINGS)][1:]  # the first warms up
    one_pass, stepping, perturbing = map(min, zip(*times, strict=True))
    costs: dict[Cut, float] = {}
    least = math.inf
    for cut in cuts:
        extra = (cut.step or 0.0) * one_pass + cut.weights * perturbing
        least = costs[cut] = max(1.0, min(least, round(1 + extra / (one_pass + stepping), 2)))
    return costs


def choose_cut(costs: dict[str, float], budget: float) -> str:
    """Return the earliest cut whose step fits a budget.

    Args:
        costs: What a step from each cut costs, in base steps, by the cut's name; earliest first.
        budget: What a step may cost, in base steps.

    >>> choose_cut({"layer3": 1.42, "layer4": 1.24, "head": 1.02}, budget=1.25)
    'layer4'
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 1 < budget < math.inf:
        raise UserValueError(f"budget must be a number above 1, what the base step alone costs, but is {budget!r}")
    for cut, cost in costs.items():
        if cost <= budget:
            return cut
    if not costs:
        raise UserValueError(
            "the model has no cut that can be seen: nothing of a step could be left out (is it compiled as a whole? "
            "then compile its blocks instead; does the closure run another model?)"
        )
    cheapest = min(reversed(costs), key=lambda cut: costs[cut])
    raise UserValueError(
        f"budget must be at least {costs[cheapest]:g}, the cost of a step from the cheapest cut, {cheapest!r}, but is "
        f"{budget:g}"
    )


def _perturbing(params: Sequence[Tensor], adaptive: bool) -> Callable[[], None]:
    @torch.no_grad()
    def work() -> None:
        used = [p for p in params if p.grad is not None]
        grads, rho = [p.grad for p in used], torch.zeros((), device=params[0].device)
        if used:
            dense, rhos = [True] * len(used), [rho] * len(used)
            restore(perturb(used, grads, dense, rhos, adaptive=adaptive))  # type: ignore[arg-type]

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
