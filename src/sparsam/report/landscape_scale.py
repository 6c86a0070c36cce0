"""The one scale of all landscapes in a figure or on a page: heights, colours, and from where to look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparsam.analysis.landscape import Landscape

# From low to high: blue valleys, golden heights. Lightness rises all the way, so it also reads in grey.
HEIGHTS = ("#172a6e", "#1f55b0", "#1b86b8", "#2ba9a4", "#74c17f", "#c3cf55", "#f9d648")
WIDE = 30  # losses that differ by more than this factor are drawn on a logarithmic scale


class Scale(NamedTuple):
    """The one scale of all runs."""

    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, landscapes: Sequence[Landscape]) -> Scale:
        """Return the scale that holds all finite losses; logarithmic where they are positive and differ widely."""
        losses = np.concatenate([[*shown.losses.ravel(), shown.centre] for shown in landscapes])
        finite = losses[np.isfinite(losses)]
        low, high = float(finite.min()), float(finite.max())
        if low == high:
            low, high = low - 0.5, high + 0.5
        return cls(low, high, low > 0 and high / low > WIDE)

    def height(self, losses: Any) -> NDArray[np.float64]:
        """Return where losses lie on the axis: themselves, or their logarithms; gaps are NaN."""
        finite: NDArray[np.float64] = np.where(np.isfinite(losses), losses, np.nan)
        return np.log10(finite) if self.log else finite

    @property
    def ends(self) -> tuple[float, float]:
        """Where the axis begins and ends."""
        floor, top = self.height([self.low, self.high]).tolist()
        return floor, top

    def ticks(self, count: int = 6) -> list[float]:
        """Return round losses within the scale."""
        if not self.log:
            rough = (self.high - self.low) / count
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
            first = math.ceil(self.low / step - 1e-9)
            return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            found = [f * 10.0**d for d in decades for f in factors if self.low <= f * 10.0**d <= self.high]
            if len(found) <= count + 2:
                break
        return found


def view_azimuth(landscapes: Sequence[Landscape]) -> float:
    """Return from where to look: over the lowest corner, which hides least."""
    corners = {-135: (0, 0), -45: (0, -1), 45: (-1, -1), 135: (-1, 0)}
    losses = np.array([shown.losses for shown in landscapes])
    losses[~np.isfinite(losses)] = np.inf
    height = {view: float(losses[:, *at].max()) for view, at in corners.items()}
    return min(height, key=lambda view: height[view]) + 11.0
