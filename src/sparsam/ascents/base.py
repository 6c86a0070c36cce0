"""The contract that every ascent keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor
from torch.optim import Optimizer

from sparsam.settings import Policy

Memory = dict[Tensor, dict[str, Tensor]]
"""What an ascent keeps between steps: named tensors, by parameter."""


class Ascent(Policy, ABC):
    """Says which way a step perturbs the weights."""

    passes: ClassVar[int] = 2
    """2: the direction comes from a first pass at w, and a second pass follows at w + eps, where a mask allows it.
    1: the direction is known before the step, every weight moves along it, and the only pass is at w + eps."""

    @abstractmethod
    def direction(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], memory: Memory, base: Optimizer
    ) -> Sequence[Tensor | None]:
        """Return the direction d, a tensor for each parameter; None: the parameter stays where it is.

        Args:
            params: The parameters that take part. With two passes: those in the mask's scope that have a gradient.
            grads: The gradient of each at w; nothing if the ascent takes one pass.
            memory: What this ascent has kept; it may add to it.
            base: The base optimizer.

        Sharded parameters are DTensors, and so are their gradients. The direction may be a DTensor too, or its local
        part.
        """

    def start(self, params: Sequence[Tensor], memory: Memory) -> None:
        """Add to the memory what is kept of parameters of which nothing is known yet.

        `torch.distributed.checkpoint` needs it: it loads a memory into one that is there
        (:class:`sparsam.SAMState`).
        """

    def remember(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], memory: Memory, norm: Tensor
    ) -> Callable[[], None] | None:
        """Return what brings the memory up to date; None if there is nothing to do.

        It is called when the step is taken. A step that is given up, or that a gradient scaler skips, leaves the memory
        as it was.

        Args:
            params, grads, memory: As for :meth:`direction`.
            norm: The norm of d: not finite if a gradient is not.
        """
        return None

    def radius(self, rho: float | Tensor) -> float | Tensor:
        """Return the radius, given that of a parameter group; below 0 the perturbation goes against d."""
        return rho

    def check(self, base: Optimizer) -> None:
        """Refuse base optimizers that the ascent cannot work with."""
