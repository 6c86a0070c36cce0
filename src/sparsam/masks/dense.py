"""SAM: every weight is perturbed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparsam.masks.base import Mask
from sparsam.selection import Selection


class DenseMask(Mask):
    """Perturbs every weight: plain SAM, and what `mask=None` means."""

    same_on_all_ranks = True

    def __init__(self) -> None:
        super().__init__()

    def select(self, params: Sequence[Tensor], step: int, previous: Selection | None) -> Selection:
        """Return everything."""
        return [True] * len(params)
