"""Seeing flatness: landscapes, Hessian spectra, gradient differences, sharpness, the theorems."""

from sparsam.analysis.gradients import GradientDifference, gradient_difference
from sparsam.analysis.objective import Objective
from sparsam.analysis.sharpness import average_case, worst_case

__all__ = ["GradientDifference", "Objective", "average_case", "gradient_difference", "worst_case"]
