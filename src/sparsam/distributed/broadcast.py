"""One mask for all processes that train a model together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from sparsam.errors import UserRuntimeError
from sparsam.selection import Selection, expand, flatten, unflatten

TOLERANCE = 1e-6  # of the mean size of a weight: ranks may differ in the last bits, as different GPUs do


PART = 2  # how a tensor is chosen: 0 not at all, 1 as a whole, 2 in part


def broadcast_selection(selection: Sequence[Tensor | bool], params: Sequence[Tensor], group: Any | None) -> Selection:
    """Return the selection of the first rank of a process group (None: of all processes), on every rank of it.

    Ranks differ in what a mask may look at: running statistics, a gradient that is not synchronised, the last bits of
    any result.
    """
    kinds = torch.tensor([PART if isinstance(m, Tensor) else int(m) for m in selection], dtype=torch.uint8)
    kinds = kinds.to(params[0].device)
    dist.broadcast(kinds, group=group, group_src=0)
    result: Selection = [bool(kind) for kind in kinds.tolist()]
    in_part = [i for i, kind in enumerate(kinds.tolist()) if kind == PART]
    if in_part:
        own, like = [selection[i] for i in in_part], [params[i] for i in in_part]
        flat = flatten(expand(own, like)).view(torch.uint8)
        dist.broadcast(flat, group=group, group_src=0)
        for i, m in zip(in_part, unflatten(flat.view(torch.bool), like), strict=True):
            result[i] = m
    return result


def check_same_weights(params: Sequence[Tensor], group: Any | None) -> None:
    """Refuse ranks that train different models, as in an ensemble or in stages of a pipeline: all of them do so."""
    device = params[0].device
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
            "wrap the model in DistributedDataParallel. Models that are trained independently each need a "
            "process_group= of their own, or a mask of whole tensors (DenseMask, NormMask)"
        )
