"""The control for every sparse mask: weights chosen by chance."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparsam.masks.sparsity import SparseMask
from sparsam.selection import random_scores


class RandomMask(SparseMask):
    r"""Perturbs :math:`k = \mathrm{round}((1-s)\,|w|)` weights chosen uniformly at random.

    Args:
        sparsity: The share s of the weights that is not perturbed, in [0, 1].
        interval: Draw anew every `interval` steps; None: once.
        seed: Where the mask's own random numbers start.
    """

    def __init__(self, sparsity: float, *, interval: int | None = None, seed: int = 0) -> None:
        super().__init__(sparsity, interval, seed)

    def flat_scores(self, params: Sequence[Tensor], step: int, previous: Tensor | None) -> Tensor:
        """Return uniform random numbers."""
        return random_scores(params, self.seed, step)
