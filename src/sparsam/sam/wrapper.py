"""An optimizer around another one, whose groups and state it shares."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsam.checks import check_rho
from sparsam.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])


class Wrapper(Optimizer):
    """Shares `param_groups` and `state` with a base optimizer, so that schedulers and scalers work on both.

    Each group also carries `rho`.
    """

    base_optimizer: Optimizer

    def _wrap(self, base: Optimizer, rho: float | Tensor) -> None:
        """Take over a base optimizer; a group that carries `rho` keeps it."""
        for i, group in enumerate(base.param_groups):
            given = group.get("rho", rho)
            check_rho(float(given) if isinstance(given, Tensor) else given, f"rho of parameter group {i}")
        for group in base.param_groups:
            group["rho"] = plain(group.get("rho", rho))
        self.base_optimizer = base
        # Not Optimizer.__init__, which would make groups and state of its own.
        Optimizer.__setstate__(self, {"defaults": {**base.defaults, "rho": copied(rho)}})

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        if not set_to_none:
            super().zero_grad(False)
            return
        for group in self.param_groups:  # torch's own also labels this for a profiler, which takes longer than the rest
            for p in group["params"]:
                p.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; the mask is made anew in the next step."""
        rho = param_group["rho"] if "rho" in param_group else copied(self.defaults["rho"])
        check_rho(rho, f"rho of parameter group {len(self.param_groups)}")
        self._check_groups()
        self.base_optimizer.add_param_group({**param_group, "rho": plain(rho)})
        try:
            self._check_groups()
        except UserError:
            self.param_groups.pop()
            raise
        self._extend(len(self.param_groups[-1]["params"]))

    @abstractmethod
    def _check_groups(self) -> None:
        """Refuse parameter groups that cannot be, or cannot be now."""

    @abstractmethod
    def _extend(self, count: int) -> None:
        """Make room for so many more parameters."""

    # ------------------------------------------------------------------------------------ saving, copying

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state, rho, masks and counters: tensors and plain Python values only."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state: dict[str, Any] = {**self.base_optimizer.state_dict(), "sparsam": self._own_state()}
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; the run then goes on as if it had not been interrupted.

        A state of another model or with other settings is refused with what differs, and nothing is changed.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        own = self._check_state(state_dict)
        self.base_optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "sparsam"})
        self._load_own_state(own)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @abstractmethod
    def _own_state(self) -> dict[str, Any]:
        """Return what is saved beside the base optimizer's state."""

    @abstractmethod
    def _check_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return what :meth:`_own_state` has saved; refuse what does not fit."""

    @abstractmethod
    def _load_own_state(self, own: dict[str, Any]) -> None:
        """Load what :meth:`_check_state` returned."""

    def _is_a_trial(self) -> bool:
        """Tell whether `torch.distributed.checkpoint` takes a step, to see what state there is: it moves nothing.

        Its helpers let a new optimizer step with gradients and learning rates of 0.
        """
        if self.state:
            return False
        rates = [group.get("lr") for group in self.param_groups]
        on_host = all(not isinstance(lr, Tensor) or lr.device.type == "cpu" for lr in rates)  # as theirs are
        grads = [p.grad for p in self._params() if p.grad is not None]
        return on_host and all(lr == 0 for lr in rates) and not any(bool(grad.any()) for grad in grads)

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


def eager(function: F) -> F:
    """Let torch.compile run a method as it is: traced, a step would leave eps in the weights."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return,no-untyped-call]


def plain(rho: float | Tensor) -> float | Tensor:
    """Return a plain float for whatever number was given, so that a state_dict holds nothing else."""
    return rho if isinstance(rho, Tensor) else float(rho)


def copied(rho: float | Tensor) -> float | Tensor:
    """Return a rho that stays: a schedule changes the tensor of a group in place."""
    return rho.clone() if isinstance(rho, Tensor) else float(rho)
