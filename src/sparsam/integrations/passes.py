"""What trainers need that call ``optimizer.step()`` themselves, without a closure.

`run_passes` and `current_scale` live in the core, which uses them too. Users import them from here
(docs/integrations.md).
"""

from __future__ import annotations

from torch.optim import Optimizer

from sparsam.sam import SAM
from sparsam.sam.without_closure import current_scale, run_passes

__all__ = ["current_scale", "find_sam", "run_passes"]


def find_sam(optimizer: object) -> SAM | None:
    """Return the SAM inside the wrappers of a trainer; None: there is none."""
    # Lightning's wrapper is an instance of SAM too, but has a state of its own.
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer if isinstance(optimizer, SAM) else None
