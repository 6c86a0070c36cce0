"""Seeing flatness: landscapes, Hessian spectra, gradient differences, sharpness, the theorems."""

from sparsam.analysis.gradients import GradientDifference, gradient_difference
from sparsam.analysis.hessian import Density, Eigenvalues, spectral_density, top_eigenvalues
from sparsam.analysis.landscape import Landscape, loss_landscape
from sparsam.analysis.objective import Objective
from sparsam.analysis.sharpness import average_case, worst_case

__all__ = [
    "Density",
    "Eigenvalues",
    "GradientDifference",
    "Landscape",
    "Objective",
    "average_case",
    "gradient_difference",
    "loss_landscape",
    "spectral_density",
    "top_eigenvalues",
    "worst_case",
]
