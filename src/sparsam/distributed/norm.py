"""The norm of a direction whose parts lie in several processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsam.distributed.shards import Holders, any_dtensor
from sparsam.perturbation import accumulation_dtype, gradient_norm


def sharded_norm(
    params: Sequence[Tensor], weights: Sequence[Tensor], directions: Sequence[Tensor], *, adaptive: bool
) -> Tensor:
    r"""Return :math:`\lVert d \rVert_2` over all processes, each number counted once: one all-reduce of 8 bytes.

    Args:
        params: The parameters, some of which are DTensors.
        weights, directions: Local parts of the parameters and of d.
        adaptive: :math:`\lVert\, |w| \odot d \,\rVert_2` instead.
    """
    if not any_dtensor(params):  # these are not, others are
        return gradient_norm(weights, directions, adaptive=adaptive)
    holders = Holders(params)
    own = [i for i, p in enumerate(params) if holders.own(p)]
    if own:
        norm = gradient_norm([weights[i] for i in own], [directions[i] for i in own], adaptive=adaptive)
    else:
        norm = torch.zeros((), device=directions[0].device)
    widest = max((accumulation_dtype(d) for d in directions), key=lambda dtype: dtype.itemsize)
    return holders.total(norm.double().square()).sqrt().to(widest)
