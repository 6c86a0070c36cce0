"""What an optimizer keeps of its mask's cuts: which parameters lie before each, and how the norms relate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsam.cuts import Cut, find_cuts
from sparsam.distributed import text_of_rank_zero
from sparsam.masks import BudgetMask, Mask, StepKind
from sparsam.masks.budget import choose_cut
from sparsam.passes import no_trace
from sparsam.perturbation import gradient_norm, perturb, restore
from sparsam.recording import Recording
from sparsam.replay import Replay, parameters_before_by_order
from sparsam.timing import Clock


class BehindCut:
    """Knows what lies behind the cuts of a mask; a mask without cuts has everything behind them.

    Args:
        mask: The optimizer's.
        adaptive: Whether norms are ASAM's.
    """

    def __init__(self, mask: Mask, adaptive: bool) -> None:
        self.mask, self.adaptive = mask, adaptive
        self.replay = None if mask.model is None else Replay(mask.model)
        self.before: dict[str, list[bool]] = {}  # by cut: which of the optimizer's parameters lie before it
        self.norm_share: Tensor | None = None  # |g behind| / |g| in the latest second pass

    # ------------------------------------------------------------------------------------------ the passes

    def first_pass(self, kind: StepKind) -> AbstractContextManager[Recording | None]:
        """Record the first pass of a step that is cut."""
        if kind.cut is None or self.replay is None:
            return nullcontext()
        unknown_norm = self.mask.norm == "whole" and self.norm_share is None
        return self.replay.first_pass(kind.cut, whole_gradient=unknown_norm)

    def second_pass(self, kind: StepKind, perturbed: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Start the second pass of a step that is cut at its cut."""
        if kind.cut is None or self.replay is None:
            return nullcontext()
        return self.replay.second_pass(perturbed)

    # ------------------------------------------------------------------------------------------- parameters

    def find(self, kind: StepKind, params: Sequence[Tensor]) -> None:
        """Find out which parameters lie before a cut: from the recorded first pass, or by a guess where there is none.

        It is found once; a first pass that took another way later is noticed in its second pass.
        """
        cut = kind.cut
        if isinstance(self.mask, BudgetMask) and self.mask.cut is None and not kind.everything:
            raise RuntimeError(
                "a budget is measured in step(closure), but the first step has none: name a cut, such as "
                "BudgetMask(model, cut='layer4'), to step without a closure"
            )
        if cut is None or self.replay is None:
            return
        recorded = self.replay.parameters_before()
        if self.replay.recording is None:
            self.replay.warn_two_step()
        if cut not in self.before:
            before = parameters_before_by_order(self.replay.model, cut) if recorded is None else recorded
            self.before[cut] = [p in before for p in params]

    def lies_behind(self, cut: str | None, params: Sequence[Tensor]) -> list[bool]:
        """Return for each parameter whether it lies behind a cut; all do where none is known."""
        before = self.before.get(cut, []) if cut is not None else []
        return [not b for b in before] + [True] * (len(params) - len(before))

    # ------------------------------------------------------------------------------------------------ norms

    def norm(self, kind: StepKind, params: Sequence[Tensor]) -> Tensor | None:
        """Return what the perturbation of a step is divided by; None: the norm of all gradients there are."""
        if kind.cut is None or (self.mask.norm == "whole" and self.norm_share is None):
            return None
        norm = self._norm(params, self.lies_behind(kind.cut, params))
        return norm / self.norm_share if self.mask.norm == "whole" else norm  # type: ignore[operator]

    @torch.no_grad()
    def note_norms(self, params: Sequence[Tensor]) -> None:
        """Note, after a second pass, which part of the gradient's norm lies behind the cut."""
        if self.mask.norm != "whole" or self.mask.cut not in self.before:
            return
        share = self._norm(params, self.lies_behind(self.mask.cut, params)) / self._norm(params, [True] * len(params))
        self.norm_share = share if self.norm_share is None else self.norm_share.copy_(share)

    def _norm(self, params: Sequence[Tensor], which: list[bool]) -> Tensor:
        chosen = [p for p, w in zip(params, which, strict=True) if w and p.grad is not None]
        grads = [p.grad for p in chosen]
        if not chosen:
            return torch.zeros((), device=params[0].device)
        return gradient_norm(chosen, grads, adaptive=self.adaptive)  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------ the choice

    def choose(self, closure: Callable[[], Any], base: Optimizer, *, device_time: bool) -> None:
        """Measure the cuts of a budget, in several calls of the closure, and choose."""
        mask = self.mask
        if not isinstance(mask, BudgetMask) or mask.cut is not None:
            return
        costs = cut_costs(mask.model, closure, base, device_time=device_time)
        chosen = choose_cut({cut.name: cost for cut, cost in costs.items()}, mask.budget, mask.full)
        mask.cut = text_of_rank_zero(chosen)

    # ------------------------------------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain values and a tensor."""
        share = None if self.norm_share is None else self.norm_share.clone()
        return {"cut": self.mask.cut, "before": {cut: list(b) for cut, b in self.before.items()}, "norm_share": share}

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        """Load what :meth:`state` returned."""
        self.mask.cut = state["cut"]
        self.before = {cut: list(b) for cut, b in state["before"].items()}
        share = state["norm_share"]
        self.norm_share = None if share is None else share.to(device)


def cut_costs(
    model: nn.Module, closure: Callable[[], Any], base: Optimizer, *, device_time: bool = False
) -> dict[Cut, float]:
    r"""Measure what a step costs from each cut, in base steps.

    With the share f of a pass that lies behind the cut, the share of the weights that does, and the time of
    perturbing all weights and of the base optimizer's own step in passes, p and b:

    .. math::  1 + \frac{f + \text{weights} \cdot p}{1 + b}

    A little too much, because the first pass of a real step stops right before the cut.

    Args:
        model: The network.
        closure: One pass, as for an optimizer; it is called several times.
        base: The base optimizer. Its step is timed on a copy.
        device_time: See :func:`sparsam.find_cuts`.
    """
    cuts = find_cuts(model, closure, device_time=device_time)
    params = [p for group in base.param_groups for p in group["params"]]
    clock = Clock(params[0].device, device_time)
    with no_trace(model), torch.enable_grad():
        for _ in range(2 if cuts else 0):  # the first warms up
            perturbing, stepping = _perturbing(params), _stepping(base)
            seconds = [clock.time(work) for work in (perturbing, stepping, closure)]
    return {cut: 1 + ((cut.step or 0) * seconds[2] + cut.weights * seconds[0]) / sum(seconds[1:]) for cut in cuts}


def _perturbing(params: Sequence[Tensor]) -> Callable[[], None]:
    used = [p for p in params if p.grad is not None]
    grads, rhos = [p.grad for p in used], [0.0] * len(used)

    @torch.no_grad()
    def work() -> None:
        restore(perturb(used, grads, [True] * len(used), rhos))  # type: ignore[arg-type]

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
