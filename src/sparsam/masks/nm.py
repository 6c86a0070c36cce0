"""n of every m weights, the pattern that sparse tensor cores know (2:4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsam.checks import check_whole
from sparsam.distributed.shards import any_dtensor, like, local, offsets, totals
from sparsam.errors import UserValueError
from sparsam.masks.base import Mask
from sparsam.masks.scores import ScoreFunction, ask, check_score_function
from sparsam.selection import Selection
from sparsam.settings import Setting


class NMMask(Mask):
    """Perturbs, of every m weights that follow each other along the input dimension, the n with the largest scores.

    The input dimension is the second one of linear and convolution weights; groups of m start at input 0.
    Ties go to the lower index. Perturbed throughout, "dense", are tensors with fewer than two dimensions
    and the inputs that are left over where their number is not divisible by m (a first convolution with 3
    inputs at m = 4, say).

    Args:
        n: How many of every m weights are perturbed, 1 <= n <= m.
        m: How many weights form a group.
        scores: As in :class:`TopKMask`.
        interval: Ask for scores every `interval` steps; None: once.
    """

    def __init__(self, n: int, m: int, scores: ScoreFunction, *, interval: int | None = None) -> None:
        check_whole("m", m)
        check_whole("n", n)
        if n > m:
            raise UserValueError(f"n must be at most m, but n is {n} and m is {m}")
        check_score_function(scores)
        super().__init__(interval)
        self.n, self.m, self.scores = int(n), int(m), scores

    def settings(self) -> dict[str, Setting]:
        """Return what a resumed run must have in common with the saved one."""
        return {**super().settings(), "n": self.n, "m": self.m}

    def select(self, params: Sequence[Tensor], step: int, previous: Selection | None) -> Selection:
        """Return n of every m weights by what the user's function says."""
        scores = ask(self.scores, params)
        self._check_shards(params)
        return [
            like(n_of_m(score, self.n, self.m), p) if p.dim() > 1 else True
            for score, p in zip(scores, params, strict=True)
        ]

    def _check_shards(self, params: Sequence[Tensor]) -> None:
        """Refuse groups of m that lie in several processes; all of them come to the same result."""
        if not any_dtensor(params):
            return
        split = totals(torch.tensor([self._splits(p) for p in params], device=params[0].device), params).tolist()
        if any(split):
            i = next(i for i, count in enumerate(split) if count)
            raise UserValueError(
                f"NMMask needs every {self.m} weights along the input dimension in one process, but parameter {i} of "
                f"shape {tuple(params[i].shape)} is sharded between them: shard dimension 0, or in multiples of m"
            )

    def _splits(self, p: Tensor) -> int:
        if p.dim() < 2 or not local(p).numel():
            return 0
        start, end = offsets(p)[1], offsets(p)[1] + local(p).shape[1]
        return int(start % self.m > 0 or (end % self.m > 0 and end < p.shape[1]))


def n_of_m(scores: Tensor, n: int, m: int) -> Tensor:
    """Return a bool tensor that is true at the n largest of every m scores along dimension 1.

    >>> n_of_m(torch.tensor([[4.0, 1.0, 3.0, 2.0, 9.0]]), 2, 4)
    tensor([[ True, False,  True, False,  True]])
    """
    keep = torch.ones_like(scores, dtype=torch.bool)
    inputs = scores.shape[1] - scores.shape[1] % m
    groups = scores.narrow(1, 0, inputs).movedim(1, -1)
    groups = torch.unflatten(groups, -1, (inputs // m, m))
    order = groups.argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1, stable=True)
    keep.narrow(1, 0, inputs).copy_((rank < n).flatten(-2).movedim(-1, 1))
    return keep
