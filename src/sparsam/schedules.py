r"""Schedules for rho, used like torch's learning-rate schedulers.

Build one around the optimizer and call `step()` after each optimizer step (or each epoch: whatever t counts).
t starts at 1, so the first step uses :math:`\rho_1`. Each group has its own :math:`\rho_0`, the value it had
when the schedule was built.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.optim import Optimizer

from sparsam.checks import check_rho, check_whole


class RhoSchedule(ABC):
    r"""Sets `rho` in every group of an optimizer to :math:`\rho_t`.

    Args:
        optimizer: A :class:`sparsam.SAM`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        for i, group in enumerate(optimizer.param_groups):
            if "rho" not in group:
                raise ValueError(f"optimizer must be a SAM, but its parameter group {i} has no 'rho'")
        self.optimizer = optimizer
        self.t = 1
        for group in optimizer.param_groups:
            group.setdefault("initial_rho", _number(group["rho"]))
        self._apply()

    @abstractmethod
    def rho(self, t: int, rho_0: float, group: dict[str, Any]) -> float:
        r"""Return :math:`\rho_t` for a group."""

    def step(self) -> None:
        """Go on to t + 1."""
        self.t += 1
        self._apply()

    def get_last_rho(self) -> list[float]:
        """Return the current rho of each group."""
        return [_number(group["rho"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        """Return where the schedule is; the groups' rho and rho_0 are in the optimizer's state."""
        return {"t": self.t}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from where a schedule was saved. Load the optimizer's state first."""
        self.t = state_dict["t"]
        self._apply()

    def _apply(self) -> None:
        for group in self.optimizer.param_groups:
            rho = self.rho(self.t, group.setdefault("initial_rho", _number(group["rho"])), group)
            if isinstance(group["rho"], torch.Tensor):
                group["rho"].fill_(rho)  # a captured CUDA graph reads this tensor
            else:
                group["rho"] = rho


class ConstantRho(RhoSchedule):
    r""":math:`\rho_t = \rho_0`."""

    def rho(self, t: int, rho_0: float, group: dict[str, Any]) -> float:
        """Return rho_0."""
        return rho_0


class InverseSqrtRho(RhoSchedule):
    r""":math:`\rho_t = \rho_0 / \sqrt t`, as in the paper's convergence theorems."""

    def rho(self, t: int, rho_0: float, group: dict[str, Any]) -> float:
        """Return rho_0 / sqrt(t)."""
        return rho_0 / math.sqrt(t)


class CosineRho(RhoSchedule):
    r""":math:`\rho_t = \rho_T + \frac12 (\rho_0 - \rho_T) (1 + \cos\frac{\pi (t-1)}{T})`, and :math:`\rho_T` after T.

    Args:
        optimizer: A :class:`sparsam.SAM`.
        total_steps: T.
        final: :math:`\rho_T`.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, final: float = 0.0) -> None:
        check_whole("total_steps", total_steps)
        check_rho(final, "final")
        self.total_steps, self.final = total_steps, final
        super().__init__(optimizer)

    def rho(self, t: int, rho_0: float, group: dict[str, Any]) -> float:
        """Return the cosine between rho_0 and the final value."""
        progress = min((t - 1) / self.total_steps, 1.0)
        return self.final + (rho_0 - self.final) * (1 + math.cos(math.pi * progress)) / 2


class ProportionalRho(RhoSchedule):
    r""":math:`\rho_t = \rho_0\, \eta_t / \eta_0`: follows the group's learning rate, whatever changes it.

    Call its `step()` after the learning-rate scheduler's. :math:`\eta_0` is the group's learning rate when the
    schedule is built (its `initial_lr`, if a scheduler has noted one).
    """

    def rho(self, t: int, rho_0: float, group: dict[str, Any]) -> float:
        """Return rho_0 times the learning rate's present share of its first value."""
        lr = _number(group["lr"])
        lr_0 = _number(group.setdefault("initial_lr", lr))
        return rho_0 * lr / lr_0


def _number(value: float | torch.Tensor) -> float:
    return float(value)
