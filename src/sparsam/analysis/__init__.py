"""Seeing flatness: landscapes, Hessian spectra, gradient differences, sharpness, the theorems."""

from sparsam.analysis.objective import Objective

__all__ = ["Objective"]
