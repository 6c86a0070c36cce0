"""SAM: the direction is the gradient."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from sparsam.ascents.base import Ascent, Memory


class GradientAscent(Ascent):
    """d = g: SAM."""

    def direction(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], memory: Memory, base: Optimizer
    ) -> Sequence[Tensor]:
        """Return g."""
        return grads
