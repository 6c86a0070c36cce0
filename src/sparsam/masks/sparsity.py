"""Masks that perturb a given share of the weights, counted over all tensors together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from sparsam.checks import check_share
from sparsam.masks.base import Mask
from sparsam.selection import Selection, expand, flatten, largest, perturbed_count, unflatten
from sparsam.settings import Setting


class SparseMask(Mask):
    r"""Perturbs exactly :math:`k = \mathrm{round}((1-s)\,|w|)` weights: those with the largest scores.

    A subclass says what the scores are. They are not asked for where s leaves no choice.

    Args:
        sparsity: The share s of the weights that is not perturbed, in [0, 1].
        interval, seed: See :class:`Mask`.
    """

    def __init__(self, sparsity: float, interval: int | None = None, seed: int = 0) -> None:
        check_share("sparsity", sparsity)
        super().__init__(interval, seed)
        self.sparsity = float(sparsity)

    def settings(self) -> dict[str, Setting]:
        """Return what a resumed run must have in common with the saved one."""
        return {**super().settings(), "sparsity": self.sparsity}

    def select(self, params: Sequence[Tensor], step: int, previous: Selection | None) -> Selection:
        """Return exactly k weights: the largest by :meth:`flat_scores`."""
        total = sum(p.numel() for p in params)
        k = perturbed_count(total, self.sparsity)
        if k == 0 or k == total:
            return [k == total] * len(params)
        before = None if previous is None else flatten(expand(previous, params))
        return list(unflatten(largest(self.flat_scores(params, step, before), k, params), params))

    @abstractmethod
    def flat_scores(self, params: Sequence[Tensor], step: int, previous: Tensor | None) -> Tensor:
        """Return one score for each weight, by flat index; `previous` is a bool vector, or None.

        Of sharded parameters (DTensors) both are those of this process' parts, as :func:`flatten` lays them out.
        """
