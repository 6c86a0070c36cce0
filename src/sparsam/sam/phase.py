"""Where in a step an optimizer is."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from enum import Enum

from torch import Tensor

from sparsam.ascents import Ascent
from sparsam.distributed.shards import local_parts
from sparsam.errors import UserRuntimeError


class Phase(Enum):
    """Where in a step an optimizer is; the value completes "the optimizer is ..."."""

    IDLE = "between two steps"
    FIRST_PASS = "inside the closure's first pass"
    ONLY_PASS = "inside the closure's only pass"
    PERTURBED = "at the perturbed weights"
    READY = "done with the second pass"

    def refuse_inside_step(self, what: str) -> None:
        """Refuse what can be called between two steps only."""
        if self in (Phase.FIRST_PASS, Phase.ONLY_PASS):
            raise UserRuntimeError(f"{what} cannot be called while the optimizer is {self.value}")
        if self is Phase.PERTURBED:
            raise UserRuntimeError(
                f"{what} cannot be called while the optimizer is {self.value}; end the step first with "
                "second_step(), or give it up with restore()"
            )

    def refuse_second_step(self) -> None:
        """Refuse `second_step()` where the weights are not at w + eps."""
        if self is not Phase.PERTURBED:
            raise UserRuntimeError(f"second_step() needs first_step() before it, but the optimizer is {self.value}")

    def refuse_to_end(self, ascent: Ascent | None) -> None:
        """Refuse `step()` without closure where no step was begun that it could end."""
        if self is Phase.IDLE and ascent is not None and ascent.passes == 1:
            raise UserRuntimeError(
                f"step() without closure needs `with opt.perturbed():` around the backward pass in a step of {ascent!r}"
            )
        if self in (Phase.IDLE, Phase.FIRST_PASS, Phase.ONLY_PASS):
            raise UserRuntimeError(
                f"step() without closure ends a step that first_step() or perturbed() began, but the optimizer is "
                f"{self.value}: SAM needs two gradients. Pass a closure, or call first_step() before it"
            )


class UsedGradients:
    """Remembers the gradients that a base step has used, to tell whether a backward pass was made since."""

    def __init__(self) -> None:
        self._grads: list[weakref.ref[Tensor]] = []
        self._versions: list[int] = []

    def note(self, params: Iterable[Tensor]) -> None:
        """Remember the gradients as they are."""
        grads, self._versions = _with_versions(params)
        self._grads = list(map(weakref.ref, grads))

    def any_new(self, params: Iterable[Tensor]) -> bool:
        """Tell whether there is a gradient that was not there, or was another."""
        grads, versions = _with_versions(params)
        known = {id(grad()): version for grad, version in zip(self._grads, self._versions, strict=True)}
        return list(map(known.get, map(id, grads))) != versions

    def added_to(self, params: Iterable[Tensor]) -> bool:
        """Tell whether a single backward pass was added to these gradients. With zeros in between they change twice.

        So do those that two backward passes were added to, which are not seen here.
        """
        known = {id(grad()): version for grad, version in zip(self._grads, self._versions, strict=True)}
        rows = [row for row in zip(*_with_versions(params), strict=True) if id(row[0]) in known]
        return max((version - known[id(grad)] for grad, version in rows), default=0) == 1

    def __getstate__(self) -> dict[str, object]:
        return {"_grads": [], "_versions": []}  # a copy has gradients of its own


def _with_versions(params: Iterable[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Return the gradients, and their versions: FSDP adds to the local part of one, which counts its own."""
    grads = [grad for p in params if (grad := p.grad) is not None]
    return grads, [part._version for part in local_parts(grads)]
