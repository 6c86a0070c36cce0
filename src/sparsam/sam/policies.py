"""What an optimizer was built with, to read."""

from __future__ import annotations

from typing import Any

from sparsam.ascents import Ascent
from sparsam.masks import Mask
from sparsam.sam.coming import Coming
from sparsam.sam.perturber import Perturber
from sparsam.schedules import Schedule


class Policies:
    """The policies of an optimizer. They cannot be assigned: state and steps belong to those it was built with."""

    _perturber: Perturber
    _coming: Coming
    _share: float

    @property
    def mask(self) -> Mask:
        """Which weights are perturbed."""
        return self._perturber.mask.mask

    @property
    def ascent(self) -> Ascent:
        """Which way they are perturbed."""
        return self._coming.main

    @property
    def schedule(self) -> Schedule:
        """Which steps perturb."""
        return self._coming.schedule

    @property
    def adaptive(self) -> bool:
        """Whether the perturbation is scaled by the size of the weights."""
        return self._perturber.adaptive

    @property
    def share(self) -> float:
        """The share of the batch that both passes see."""
        return self._share

    def _policy_settings(self) -> dict[str, Any]:
        policies = {"mask": self.mask, "ascent": self.ascent, "schedule": self.schedule}
        return {"adaptive": self.adaptive, **{name: policy.settings() for name, policy in policies.items()}}

    def _policy_lines(self) -> str:
        return f"mask: {self.mask!r}\nascent: {self.ascent!r}\nschedule: {self.schedule!r}"
