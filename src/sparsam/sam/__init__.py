"""SAM, and sparse SAM, around any torch optimizer."""

from sparsam.sam.checkpoint import SAMState
from sparsam.sam.optimizer import SAM

__all__ = ["SAM", "SAMState"]
