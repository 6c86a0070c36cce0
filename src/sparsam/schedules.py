"""When: which steps are sharpness-aware, and by which ascent.

Steps are counted from 0. A schedule holds settings, no state: its answer depends on the step alone.
Rho over time is in :mod:`sparsam.rho`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from sparsam.ascents import Ascent
from sparsam.checks import check_share, check_whole
from sparsam.errors import UserTypeError, UserValueError, warn
from sparsam.settings import Policy, Setting


class Schedule(Policy, ABC):
    """Says which ascent a step takes."""

    @abstractmethod
    def ascent(self, step: int, main: Ascent) -> Ascent | None:
        """Return the ascent of a step; None: a plain step of the base optimizer.

        Args:
            step: How many steps were taken before it.
            main: The optimizer's ascent.
        """

    def ascents(self, main: Ascent) -> Sequence[Ascent]:
        """Return every ascent that a step may take; a schedule with ascents of its own lists them too."""
        return [main]


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


class LastSteps(Schedule):
    r"""The last steps are sharpness-aware; the first :math:`\lfloor (1 - \text{fraction})\, T \rfloor` are not.

    Beyond T the steps stay sharpness-aware, with one warning.

    Args:
        fraction: Of the steps that are sharpness-aware, in (0, 1].
        total_steps: T, the number of optimizer steps of the training.
        before: An ascent for the first steps; None: they are base steps.

    >>> LastSteps(0.3, total_steps=10).first
    7
    """

    def __init__(self, fraction: float, total_steps: int, before: Ascent | None = None) -> None:
        check_share("fraction", fraction)
        check_whole("total_steps", total_steps)
        if before is not None and not isinstance(before, Ascent):
            raise UserTypeError(f"before must be an ascent or None, but is {before!r}")
        self.fraction, self.total_steps, self.before = float(fraction), int(total_steps), before
        if self.first == self.total_steps:
            raise UserValueError(
                f"fraction must be that of at least one of total_steps={total_steps} steps, but is {fraction:g}"
            )

    @property
    def first(self) -> int:
        """How many steps come before the sharpness-aware ones."""
        # 1 - 0.9 is a little less than 0.1: without the millionth, 0.9 of 10 steps would leave none.
        return math.floor((1 - self.fraction) * self.total_steps + 1e-6)

    def settings(self) -> dict[str, Setting]:
        """Return fraction, total_steps and what comes before."""
        before = self.before.settings() if self.before else None
        return {**super().settings(), "fraction": self.fraction, "total_steps": self.total_steps, "before": before}

    def ascent(self, step: int, main: Ascent) -> Ascent | None:
        """Return the optimizer's ascent in the last steps."""
        if step == self.total_steps:
            warn(
                f"this is step {step + 1}, but total_steps of LastSteps is {self.total_steps}: all further steps are "
                f"sharpness-aware. total_steps counts optimizer steps, not epochs"
            )
        return main if step >= self.first else self.before

    def ascents(self, main: Ascent) -> Sequence[Ascent]:
        """Return the optimizer's ascent, and the one before it."""
        return [main] if self.before is None else [main, self.before]
