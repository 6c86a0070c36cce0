"""Seeing flatness: landscapes, Hessian spectra, gradient differences, sharpness, the theorems."""

from sparsam.analysis.gradients import GradientDifference, gradient_difference
from sparsam.analysis.objective import Objective
from sparsam.analysis.sharpness import average_case, overlap, worst_case

__all__ = ["GradientDifference", "Objective", "average_case", "gradient_difference", "overlap", "worst_case"]
