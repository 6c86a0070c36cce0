"""What a step costs from each cut of a model, in steps of the base optimizer alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsam.passes import preserve_state
from sparsam.perturbation import perturb, restore
from sparsam.replay.clock import Clock
from sparsam.replay.cuts import Cut, find_cuts

TIMINGS = 5

Direction = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


def cut_costs(
    model: nn.Module,
    closure: Callable[[], Any],
    base: Optimizer,
    *,
    adaptive: bool = False,
    direction: Direction | None = None,
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
        adaptive: Whether the perturbation is ASAM's, which takes longer.
        direction: What an ascent makes of parameters and gradients, its time included; None: the gradients.
        clock: See :func:`sparsam.find_cuts`.
    """
    params = [p for group in base.param_groups for p in group["params"]]
    clock = clock or Clock(params[0].device)
    cuts = find_cuts(model, closure, clock=clock)
    if not cuts:
        return {}
    with preserve_state(model), torch.enable_grad():
        closure()
        works = (closure, _stepping(base), _perturbing(params, adaptive, direction))
        times = [[clock.time(work) for work in works] for _ in range(1 + TIMINGS)][1:]  # the first warms up
    one_pass, stepping, perturbing = map(min, zip(*times, strict=True))
    costs: dict[Cut, float] = {}
    least = math.inf
    for cut in cuts:
        extra = (cut.step or 0.0) * one_pass + cut.weights * perturbing
        least = costs[cut] = max(1.0, min(least, round(1 + extra / (one_pass + stepping), 2)))
    return costs


def _perturbing(params: Sequence[Tensor], adaptive: bool, direction: Direction | None) -> Callable[[], None]:
    @torch.no_grad()
    def work() -> None:
        used = [p for p in params if p.grad is not None]
        grads: Sequence[Tensor] = [p.grad for p in used if p.grad is not None]
        rho = torch.ones((), device=params[0].device)  # at 0 nothing would be done
        if used:
            dense, rhos = [True] * len(used), [rho] * len(used)
            restore(perturb(used, direction(used, grads) if direction else grads, dense, rhos, adaptive=adaptive))

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
