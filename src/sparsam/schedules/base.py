"""The contract that every schedule keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from sparsam.ascents import Ascent
from sparsam.settings import Policy


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
