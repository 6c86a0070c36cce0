"""Every step, or every n-th."""

from __future__ import annotations

from sparsam.ascents import Ascent
from sparsam.checks import check_whole
from sparsam.schedules.base import Schedule
from sparsam.settings import Setting


class EveryStep(Schedule):
    """Every step is sharpness-aware."""

    def ascent(self, step: int, main: Ascent) -> Ascent:
        """Return the optimizer's ascent."""
        return main


class EveryNth(Schedule):
    """Steps 0, n, 2n, ... are sharpness-aware, the others are base steps.

    Args:
        n: At least 1.

    >>> from sparsam.ascents import GradientAscent
    >>> [EveryNth(3).ascent(step, GradientAscent()) is not None for step in range(5)]
    [True, False, False, True, False]
    """

    def __init__(self, n: int) -> None:
        check_whole("n", n)
        self.n = int(n)

    def settings(self) -> dict[str, Setting]:
        """Return n."""
        return {**super().settings(), "n": self.n}

    def ascent(self, step: int, main: Ascent) -> Ascent | None:
        """Return the optimizer's ascent in every n-th step."""
        return main if step % self.n == 0 else None
