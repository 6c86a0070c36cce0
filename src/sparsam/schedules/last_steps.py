"""The last steps of a training."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparsam.ascents import Ascent
from sparsam.checks import check_number, check_whole
from sparsam.errors import UserTypeError, UserValueError, warn
from sparsam.schedules.base import Schedule
from sparsam.settings import Setting


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
        check_number("fraction", fraction, "a number in (0, 1]", lambda value: 0 < value <= 1)
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
