"""Sparse SAM for PyTorch: sharpness-aware minimization that perturbs only some of the weights."""

__version__ = "0.1.0"

from sparsam.ascents import Ascent, FriendlyAscent, GradientAscent, MomentumAscent
from sparsam.batchnorm import refresh_batchnorm
from sparsam.cuda_graph import CapturedStep
from sparsam.fisher import diagonal_fisher
from sparsam.masks import (
    DenseMask,
    DynamicMask,
    FisherMask,
    Mask,
    NMMask,
    NormMask,
    RandomMask,
    SuffixMask,
    TopKMask,
)
from sparsam.rho import ConstantRho, CosineRho, InverseSqrtRho, ProportionalRho, RampRho
from sparsam.sam import SAM, SAMState
from sparsam.schedules import EveryNth, EveryStep, LastSteps, Schedule
from sparsam.step_cost import Cut, StepRatio, find_cuts, measure_cost
from sparsam.thrifty import thrifty

__all__ = [
    "SAM",
    "Ascent",
    "CapturedStep",
    "ConstantRho",
    "CosineRho",
    "Cut",
    "DenseMask",
    "DynamicMask",
    "EveryNth",
    "EveryStep",
    "FisherMask",
    "FriendlyAscent",
    "GradientAscent",
    "InverseSqrtRho",
    "LastSteps",
    "Mask",
    "MomentumAscent",
    "NMMask",
    "NormMask",
    "ProportionalRho",
    "RampRho",
    "RandomMask",
    "SAMState",
    "Schedule",
    "StepRatio",
    "SuffixMask",
    "TopKMask",
    "__version__",
    "diagonal_fisher",
    "find_cuts",
    "measure_cost",
    "refresh_batchnorm",
    "thrifty",
]
