r"""Which way: the direction d of a perturbation, :math:`\epsilon = \rho\, d / \lVert d \rVert_2 \odot m`.

An ascent holds settings, no state. What it keeps between steps lies in a `memory` that the optimizer owns, saves and
hands to it. Names follow the papers: gradient g, mean of gradients m, momentum v.
"""

from sparsam.ascents.base import Ascent, Memory
from sparsam.ascents.friendly import FriendlyAscent
from sparsam.ascents.gradient import GradientAscent
from sparsam.ascents.momentum import MomentumAscent

__all__ = ["Ascent", "FriendlyAscent", "GradientAscent", "Memory", "MomentumAscent"]
