"""Where in a step an optimizer is."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from enum import Enum

from torch import Tensor

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


class UsedGradients:
    """Remembers the gradients that a base step has used, to tell whether a backward pass was made since."""

    def __init__(self) -> None:
        self._versions: list[tuple[weakref.ref[Tensor], int]] = []

    def note(self, params: Iterable[Tensor]) -> None:
        """Remember the gradients as they are."""
        self._versions = [(weakref.ref(grad), version) for grad, version in _with_versions(params)]

    def any_new(self, params: Iterable[Tensor]) -> bool:
        """Tell whether there is a gradient that was not there, or was another."""
        versions = {id(grad()): version for grad, version in self._versions}
        return any(versions.get(id(grad)) != version for grad, version in _with_versions(params))

    def __getstate__(self) -> dict[str, object]:
        return {"_versions": []}  # a copy has gradients of its own


def _with_versions(params: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    """Return the gradients with their versions: FSDP adds to the local part of one, which counts its own."""
    grads = [p.grad for p in params if p.grad is not None]
    return [(grad, part._version) for grad, part in zip(grads, local_parts(grads), strict=True)]
