r"""How different the gradients of SAM and SGD are, weight by weight (the paper's Figure 1).

.. math::  r = \log \left| \frac{g_{SAM} - g_{SGD}}{g_{SGD}} \right|, \qquad
           g_{SGD} = \nabla f(w), \quad g_{SAM} = \nabla f(w + \epsilon)

r < 0: the perturbation changes a weight's gradient by less than the gradient itself. As in training, a gradient is that
of one batch, and weights are counted in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsam.analysis.objective import Objective, check_objective
from sparsam.analysis.sharpness import checked_mask
from sparsam.checks import check_rho, check_whole
from sparsam.errors import UserValueError
from sparsam.perturbation import perturb, restore
from sparsam.selection import Selection

LOW, HIGH = -12.0, 8.0  # values beyond are counted in the outermost bin


@dataclass(frozen=True)
class GradientDifference:
    """Histograms of r, for all weights together under "" and for every layer.

    If the two gradients of a weight are equal, r is -inf, and the weight is counted in the lowest bin. If only SAM's
    gradient is not zero, r is inf, and the weight is counted in the highest bin.
    """

    edges: list[float]
    counts: dict[str, list[int]]
    below_zero: dict[str, float]
    rho: float
    samples: int
    batches: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for a JSON file."""
        return dict(self.__dict__)


@torch.no_grad()
def gradient_difference(
    objective: Objective, rho: float = 0.1, *, bins: int = 200, mask: Selection | None = None, adaptive: bool = False
) -> GradientDifference:
    """Measure the distribution of r over all weights and batches. Only counts leave the device.

    Args:
        objective: The loss as a function of the weights, which are restored bit for bit. Each batch counts by itself.
        rho: The radius of SAM's perturbation.
        bins: The number of bins of the histogram, between r = -12 and r = 8.
        mask: Which weights are perturbed; None: all.
        adaptive: ASAM's perturbation.
    """
    check_objective(objective)
    check_rho(rho)
    check_whole("bins", bins)
    params = objective.params
    chosen, rhos = checked_mask(mask, params), [float(rho)] * len(params)
    total = torch.zeros(len(params), bins + 2, dtype=torch.float64, device=objective.device)
    for batch in objective.parts():
        sgd = batch.gradient()
        saved = perturb(params, sgd, chosen, rhos, adaptive=adaptive)
        try:
            sam = batch.gradient()
        finally:
            restore(saved)
        total += torch.stack([_row(a, b, bins) for a, b in zip(sam, sgd, strict=True)])
    rows = total.cpu()  # the one wait
    # "" is all weights; a parameter of the model itself is a layer of its own.
    names = {p: name.rpartition(".")[0] or name for name, p in objective.model.named_parameters()}
    if rows[:, 0].any():
        raise UserValueError("gradients must be finite, but some are not: is the loss finite at the model's weights?")
    sums = {"": rows.sum(0)}
    for p, row in zip(params, rows, strict=True):
        sums[names[p]] = sums[names[p]] + row if names[p] in sums else row
    return GradientDifference(
        edges=torch.linspace(LOW, HIGH, bins + 1, dtype=torch.float64).tolist(),
        counts={name: [int(c) for c in row[2:]] for name, row in sums.items()},
        below_zero={name: float(row[1] / row[2:].sum()) for name, row in sums.items()},
        rho=float(rho),
        samples=objective.count,
        batches=len(objective.batches),
    )


def _row(sam: Tensor, sgd: Tensor, bins: int) -> Tensor:
    """Count on the device: gradients that are not finite, r below 0, and r in each bin."""
    difference = (sam - sgd).double().abs()
    r = (difference / sgd.double().abs()).log().where(difference > 0, -torch.inf)
    infinite = (~torch.isfinite(difference)).sum()
    histogram = torch.histc(r.nan_to_num(nan=HIGH).clamp(LOW, HIGH), bins, LOW, HIGH)
    return torch.cat([torch.stack([infinite, (r < 0).sum()]).double(), histogram])
