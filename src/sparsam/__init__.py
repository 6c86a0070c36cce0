"""Sparse SAM for PyTorch: sharpness-aware minimization that perturbs only some of the weights."""

__version__ = "0.1.0"

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
from sparsam.replay.cuts import Cut, find_cuts
from sparsam.rho import ConstantRho, CosineRho, InverseSqrtRho, ProportionalRho
from sparsam.sam import SAM

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
