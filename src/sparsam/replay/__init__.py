"""Replay: what lies before the cut is not computed twice; where models can be cut, and what that costs."""

from sparsam.replay.costs import cut_costs
from sparsam.replay.counting import CountedCut, Counts, count_costs
from sparsam.replay.cuts import Cut, find_cuts
from sparsam.replay.passes import ReplayedPasses, passes_for

__all__ = [
    "CountedCut",
    "Counts",
    "Cut",
    "ReplayedPasses",
    "count_costs",
    "cut_costs",
    "find_cuts",
    "passes_for",
]
