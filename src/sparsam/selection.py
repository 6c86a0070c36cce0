"""Choosing exactly k weights of a model: the arithmetic that masks share.

Weights are numbered over all tensors together, in the order given, each tensor in row-major order: the
"flat index". All functions work on the device and leave it to the caller to wait for it.

Where parameters are sharded (DTensors), a flat vector is that of this process' parts, and the weights that are chosen
are those that one process with whole parameters would choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sparsam.distributed.select import largest_sharded
from sparsam.distributed.shards import any_dtensor, is_dtensor, local, part_of, totals
from sparsam.distributed.shards import like as sharded_like
from sparsam.errors import UserValueError
from sparsam.randomness import random_generator

Selection = list[Tensor | bool]
"""Which weights are perturbed, tensor by tensor: a bool tensor, or one bool for all weights of a tensor."""


def perturbed_count(total: int, sparsity: float) -> int:
    """Return k = round((1 - s) * total): how many weights a mask of sparsity s perturbs.

    >>> perturbed_count(1000, 0.8)
    200
    """
    return round((1 - sparsity) * total)


def largest(scores: Tensor, k: int, params: Sequence[Tensor] = ()) -> Tensor:
    """Return a bool vector that is true at the k largest scores; of equal ones the lower index wins.

    Args:
        scores: One for each weight, by flat index.
        k: How many.
        params: Whose scores they are, if the parameters may be sharded.

    >>> largest(torch.tensor([3.0, 1.0, 3.0, 3.0]), 2)
    tensor([ True, False,  True, False])
    """
    sharded = any_dtensor(params)
    if k <= 0 or k >= (sum(p.numel() for p in params) if sharded else scores.numel()):
        return torch.full_like(scores, k > 0, dtype=torch.bool)
    if sharded:
        return largest_sharded(scores, k, params)
    threshold = torch.topk(scores, k, sorted=False).values.min()
    above, equal = scores > threshold, scores == threshold
    return above | (equal & (equal.cumsum(0) <= k - above.sum()))


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Lay tensors side by side in one vector on the device of the first."""
    flat = [local(t).detach().reshape(-1) for t in tensors]
    return torch.cat([t.to(flat[0].device) for t in flat])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Cut a vector into tensors with the shapes and devices of `like`, sharded as these are."""
    pieces = torch.split(flat, [local(t).numel() for t in like])
    return [sharded_like(piece.view(local(t).shape).to(t.device), t) for piece, t in zip(pieces, like, strict=True)]


def expand(selection: Iterable[Tensor | bool], like: Sequence[Tensor]) -> list[Tensor]:
    """Return a selection as bool tensors, one for each tensor of `like`."""
    return [
        m if isinstance(m, Tensor) else torch.full_like(p, m, dtype=torch.bool)
        for m, p in zip(selection, like, strict=True)
    ]


def settle(selection: Sequence[Tensor | bool], params: Sequence[Tensor]) -> Selection:
    """Lay bool tensors out in memory as the parameters are, and reduce full and empty ones to True and False.

    Waits for the device, to know which tensors those are.
    """
    if len(selection) != len(params):
        raise UserValueError(f"a mask must say something of each of {len(params)} tensors, but has {len(selection)}")
    indices, tensors = [], []
    for i, (m, p) in enumerate(zip(selection, params, strict=True)):
        if not isinstance(m, (bool, Tensor)):
            raise UserValueError(
                f"a mask must be True, False or a bool tensor of shape {tuple(p.shape)}, but is {m!r} for parameter {i}"
            )
        if isinstance(m, Tensor):
            if m.shape != p.shape or m.dtype != torch.bool:
                raise UserValueError(
                    f"a mask must be True, False or a bool tensor of shape {tuple(p.shape)}, but is {m.dtype} of "
                    f"shape {tuple(m.shape)} for parameter {i}"
                )
            indices.append(i)
            tensors.append(torch.empty_like(p, dtype=torch.bool))
            local(tensors[-1]).copy_(part_of(m, p))
    counts = _counts(tensors, [params[i] for i in indices]) if tensors else []
    settled = list(selection)
    for i, m, count in zip(indices, tensors, counts, strict=True):
        settled[i] = m if 0 < count < m.numel() else count > 0
    return settled


def _counts(masks: list[Tensor], params: Sequence[Tensor]) -> list[int]:
    sums = torch.stack([local(m).sum().to(masks[0].device) for m in masks])
    return totals(sums, params).tolist()


def copied(selection: Selection | None) -> Selection | None:
    """Return a selection that later updates do not write into."""
    return None if selection is None else [m.clone() if isinstance(m, Tensor) else m for m in selection]


def overlap(one: Sequence[Tensor | bool], other: Sequence[Tensor | bool], params: Sequence[Tensor]) -> float:
    r"""Return the share of the weights in one selection that are in another too; of an empty one, 1. Waits.

    >>> w = [torch.zeros(4)]
    >>> overlap([torch.tensor([True, True, False, False])], [torch.tensor([False, True, True, False])], w)
    0.5
    """
    both = count = torch.zeros((), dtype=torch.int64, device=params[0].device)
    for m, n in zip(expand(one, params), expand(other, params), strict=True):
        both, count = both + (m & n).sum().to(both.device), count + m.sum().to(count.device)
    return both.item() / count.item() if count else 1.0


def rewritten(old: Selection | None, new: Selection) -> Selection:
    """Return the new selection: in the tensors and the list of the old one, if it has tensors in the same places."""

    def shape(selection: Selection) -> list[bool | None]:
        return [m if isinstance(m, bool) else None for m in selection]

    if old is None or shape(old) != shape(new):
        return new
    for target, source in zip(old, new, strict=True):
        if isinstance(target, Tensor) and isinstance(source, Tensor):
            target.copy_(source)
    return old


def random_scores(params: Sequence[Tensor], *seed: int) -> Tensor:
    """Return independent uniform numbers in [0, 1), one for each weight: their k largest are a uniform choice of k.

    A process that holds a part of a parameter draws the numbers of the whole, and keeps those of its part.
    """
    device = params[0].device
    generator = random_generator(*seed, device=device)
    flat = torch.empty(sum(local(p).numel() for p in params), dtype=torch.float64, device=device)
    for piece, p in zip(torch.split(flat, [local(p).numel() for p in params]), params, strict=True):
        if is_dtensor(p):
            whole = torch.rand(p.shape, dtype=flat.dtype, device=device, generator=generator)
            piece.copy_(part_of(whole, p).reshape(-1))
        else:
            piece.uniform_(generator=generator)
    return flat
