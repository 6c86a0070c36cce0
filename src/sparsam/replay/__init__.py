"""Replay: what lies before the cut is not computed twice; where models can be cut, and what is counted after a cut."""

from sparsam.replay.counting import CountedCut, Counts, count_costs
from sparsam.replay.passes import ReplayedPasses, passes_for

__all__ = [
    "CountedCut",
    "Counts",
    "ReplayedPasses",
    "count_costs",
    "passes_for",
]
