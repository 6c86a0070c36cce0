"""An oracle for masked SAM steps: deep copies, whole passes, float64, nothing of sparsam's arithmetic.

Each step that the library takes is compared with the same step from the same state. Three things are checked apart from
each other: the perturbation that the second call of the closure sees, against rho g / |g| over what has moved; the step
that was taken, against the gradient of a whole pass at the perturbed weights; and the buffers, against those that one
whole pass leaves.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsam import SAM, SuffixMask

LR, RHO = 0.1, 0.5

Loss = Callable[[nn.Module, int], Tensor]
"""The loss of a model in the step with this number."""


@dataclass
class Verdict:
    """How far the library was from the oracle, and what it said."""

    perturbation: float = 0.0
    step: float = 0.0
    loss: float = 0.0
    buffers: float = 0.0
    messages: list[str] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)  # of the closure, in each step

    @property
    def wrong(self) -> float:
        """The largest difference."""
        return max(self.perturbation, self.step, self.loss, self.buffers)


def whole_pass(model: nn.Module, loss: Loss, step: int, random: Tensor) -> tuple[dict[str, Tensor], float]:
    """Return the gradients (zero where there is none) and the loss of a whole pass."""
    torch.set_rng_state(random)
    model.zero_grad()
    value = loss(model, step)
    if value.requires_grad:
        value.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}
    return grads, float(value.detach())


def judge(
    model: nn.Module,
    loss: Loss,
    cut: str,
    *,
    steps: int = 5,
    proves: bool = True,
    duplicate: Callable[[Any], Any] = copy.deepcopy,
) -> Verdict:
    """Take steps of SSAM-C; compare each with the oracle's.

    Args:
        model: In float64.
        loss: Its loss in a step; it may draw torch's random numbers.
        cut: The module whose input is the cut.
        steps: How many. The first two of a path prove it, and only later ones are replayed.
        proves: Whether replay proves its paths.
        duplicate: Copies a model.
    """
    opt = SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=SuffixMask(model, cut), lr=LR)
    opt._passes.replay.proves = proves
    verdict = Verdict()
    for step in range(steps):
        before = duplicate(model)
        torch.manual_seed(1000 + step)
        random, seen = torch.get_rng_state(), []

        def closure(step: int = step, seen: list[dict[str, Tensor]] = seen) -> Tensor:
            seen.append({n: p.detach().clone() for n, p in model.named_parameters()})
            opt.zero_grad()
            value = loss(model, step)
            value.backward()
            return value

        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            value = float(opt.step(closure).detach())
        verdict.messages += [str(w.message) for w in record if "second pass" in str(w.message)]
        verdict.calls.append(len(seen))

        first, expected = duplicate(before), {n: p.detach().clone() for n, p in before.named_parameters()}
        grads, at_w = whole_pass(first, loss, step, random)
        eps = {n: seen[1][n] - w for n, w in expected.items()}
        moved = [n for n, e in eps.items() if bool(e.any())]
        length = sum(float(grads[n].square().sum()) for n in moved) ** 0.5
        left = dict(first.named_buffers())
        for name, buffer in model.named_buffers():
            verdict.buffers = max(verdict.buffers, _apart(buffer.double(), left[name].double()))
        # The second pass goes on with the buffers that the first has left.
        second = duplicate(first)
        with torch.no_grad():
            for name, p in second.named_parameters():
                p.copy_(seen[1][name])
        at_eps, _ = whole_pass(second, loss, step, random)
        taken = {n: expected[n] - p.detach() for n, p in model.named_parameters()}
        largest = max(float(g.abs().max()) for g in at_eps.values() if g.numel())
        verdict.loss = max(verdict.loss, _apart(torch.tensor(value), torch.tensor(at_w)))
        for name in moved:
            verdict.perturbation = max(verdict.perturbation, _apart(eps[name], RHO * grads[name] / length) / RHO)
        for name, difference in taken.items():
            if difference.numel():
                apart = _apart(difference / LR, at_eps[name]) / max(1.0, largest)
                verdict.step = max(verdict.step, apart)
    return verdict


def _apart(a: Tensor, b: Tensor) -> float:
    difference = float((a - b).abs().max()) if a.numel() else 0.0
    return difference if difference == difference else float("inf")
