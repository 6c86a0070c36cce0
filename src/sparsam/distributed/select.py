"""Choosing exactly k of the weights that several processes hold, by scores that no process sees all of.

The k-th largest score is found digit by digit: each process counts its candidates by their next 8 bits, and one
all-reduce of 256 counts says with which digit the search goes on. Eight rounds settle all 64 bits. Of equal scores the
lower flat indices win: the same search, among these indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsam.distributed.shards import Holders, local, offsets
from sparsam.errors import UserValueError

Total = Callable[[Tensor], Tensor]
"""Adds a tensor up over all processes."""

SIGN = torch.iinfo(torch.int64).min
DIGIT = 8  # bits


def largest_sharded(scores: Tensor, k: int, params: Sequence[Tensor]) -> Tensor:
    """Return a bool vector for the local parts of parameters: true at the k largest scores of all processes.

    Args:
        scores: Of the local parts, side by side.
        k: How many, more than 0 and less than there are in all processes.
        params: The parameters, some of which are DTensors.
    """
    here = sum(local(p).numel() for p in params)
    if scores.numel() != here:
        raise UserValueError(f"scores must be those of the {here} weights in this process, but are {scores.numel()}")
    holders = Holders(params)
    counted = torch.cat([torch.full((local(p).numel(),), holders.own(p), device=scores.device) for p in params])
    return select(scores, k, counted, lambda: flat_indices(params).to(scores.device), holders.total)


def select(scores: Tensor, k: int, counted: Tensor, indices: Callable[[], Tensor], total: Total) -> Tensor:
    """Return a bool vector that is true at scores that are among the k largest; of equal ones the lower index wins.

    Args:
        scores: Those of this process.
        k: How many in all processes.
        counted: Which scores count here; other processes count the others.
        indices: Returns the flat index of each score; asked for if there are ties.
        total: Adds up over all processes.
    """
    keys = _ordered(scores)
    threshold, wanted, ties = _kth_largest(keys, counted, torch.tensor(k, device=keys.device), total)
    above, equal = keys > threshold, keys == threshold
    if int(wanted) < int(ties):
        lowest_first = -indices()
        last, _, _ = _kth_largest(lowest_first, counted & equal, wanted, total)
        equal &= lowest_first >= last
    return above | equal


def flat_indices(params: Sequence[Tensor]) -> Tensor:
    """Return the flat index of each weight of the local parts, among all weights of the parameters."""
    before, parts = 0, []
    for p in params:
        index = torch.zeros((), dtype=torch.int64, device=local(p).device)
        for dim, (offset, size) in enumerate(zip(offsets(p), local(p).shape, strict=True)):
            along = torch.arange(offset, offset + size, device=index.device)
            index = index.unsqueeze(-1) * p.shape[dim] + along
        parts.append(before + index.reshape(-1))
        before += p.numel()
    return torch.cat([part.to(parts[0].device) for part in parts])


def _ordered(scores: Tensor) -> Tensor:
    """Return whole numbers in the order of the scores, equal where these are."""
    if not scores.is_floating_point():
        return scores.long()
    bits = (scores.double() + 0.0).view(torch.int64)  # + 0.0, because -0.0 equals 0.0
    return bits ^ ((bits >> 63) & ~SIGN)  # of negative numbers the larger bits are the smaller numbers


def _kth_largest(keys: Tensor, counted: Tensor, k: Tensor, total: Total) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k-th largest of the counted keys of all processes; how many like it belong to the k, and how many are.

    All three are 0-d tensors.
    """
    unsigned, candidates, found = keys ^ SIGN, counted, torch.zeros_like(k)
    for shift in range(64 - DIGIT, -1, -DIGIT):
        digits = (unsigned >> shift) & (2**DIGIT - 1)
        counts = total(torch.bincount(digits.where(candidates, 2**DIGIT), minlength=2**DIGIT + 1)[:-1].clone())
        at_least = counts.flip(0).cumsum(0).flip(0)  # how many have this digit or a larger one
        digit = (at_least >= k).sum() - 1
        ties = counts.take(digit)
        k = k - (at_least.take(digit) - ties)
        candidates = candidates & (digits == digit)
        found = found | (digit << shift)
    return found ^ SIGN, k, ties
