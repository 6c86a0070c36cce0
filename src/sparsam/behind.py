"""What an optimizer keeps of its mask's cuts: which parameters lie before each, and how the norms relate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsam.distributed.broadcast import value_of_rank_zero
from sparsam.errors import UserRuntimeError
from sparsam.masks import BudgetMask, Mask, StepKind
from sparsam.masks.budget import step_limit
from sparsam.perturbation import gradient_norm
from sparsam.replay.costs import cut_costs, late_costs
from sparsam.replay.modules import parameters_before_by_order
from sparsam.replay.recording import Recording
from sparsam.replay.replay import Replay


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

    def modules_before(self, kind: StepKind) -> set[nn.Module]:
        """Return the modules that the second pass is not going to call."""
        return set() if kind.cut is None or self.replay is None else self.replay.modules_before()

    def second_pass(
        self, kind: StepKind, perturbed: Iterable[Tensor], in_full: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """Start the second pass of a step that is cut at its cut; call `in_full` if it calls all modules after all."""
        if kind.cut is None or self.replay is None:
            return nullcontext()
        return self.replay.second_pass(perturbed, in_full)

    def forget(self) -> None:
        """Let go of what a first pass left, if no second one came."""
        if self.replay is not None:
            self.replay.recording = None

    def is_spoilt(self, params: Sequence[Tensor]) -> bool:
        """Tell whether a second pass has used values that it did not have; looked at once, because that takes waiting.

        A tensor that code between modules changed in place is handed out as NaN in the second pass. Nothing is wrong
        with that unless its values are used behind the cut, and then the gradients are NaN.
        """
        if self.replay is None or not self.replay.doubtful:
            return False
        self.replay.doubtful = False
        if torch.isfinite(self._norm(params, [True] * len(params))):
            return False
        self.replay.give_up("values from before the cut, changed in place there, are used behind it")
        return True

    # ------------------------------------------------------------------------------------------- parameters

    def find(self, kind: StepKind, params: Sequence[Tensor]) -> None:
        """Find out which parameters lie before a cut: from the recorded first pass, or by a guess where there is none.

        It is found once; a first pass that took another way later is noticed in its second pass.
        """
        cut = kind.cut
        if kind.one_pass:
            raise UserRuntimeError(
                "this step takes one pass, because only the last of total_steps steps perturb by a gradient, and "
                "step(closure) knows when: take steps with a closure, or leave total_steps out"
            )
        if isinstance(self.mask, BudgetMask) and self.mask.unmeasured and not kind.everything:
            raise UserRuntimeError(
                "a budget is measured in step(closure), but this step has no closure: name a cut, as in "
                "BudgetMask(model, cut='layer4') (in a recipe mask.cut), to step without one"
            )
        if cut is None or self.replay is None:
            return
        recorded = self.replay.parameters_before()
        if self.replay.recording is None:
            self.replay.warn_two_step()
        if len(self.before.get(cut, [])) != len(params):
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

    def choose(
        self,
        closure: Callable[[], Any],
        base: Optimizer,
        rehearsal: Callable[[str | None], Callable[[], None]],
        *,
        device_time: bool,
    ) -> None:
        """Measure what a budget has to choose from, in several calls of the closure, and choose."""
        mask = self.mask
        if not isinstance(mask, BudgetMask) or not mask.unmeasured:
            return
        how = {"device_time": device_time, "adaptive": self.adaptive}
        # What fits on one rank may not fit on another, which then must not be alone with its error.
        if mask.total_steps is not None:
            first, last = late_costs(mask.model, closure, base, rehearsal(mask.cut), **how)
            mask.choose_late(*value_of_rank_zero((first if mask.momentum_rho else 1.0, last)))
            return
        limit = step_limit(mask.budget, mask.full)
        costs = cut_costs(mask.model, closure, base, rehearsal, **how, limit=limit)
        mask.choose(value_of_rank_zero({cut.name: cost for cut, cost in costs.items()}))

    # ------------------------------------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain values and a tensor."""
        share = None if self.norm_share is None else self.norm_share.clone()
        before = {cut: list(b) for cut, b in self.before.items()}
        chosen = (
            {"late_share": self.mask.late_share, "cost": self.mask.cost} if isinstance(self.mask, BudgetMask) else {}
        )
        return {"cut": self.mask.cut, **chosen, "before": before, "norm_share": share}

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        """Load what :meth:`state` returned."""
        self.mask.cut = state.get("cut", self.mask.cut)
        if isinstance(self.mask, BudgetMask):
            self.mask.late_share, self.mask.cost = state.get("late_share", self.mask.late_share), state.get("cost")
        self.before = {cut: list(b) for cut, b in state.get("before", {}).items()}
        share = state.get("norm_share")
        self.norm_share = None if share is None else share.to(device)
