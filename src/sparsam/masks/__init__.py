"""Which weights are perturbed: one policy a file, one contract (:class:`Mask`)."""

from sparsam.masks.base import Mask, Scope
from sparsam.masks.dense import DenseMask
from sparsam.masks.dynamic import DynamicMask
from sparsam.masks.fisher import FisherMask
from sparsam.masks.nm import NMMask
from sparsam.masks.norm import NormMask
from sparsam.masks.random import RandomMask
from sparsam.masks.sparsity import SparseMask
from sparsam.masks.suffix import SuffixMask
from sparsam.masks.topk import TopKMask

__all__ = [
    "DenseMask",
    "DynamicMask",
    "FisherMask",
    "Mask",
    "NMMask",
    "NormMask",
    "RandomMask",
    "Scope",
    "SparseMask",
    "SuffixMask",
    "TopKMask",
]
