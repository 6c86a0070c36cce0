"""Groups of processes: how large they are, and means over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from sparsam.distributed.shards import any_dtensor
from sparsam.errors import UserTypeError, UserValueError

BUCKET_BYTES = 25 * 2**20  # as much as DistributedDataParallel reduces at once


def is_distributed() -> bool:
    """Tell whether this process is one of several that can talk to each other."""
    return dist.is_available() and dist.is_initialized()


def group_size(group: Any | None) -> int:
    """Return the number of processes in a group; None: in all."""
    return dist.get_world_size(group) if is_distributed() else 1


def check_group(group: Any | None) -> None:
    """Refuse what is no group of processes, or one without this process."""
    if group is None:
        return
    if not dist.is_available() or not isinstance(group, (dist.ProcessGroup, int)):
        raise UserTypeError(
            f"process_group must be a group that torch.distributed.new_group() returned, or None, but is {group!r}"
        )
    if isinstance(group, int) or dist.get_rank(group) < 0:  # what new_group returns to processes that are not in it
        raise UserValueError(
            "process_group must hold this process, but does not: give each process a group that it is in"
        )


@torch.no_grad()
def average(tensors: Sequence[Tensor], group: Any | None) -> None:
    """Let tensors be their means over the ranks of a group, in few messages.

    All ranks must have the same shapes and dtypes, in the same order.
    """
    size = group_size(group)
    if size == 1:
        return
    waiting = []
    for bucket in _buckets(tensors):
        flat = torch.cat([t.reshape(-1) for t in bucket]).div_(size)  # before it is summed: fp16 overflows early
        waiting.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in waiting:
        work.wait()
        parts = torch.split(flat, [t.numel() for t in bucket])
        torch._foreach_copy_(bucket, [part.view(t.shape) for part, t in zip(parts, bucket, strict=True)])


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one device and dtype together, up to a size."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for t in tensors:
        if t.numel():
            alike.setdefault((t.device, t.dtype), []).append(t)
    for group in alike.values():
        bucket, size = [group[0]], group[0].nbytes
        for t in group[1:]:
            size += t.nbytes
            if size > BUCKET_BYTES:
                yield bucket
                bucket, size = [], t.nbytes
            bucket.append(t)
        yield bucket


_selecting: ContextVar[tuple[Any] | None] = ContextVar("_selecting", default=None)


@contextmanager
def selecting_in(group: Any | None) -> Iterator[None]:
    """Let a mask that is made in the block average its scores over a group."""
    token = _selecting.set((group,))
    try:
        yield
    finally:
        _selecting.reset(token)


def average_scores(tensors: Sequence[Tensor]) -> None:
    """Let scores be their means over the ranks that will share the mask; outside an optimizer's step they stay.

    Those of sharded parameters are the same on all ranks already.
    """
    selecting = _selecting.get()
    if selecting is not None and not any_dtensor(tensors):
        average(tensors, selecting[0])
