"""Sparse SAM for PyTorch: sharpness-aware minimization that perturbs only some of the weights."""

from sparsam._version import __version__
from sparsam.cuts import Cut, find_cuts
from sparsam.fisher import diagonal_fisher
from sparsam.masks import (
    BudgetMask,
    DenseMask,
    DynamicMask,
    FisherMask,
    Mask,
    NMMask,
    NormMask,
    RandomMask,
    TopKMask,
)
from sparsam.optimizer import SAM
from sparsam.schedules import ConstantRho, CosineRho, InverseSqrtRho, ProportionalRho

__all__ = [
    "SAM",
    "BudgetMask",
    "ConstantRho",
    "CosineRho",
    "Cut",
    "DenseMask",
    "DynamicMask",
    "FisherMask",
    "InverseSqrtRho",
    "Mask",
    "NMMask",
    "NormMask",
    "ProportionalRho",
    "RandomMask",
    "TopKMask",
    "__version__",
    "diagonal_fisher",
    "find_cuts",
]
