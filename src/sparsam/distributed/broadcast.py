"""One mask for all processes that train a model together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from sparsam.selection import Selection, expand, flatten, unflatten


def of_rank_zero(selection: Sequence[Tensor | bool], params: Sequence[Tensor]) -> Selection:
    """Return the selection of the process group's first rank, on every rank.

    Ranks differ in what a mask may look at: running statistics, a gradient that is not synchronised, the
    last bits of any result. Without a process group the selection is returned as it is.
    """
    # Whole tensors are chosen by what they are, which is the same on all ranks.
    whole = not any(isinstance(m, Tensor) for m in selection)
    if whole or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return list(selection)
    flat = flatten(expand(selection, params)).view(torch.uint8)
    dist.broadcast(flat, src=0)
    return list(unflatten(flat.view(torch.bool), params))
