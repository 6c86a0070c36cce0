"""An optimizer around another one, whose groups and state it shares."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sparsam.checks import check_rho


class Wrapper(Optimizer):
    """Shares `param_groups` and `state` with a base optimizer, so that schedulers and scalers work on both.

    Each group also carries `rho`.
    """

    base_optimizer: Optimizer

    def _wrap(self, base: Optimizer, rho: float | Tensor) -> None:
        """Take over a base optimizer; a group that carries `rho` keeps it."""
        for i, group in enumerate(base.param_groups):
            check_rho(group.get("rho", rho), f"rho of parameter group {i}")
        for group in base.param_groups:
            group["rho"] = plain(group.get("rho", rho))
        self.base_optimizer = base
        # Not Optimizer.__init__, which would make groups and state of its own.
        Optimizer.__setstate__(self, {"defaults": {**base.defaults, "rho": plain(rho)}})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base optimizer's parameter groups."""
        return self.base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base_optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The base optimizer's state."""
        return self.base_optimizer.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.base_optimizer.state = state

    def _params_and_rhos(self) -> tuple[list[Tensor], list[float | Tensor]]:
        """Return every parameter, in the groups' order, and the checked rho of its group."""
        params: list[Tensor] = []
        rhos: list[float | Tensor] = []
        for i, group in enumerate(self.param_groups):
            rho = group.get("rho", self.defaults["rho"])  # gone if the base optimizer loaded a state of its own
            check_rho(rho, f"rho of parameter group {i}")
            params += group["params"]
            rhos += [rho] * len(group["params"])
        return params, rhos

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler puts its own `step` onto the instance; it cannot be copied and patches the copy anew.
        # Hooks are left behind, as torch's own optimizers do.
        return {
            name: value
            for name, value in self.__dict__.items()
            if name != "step" and not name.startswith("_optimizer_")
        }


def plain(rho: float | Tensor) -> float | Tensor:
    """Return a plain float for whatever number was given, so that a state_dict holds nothing else."""
    return rho if isinstance(rho, Tensor) else float(rho)
