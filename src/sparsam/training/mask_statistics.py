"""What masks select in each epoch of a run: how much of the network, and how far they move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsam.selection import overlap


class MaskStatistics:
    """Measures one mask an epoch, and compares it with that of the epoch before and with the first.

    Args:
        model: The network. Weights are counted by block: `layer1.0`, `layer1.1`, ...
        params: The optimized parameters, in the order of the masks.
    """

    def __init__(self, model: nn.Module, params: Sequence[Tensor]) -> None:
        self.params = params
        names: dict[Tensor, str] = {p: ".".join(name.split(".")[:2]) for name, p in model.named_parameters()}
        self.blocks = [names[p] for p in params]
        self.first: list[Tensor] | None = None
        self.before: list[Tensor] | None = None
        self.current: dict[str, Any] | None = None  # of the epoch so far

    def measure(self, masks: list[Tensor]) -> None:
        """Measure the mask of an epoch."""
        chosen = dict.fromkeys(self.blocks, 0)
        total = dict.fromkeys(self.blocks, 0)
        counts = torch.stack([m.sum() for m in masks]).tolist()
        for block, p, count in zip(self.blocks, self.params, counts, strict=True):
            total[block] += p.numel()
            chosen[block] += count
        kept: list[float | None] = [None, None]
        if any(0 < count < p.numel() for p, count in zip(self.params, counts, strict=True)):  # or it cannot move
            if self.before is not None and self.first is not None:
                kept = [overlap(masks, earlier, self.params) for earlier in (self.before, self.first)]
            self.before = masks
            self.first = self.first or masks
        self.current = {
            "perturbed": sum(chosen.values()) / sum(total.values()),
            "mask_density": {block: chosen[block] / total[block] for block in total},
            "mask_kept": kept[0],
            "mask_kept_since_start": kept[1],
        }

    def epoch(self, two_passes: float) -> dict[str, Any]:
        """Return the numbers of an epoch, and make ready for the next.

        Args:
            two_passes: The fraction of its steps that took two passes. The others read no mask.
        """
        zero = {"perturbed": 0.0, "mask_density": dict.fromkeys(self.blocks, 0.0)}
        none = {"mask_kept": None, "mask_kept_since_start": None}
        numbers, self.current = self.current or {**zero, **none}, None
        density = {block: two_passes * share for block, share in numbers["mask_density"].items()}
        return {**numbers, "perturbed": two_passes * numbers["perturbed"], "mask_density": density}

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"first": self.first, "before": self.before, "current": self.current}

    def load(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` returned."""
        self.first, self.before, self.current = state["first"], state["before"], state["current"]
