"""SSAM-C: the weights of a suffix of the network, so that sparsity saves time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from sparsam.checks import check_module
from sparsam.errors import UserTypeError
from sparsam.masks.base import Mask, Scope
from sparsam.replay.modules import get_module, unwrap
from sparsam.selection import Selection
from sparsam.settings import Setting


class SuffixMask(Mask):
    r"""SSAM-C: perturbs what follows the input of one module, the cut, and computes nothing before it twice.

    With f the fraction of a pass that follows the cut, a step costs 1 + f base steps, with exactly the gradient of the
    masked step (:mod:`sparsam.replay`). The perturbation is divided by the norm over the suffix, because the first
    pass computes no other gradient:

    .. math::  \epsilon = \rho\,\frac{d}{\lVert d_{suffix}\rVert_2}\odot m

    A parameter that is used on both sides of the cut belongs to the prefix.

    Args:
        model: The network that is trained; in distributed training the DistributedDataParallel around it.
        cut: The name of the module whose input is the cut, such as "layer4". :func:`sparsam.find_cuts` and
            `sparsam cuts` list them.
        inner: A mask that selects among the weights of the suffix; None: all of them.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> SuffixMask(model, "2")
    SuffixMask(interval=None, cut='2', inner=None)
    """

    def __init__(self, model: nn.Module, cut: str, *, inner: Mask | None = None) -> None:
        check_module("model", model, optional=False)
        if isinstance(model, nn.DataParallel):
            raise UserTypeError(
                "model must not be a DataParallel, whose copies run elsewhere; use DistributedDataParallel"
            )
        if inner is not None and (not isinstance(inner, Mask) or inner.scope.cut is not None):
            raise UserTypeError(f"inner must be a mask without a cut of its own, but is {inner!r}")
        get_module(unwrap(model), cut)
        self.inner = inner
        super().__init__(inner.interval if inner else None, inner.seed if inner else 0)
        self.scope = Scope(model, cut)
        self.same_on_all_ranks = inner is None or inner.same_on_all_ranks

    @property
    def seed(self) -> int:
        """The seed of the inner mask."""
        return self.inner.seed if self.inner else self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed
        if self.inner:
            self.inner.seed = seed

    def settings(self) -> dict[str, Setting]:
        """Return what a resumed run must have in common with the saved one."""
        return {
            **super().settings(),
            "cut": self.scope.cut,
            "inner": self.inner.settings() if self.inner else None,
        }

    def select(self, params: Sequence[Tensor], step: int, previous: Selection | None) -> Selection:
        """Return all parameters of the suffix, or what the inner mask selects of them."""
        return self.inner.select(params, step, previous) if self.inner else [True] * len(params)
