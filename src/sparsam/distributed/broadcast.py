"""One mask for all processes that train a model together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from sparsam.distributed.groups import group_size
from sparsam.distributed.shards import any_sharded
from sparsam.errors import UserRuntimeError
from sparsam.selection import Selection, expand, flatten, unflatten

TOLERANCE = 1e-6  # of the mean size of a weight: ranks may differ in the last bits, as different GPUs do


def of_rank_zero(selection: Sequence[Tensor | bool], params: Sequence[Tensor], group: Any | None = None) -> Selection:
    """Return the selection of the first rank of a process group (None: of all processes), on every rank of it.

    Ranks differ in what a mask may look at: running statistics, a gradient that is not synchronised, the
    last bits of any result. A process that is alone gets its selection back as it is. Ranks of the group that train
    different models, as in an ensemble or in stages of a pipeline, have no mask in common: that is an error on all of
    them.
    """
    # Sharded parameters have one mask already, of which each rank holds a part.
    # Whole tensors are chosen by what they are, which is the same on all ranks.
    whole = not any(isinstance(m, Tensor) for m in selection)
    if whole or any_sharded(params) or group_size(group) == 1:
        return list(selection)
    flat = flatten(expand(selection, params)).view(torch.uint8)
    _check_same(params, flat.device, group)
    dist.broadcast(flat, group=group, group_src=0)
    return list(unflatten(flat.view(torch.bool), params))


def _check_same(params: Sequence[Tensor], device: torch.device, group: Any | None) -> None:
    """Refuse ranks that hold different weights; all of them come to the same result."""
    double = torch.float64
    total = torch.stack([p.detach().sum(dtype=double).to(device) for p in params]).sum().nan_to_num()
    size = torch.stack([torch.linalg.vector_norm(p.detach(), 1, dtype=double).to(device) for p in params]).sum()
    count = torch.full_like(total, sum(p.numel() for p in params))
    largest = torch.stack([count, -count, total, -total, size.nan_to_num()])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    most, fewest, high, low, size_of_all = largest.tolist()
    if most != -fewest or high + low > TOLERANCE * size_of_all:
        raise UserRuntimeError(
            "all ranks must train the same weights, because all use the mask of rank 0, but they hold different ones: "
            "give each model a process_group= of its own, or perturb whole tensors (DenseMask, NormMask)"
        )
