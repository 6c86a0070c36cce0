"""Only normalisation layers are perturbed (SAM-ON)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn

from sparsam.checks import check_module
from sparsam.errors import UserValueError
from sparsam.masks.base import Mask, Scope
from sparsam.selection import Selection

NORMALISATION = re.compile(r"(batch|layer|group|instance|rms)_?norm", re.IGNORECASE)


class NormMask(Mask):
    """Perturbs the parameters of normalisation layers and no others.

    A layer counts by the name of its class or of a class it derives from: BatchNorm, LayerNorm, GroupNorm,
    InstanceNorm or RMSNorm, so that those of other libraries count too. As in every mask here, the
    perturbation is divided by the norm of the whole gradient, of which these layers are a small part: a
    larger rho than SAM's is in place.

    Args:
        model: The network that is trained.
    """

    same_on_all_ranks = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        check_module("model", model, optional=False)
        self._network, self.scope = model, Scope(model)
        if not self._parameters():
            raise UserValueError("model has no normalisation layer with parameters, so NormMask would perturb nothing")

    def _parameters(self) -> set[Tensor]:
        return {
            p
            for module in self._network.modules()
            if any(NORMALISATION.search(cls.__name__) for cls in type(module).mro())
            for p in module.parameters(recurse=False)
        }

    def select(self, params: Sequence[Tensor], step: int, previous: Selection | None) -> Selection:
        """Return the normalisation layers."""
        normalisation = self._parameters()
        chosen: Selection = [p in normalisation for p in params]
        if not any(chosen):
            raise UserValueError(
                "NormMask finds no trainable normalisation layer of its model among the optimizer's parameters, or "
                "none in the suffix of the mask around it"
            )
        return chosen
