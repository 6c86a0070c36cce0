"""What the schedule has planned for the coming step."""

from __future__ import annotations

from collections.abc import Sequence

from sparsam.ascents import Ascent
from sparsam.errors import warn
from sparsam.sam.checks import check_listed
from sparsam.schedules import Schedule


class Coming:
    """Asks a schedule for the ascent of the coming step, once a step.

    Args:
        schedule: The optimizer's.
        main: The optimizer's ascent.
        listed: All ascents that a step may take.
    """

    def __init__(self, schedule: Schedule, main: Ascent, listed: Sequence[Ascent]) -> None:
        self.schedule, self.main, self.listed = schedule, main, listed
        self.user_asks = False  # whether opt.needs_second_pass was ever read
        self._step = -1
        self._ascent: Ascent | None = None

    def ascent(self, step: int) -> Ascent | None:
        """Return the ascent of a step; None: it is one of the base optimizer alone."""
        if self._step != step:
            ascent = self.schedule.ascent(step, self.main)
            check_listed(ascent, self.schedule, self.listed)
            self._step, self._ascent = step, ascent
        return self._ascent

    def warn_without_closure(self) -> None:
        """Say once that base steps without a closure do not go on for ever, unless the user seems to know."""
        if not self.user_asks and self.main.passes == 2:
            self.user_asks = True
            warn(
                f"step() without closure is a step of the base optimizer alone, and sharpness-aware steps of "
                f"{self.schedule!r} need two gradients. Pass a closure in every step, or ask opt.needs_second_pass"
            )
