"""Whether gradients are cleared between two passes: else both would be added, without a word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsam.errors import UserRuntimeError, UserTypeError, warn
from sparsam.sam.phase import UsedGradients

NOT_CLEARED = (
    "the closure must clear the gradients, with opt.zero_grad() in its first line, but does not: the gradient of one "
    "pass was added to that of another"
)
ACCUMULATED = (
    "the closure must clear the gradients, but added to some from before step(closure): accumulate all of them inside "
    "the closure (in Lightning: derive from sparsam.integrations.lightning.SAMModule)"
)
ADDED = (
    "the gradient at w + eps was added to that at w, and the base optimizer takes their sum. Clear the first one: call "
    "opt.zero_grad() before the second pass, or first_step(zero_grad=True)"
)


class ClosureCheck:
    """Calls closures, and refuses those that do not clear the gradients. Without a closure it can only warn.

    A closure that calls the optimizer's `zero_grad`, or sets gradients to None, is seen to clear them. One that fills
    them with zeros itself is found out once: before a call, old gradients are filled with NaN, which none must contain
    afterwards. If there are none, because they were cleared before the step, one is made up.
    """

    def __init__(self) -> None:
        self.cleared = False  # whether the optimizer's zero_grad was called
        self._proven: dict[object, bool] = {}  # the code of closures that have cleared old ones; whether by zero_grad
        self._trained: Tensor | None = None  # a parameter that a closure has computed a gradient of
        self._first: UsedGradients | None = None  # of a first pass without a closure
        self._warned = False

    def __getstate__(self) -> dict[str, object]:
        nothing = {"cleared": False, "_proven": {}, "_trained": None, "_first": None}  # code cannot be copied
        return {**self.__dict__, **nothing}

    def begin_two_steps(self, params: Sequence[Tensor]) -> None:
        """Note the gradients of a first pass without a closure."""
        self.cleared, self._first = False, UsedGradients()
        self._first.note(params)

    def end_two_steps(self, params: Callable[[], Sequence[Tensor]], *, taken: bool) -> None:
        """Warn once if those of a second pass were added to them, in a step that is taken."""
        first, self._first = self._first, None
        if first is None or not taken or self.cleared or self._warned or not first.added_to(params()):
            return
        self._warned = True
        warn(ADDED)

    def call(self, closure: Callable[[], Any], params: Sequence[Tensor], used: UsedGradients | None = None) -> Any:
        """Call a closure, with gradients enabled.

        Args:
            closure: The closure.
            params: Whose gradients it has to clear.
            used: The gradients that a base step has used, before the first call of a step; None: all are old.
        """
        if not callable(closure):
            raise UserTypeError(
                f"closure must be a function that computes the loss and its gradient, but is a {type(closure).__name__}"
            )
        accumulated = used is not None and used.any_new(params)
        code = _code_of(closure)  # a closure is mostly made anew in each step
        self.cleared = False
        torch.set_grad_enabled(True)  # step() sets it back; a closure may have left it off
        if code in self._proven and not accumulated:  # nothing must keep the memory of old gradients
            # Of one parameter, which takes no time: the last, since every loss depends on a model's last layer.
            old, last = UsedGradients(), next((p for p in reversed(params) if p.grad is not None), None)
            old.note(() if last is None else (last,))
            result = closure()
            if self._proven[code] and not self.cleared:  # it did not call zero_grad this time
                if old.added_to(params):
                    raise UserRuntimeError(NOT_CLEARED)
                del self._proven[code]  # the next call shows whether it clears in another way
            return result
        before = [(p, p.grad) for p in params if p.grad is not None]
        if not accumulated:
            return self._prove(closure, code, params, before)
        result = closure()
        if not self.cleared and any(p.grad is grad for p, grad in before):
            raise UserRuntimeError(ACCUMULATED)
        return result

    def _prove(
        self, closure: Callable[[], Any], code: object, params: Sequence[Tensor], before: list[tuple[Tensor, Tensor]]
    ) -> Any:
        """Call a closure that has not been seen to clear old gradients; `before` are those."""
        makes_up = not before and any(p is self._trained for p in params)
        if makes_up and (p := self._trained) is not None:
            p.grad = torch.zeros_like(p)
            before = [(p, p.grad)]
        dense = [(p, grad) for p, grad in before if grad.layout == torch.strided]
        with torch.no_grad():
            for _, grad in dense:
                grad.fill_(torch.nan)
        try:
            result = closure()
        except BaseException:
            for p, grad in dense:
                p.grad = None if p.grad is grad else p.grad  # it may hold NaN
            raise
        if not before:
            self._trained = next((p for p in params if p.grad is not None), None)
            return result
        left = [grad for p, grad in dense if p.grad is grad]
        if not self.cleared and any(bool(grad.isnan().any()) for grad in left):
            for p in params:
                p.grad = None
            raise UserRuntimeError(NOT_CLEARED)
        self._proven[code] = self.cleared
        if makes_up and left and not bool(left[0].any()):  # the closure has filled it with zeros, and not used it
            before[0][0].grad = None
        return result


def _code_of(closure: Any) -> tuple[object, ...]:
    """Return what tells a closure from others, whoever makes it: its code, and that of functions that it wraps."""
    codes: list[object] = []
    while closure is not None:
        codes.append(getattr(closure, "__code__", type(closure)))
        closure = closure.func if isinstance(closure, partial) else getattr(closure, "__wrapped__", None)
    return tuple(codes)
