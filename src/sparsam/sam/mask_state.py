"""What an optimizer keeps of its mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from sparsam.distributed.broadcast import broadcast_selection, check_same_weights
from sparsam.distributed.groups import group_size, selecting_in
from sparsam.distributed.replicas import Replicas
from sparsam.distributed.shards import any_dtensor, local
from sparsam.errors import UserRuntimeError
from sparsam.masks.base import Mask
from sparsam.randomness import fork_rng
from sparsam.selection import Selection, copied, rewritten, settle


class Made(NamedTuple):
    """A mask that was made."""

    selection: Selection
    step: int  # in which it was made
    eligible: list[bool]  # which parameters it could select from


class MaskState:
    """The latest selection of a mask, and when it is due to be made again.

    Args:
        mask: The optimizer's.
        replicas: The processes that share it.
    """

    def __init__(self, mask: Mask, replicas: Replicas) -> None:
        self.mask, self.replicas = mask, replicas
        self.made: Made | None = None
        self._before: Made | None = None  # the latest update: a step that is tried again updates the same mask again

    def is_due(self, step: int, eligible: list[bool]) -> bool:
        """Tell whether a two-pass step makes the mask."""
        if self.made is None or self.made.eligible != eligible:
            return True
        if self.mask.interval is None:
            return False
        taken = self.taken(step)
        return taken is None or step // self.mask.interval > taken.step // self.mask.interval

    def selection(self, params: list[Tensor], eligible: list[bool], step: int) -> Selection:
        """Return what a step perturbs; make the mask if it is due.

        An update writes into the same tensors, in the same list, unless it turns a tensor into a bool or back: what a
        captured CUDA graph reads stays where it is as long as the list is the same object.
        """
        if self.made is None or self.is_due(step, eligible):
            self._make(params, eligible, step)
        assert self.made is not None
        return self.made.selection

    def _make(self, params: list[Tensor], eligible: list[bool], step: int) -> None:
        before = self.taken(step)
        if before is not None:
            before = before._replace(selection=copied(before.selection) or [])
        indices = [i for i, e in enumerate(eligible) if e]
        subset = [params[i] for i in indices]
        selection: Selection = [False] * len(params)
        group = self.replicas.group
        if self.mask.interval is not None and group_size(group) > 1:
            self.replicas.check_uneven("a mask with an interval")
        if subset:
            # Sharded parameters have one mask already, of which each rank holds a part.
            shared = not self.mask.same_on_all_ranks and group_size(group) > 1 and not any_dtensor(subset)
            if shared:
                check_same_weights(subset, group)
            with _same_gradients(params), fork_rng(p.device for p in subset), selecting_in(group):
                chosen = self.mask.select(subset, step, before and [before.selection[i] for i in indices])
            if shared:
                chosen = broadcast_selection(chosen, subset, group)
            for i, m in zip(indices, settle(chosen, subset), strict=True):
                selection[i] = m
        self.made, self._before = Made(rewritten(self.made and self.made.selection, selection), step, eligible), before

    def taken(self, step: int) -> Made | None:
        """Return the mask of the latest step that was taken, where `step` is the next."""
        return self._before if self.made is not None and self.made.step == step else self.made

    def extend(self, count: int) -> None:
        """Make room for parameters that were added to the optimizer."""
        new = [False] * count
        self.made, self._before = (
            made and made._replace(selection=[*made.selection, *new], eligible=[*made.eligible, *new])
            for made in (self.made, self._before)
        )

    def state(self, step: int) -> dict[str, Any]:
        """Return plain values and tensors."""
        made = self.taken(step)
        saved = made and {
            "selection": copied(made.selection),
            "step": made.step,
            "eligible": list(made.eligible),
        }
        return {"seed": self.mask.seed, "made": saved}

    def load(self, state: dict[str, Any], params: list[Tensor]) -> None:
        """Load what :meth:`state` returned."""
        made = state["made"]
        self.mask.seed, self._before = state["seed"], None
        self.made = made and Made(settle(made["selection"], params), made["step"], list(made["eligible"]))


@contextmanager
def _same_gradients(params: Sequence[Tensor]) -> Iterator[None]:
    """Let a mask compute gradients of its own: afterwards those of the first pass are there, which the ascent reads."""
    before = [(grad, -1 if grad is None else local(grad)._version) for grad in (p.grad for p in params)]
    try:
        yield
    finally:
        for p, (grad, _) in zip(params, before, strict=True):
            p.grad = grad
    for i, (grad, version) in enumerate(before):
        if grad is not None and local(grad)._version != version:
            raise UserRuntimeError(
                f"a mask must leave the gradients of the first pass as they are, but has changed that of parameter {i} "
                f"in place; take gradients of your own by torch.autograd.grad, or after model.zero_grad()"
            )
