"""The weights with the largest scores, whatever the scores are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparsam.masks.scores import ScoreFunction, ask, check_score_function
from sparsam.masks.sparsity import SparseMask
from sparsam.selection import flatten


class TopKMask(SparseMask):
    r"""Perturbs the :math:`k = \mathrm{round}((1-s)\,|w|)` weights with the largest scores.

    Ties go to the lower flat index.

    Args:
        sparsity: The share s of the weights that is not perturbed, in [0, 1].
        scores: A function of a list of parameters that returns one tensor for each, of its shape: in the same
            order, or as a mapping from parameter to tensor. It may read `.grad`, which holds the gradient of the
            first pass. A function without arguments is called so; if it returns no mapping, its order must be that
            of the optimizer's groups.
        interval: Ask for scores every `interval` steps; None: once.

    >>> mask = TopKMask(0.5, lambda params: [p.abs() for p in params])   # large weights only
    """

    def __init__(self, sparsity: float, scores: ScoreFunction, *, interval: int | None = None) -> None:
        check_score_function(scores)
        super().__init__(sparsity, interval)
        self.scores = scores

    def flat_scores(self, params: Sequence[Tensor], step: int, previous: Tensor | None) -> Tensor:
        """Return what the user's function says."""
        return flatten(ask(self.scores, params))
