"""How far a mask moves while a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sparsam.selection import Selection, copied, overlap


class MaskHistory:
    """Compares the mask at the end of an epoch with that of the epoch before, and with the first."""

    def __init__(self) -> None:
        self.first: Selection | None = None
        self.before: Selection | None = None

    def add(self, selection: Selection | None, params: Sequence[Tensor]) -> dict[str, float | None]:
        """Note the mask of an epoch; return the shares of its weights that were in the earlier ones.

        None where there is no mask, or none that could move.
        """
        kept: dict[str, float | None] = {"mask_kept": None, "mask_kept_since_start": None}
        if selection is None or not any(isinstance(m, Tensor) for m in selection):
            return kept
        if self.before is not None and self.first is not None:
            kept["mask_kept"] = overlap(selection, self.before, params)
            kept["mask_kept_since_start"] = overlap(selection, self.first, params)
        self.before = copied(selection)
        self.first = self.first or self.before
        return kept

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"first": self.first, "before": self.before}

    def load(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` returned."""
        self.first, self.before = state["first"], state["before"]
