r"""Schedules for rho, used like torch's learning-rate schedulers.

Build one around the optimizer and call `step()` after each optimizer step (or each epoch: whatever t counts). t starts
at 1, so the first step uses :math:`\rho_1`. Each group has its own :math:`\rho_0`, the value it had when the schedule
was built.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sparsam.checks import check_rho, check_whole
from sparsam.errors import UserValueError


class RhoSchedule(ABC):
    r"""Sets `rho` in every group of an optimizer to :math:`\rho_t`.

    Args:
        optimizer: A :class:`sparsam.SAM`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        for i, group in enumerate(optimizer.param_groups):
            if "rho" not in group:
                raise UserValueError(f"optimizer must be a SAM, but its parameter group {i} has no 'rho'")
        self.optimizer = optimizer
        self.t = 1
        self.rho_0: list[float] = []
        self._apply()

    @abstractmethod
    def rho(self, group: int) -> float:
        r"""Return :math:`\rho_t` for the group with this number."""

    def step(self) -> None:
        """Go on to t + 1."""
        self.go_to(self.t + 1)

    def go_to(self, t: int) -> None:
        """Go to any t, for a loop that counts itself."""
        check_whole("t", t)
        self.t = t
        self._apply()

    def __repr__(self) -> str:
        numbers = {key: value for key, value in vars(self).items() if isinstance(value, int | float)}
        rho = ", ".join(f"{value:g}" for value in self.get_last_rho())
        return f"{type(self).__name__}({', '.join(f'{key}={value}' for key, value in numbers.items())}, rho=[{rho}])"

    def get_last_rho(self) -> list[float]:
        """Return the current rho of each group."""
        return [float(group["rho"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule is."""
        return {"t": self.t, "rho_0": list(self.rho_0)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where a schedule was saved."""
        self.t, self.rho_0 = state_dict["t"], list(state_dict["rho_0"])
        self._apply()

    def _note(self, group: dict[str, Any]) -> None:
        """Remember a group's first values."""
        earlier = self.optimizer.param_groups[: len(self.rho_0)]
        if isinstance(group["rho"], Tensor) and any(group["rho"] is other["rho"] for other in earlier):
            group["rho"] = group["rho"].clone()  # groups that share a tensor go separate ways from here on
        self.rho_0.append(float(group["rho"]))

    def _apply(self) -> None:
        for i, group in enumerate(self.optimizer.param_groups):
            if i >= len(self.rho_0):
                self._note(group)
            if isinstance(group["rho"], Tensor):
                group["rho"].fill_(self.rho(i))  # in place: a captured CUDA graph reads this tensor
            else:
                group["rho"] = self.rho(i)


class ConstantRho(RhoSchedule):
    r""":math:`\rho_t = \rho_0`."""

    def rho(self, group: int) -> float:
        """Return rho_0."""
        return self.rho_0[group]


class InverseSqrtRho(RhoSchedule):
    r""":math:`\rho_t = \rho_0 / \sqrt t`, as in the paper's convergence theorems."""

    def rho(self, group: int) -> float:
        """Return rho_0 / sqrt(t)."""
        return self.rho_0[group] / math.sqrt(self.t)


class CosineRho(RhoSchedule):
    r""":math:`\rho_t = \rho_T + \frac12 (\rho_0 - \rho_T) (1 + \cos\frac{\pi (t-1)}{T})`; :math:`\rho_T` after T.

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

    def rho(self, group: int) -> float:
        """Return the cosine between rho_0 and the final value."""
        progress = min((self.t - 1) / self.total_steps, 1.0)
        return self.final + (self.rho_0[group] - self.final) * (1 + math.cos(math.pi * progress)) / 2


class RampRho(RhoSchedule):
    r""":math:`\rho_t = \rho_0 \min(1, \frac{t - \text{start}}{\text{steps}})` for t > start, and 0 before.

    Step i, counted from 0, has t = i + 1. So step `start` is the first with a rho above 0. Steps before it should be
    base steps, because a second pass at the same weights brings nothing. With a :class:`sparsam.LastSteps` that is
    `RampRho(opt, steps, start=opt.schedule.first)`. A ramp that is longer than the rest of the training never reaches
    :math:`\rho_0`.

    Args:
        optimizer: A :class:`sparsam.SAM`.
        steps: The length of the ramp. Its last step has :math:`\rho_0`.
        start: How many steps come before the ramp.

    >>> import torch
    >>> from sparsam import SAM, LastSteps
    >>> schedule = LastSteps(0.3, total_steps=1000)
    >>> opt = SAM(torch.nn.Linear(2, 1).parameters(), torch.optim.SGD, rho=0.2, schedule=schedule, lr=0.1)
    >>> RampRho(opt, steps=100, start=opt.schedule.first)
    RampRho(steps=100, start=700, t=1, rho=[0])
    """

    def __init__(self, optimizer: Optimizer, steps: int, start: int = 0) -> None:
        check_whole("steps", steps)
        check_whole("start", start, least=0)
        self.steps, self.start = steps, start
        super().__init__(optimizer)

    def rho(self, group: int) -> float:
        """Return the ramp's present share of rho_0."""
        return self.rho_0[group] * min(max(self.t - self.start, 0) / self.steps, 1.0)

    def _apply(self) -> None:
        super()._apply()
        if self.t > self.start and not any(self.rho_0):  # as of an optimizer that was saved before its ramp
            raise UserValueError(
                "rho of some group must be > 0 when RampRho is built, but is 0 in all; in a resumed run build RampRho "
                "before the optimizer's state is loaded, or load RampRho's state too"
            )


class ProportionalRho(RhoSchedule):
    r""":math:`\rho_t = \rho_0\, \eta_t / \eta_0`: follows the group's learning rate, whatever changes it.

    Call its `step()` after the learning-rate scheduler's. :math:`\eta_0` is the group's learning rate when the schedule
    is built, so build it at the learning rate that rho was chosen for: before a scheduler that starts with a warm-up.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.lr_0: list[float] = []
        super().__init__(optimizer)

    def rho(self, group: int) -> float:
        """Return rho_0 times the learning rate's present share of its first value."""
        return self.rho_0[group] * float(self.optimizer.param_groups[group]["lr"]) / self.lr_0[group]

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule is."""
        return {**super().state_dict(), "lr_0": list(self.lr_0)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where a schedule was saved. Load the optimizer's state first: it holds the learning rate."""
        self.lr_0 = list(state_dict["lr_0"])
        super().load_state_dict(state_dict)

    def _note(self, group: dict[str, Any]) -> None:
        super()._note(group)
        if float(group["lr"]) <= 0:
            raise UserValueError(
                f"lr of each group must be > 0 when ProportionalRho is built, but is {float(group['lr'])}"
            )
        self.lr_0.append(float(group["lr"]))
