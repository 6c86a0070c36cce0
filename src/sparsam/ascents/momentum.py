"""Momentum-SAM: one pass, where the momentum leads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from sparsam.ascents.base import Ascent, Memory
from sparsam.checks import check_rho
from sparsam.errors import UserRuntimeError, UserTypeError, UserValueError
from sparsam.settings import Setting


class MomentumAscent(Ascent):
    r"""Momentum-SAM (Becker et al., 2024): d = -v, where the base optimizer is about to go; one pass is enough.

    Every weight moves. Across a narrow valley the next steps overshoot, and the gradient there is that of the other
    slope.

    Args:
        rho: A radius of its own; None: the groups' rho.
    """

    passes: ClassVar[int] = 1

    BUFFERS: ClassVar[tuple[str, ...]] = ("momentum_buffer", "exp_avg")  # of SGD and its like, and of Adam's family

    def __init__(self, rho: float | None = None) -> None:
        if rho is not None:
            check_rho(rho)
        self.rho = None if rho is None else float(rho)

    def settings(self) -> dict[str, Setting]:
        """Return the radius."""
        return {**super().settings(), "rho": self.rho}

    def radius(self, rho: float | Tensor) -> float | Tensor:
        """Return minus the radius: the direction is v, and d = -v."""
        return -(rho if self.rho is None else self.rho)

    def check(self, base: Optimizer) -> None:
        """Refuse base optimizers without a momentum, or with a part of it in each process."""
        if hasattr(base, "consolidate_state_dict"):
            raise UserTypeError(
                f"MomentumAscent reads the momentum of every weight, but {type(base).__name__} keeps a part of it in "
                f"each process; take a plain base optimizer, or another ascent"
            )
        for i, group in enumerate(base.param_groups):
            if not group.get("momentum") and not group.get("betas", (0,))[0]:
                raise UserValueError(
                    f"MomentumAscent needs a base optimizer with momentum, such as SGD with momentum=0.9 or AdamW, but "
                    f"{type(base).__name__} has none in parameter group {i}"
                )

    def direction(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], memory: Memory, base: Optimizer
    ) -> Sequence[Tensor | None]:
        """Return v; None for parameters that have none yet, as all have before the first step."""
        directions = [self._buffer(base.state.get(p, {})) for p in params]
        states = [base.state[p] for p in params if base.state.get(p)]
        if states and all(v is None for v in directions):
            raise UserRuntimeError(
                f"MomentumAscent finds no momentum in the base optimizer's state, which has {', '.join(states[0])}: "
                f"it must be called {' or '.join(self.BUFFERS)}"
            )
        return directions

    def _buffer(self, state: dict[str, Any]) -> Tensor | None:
        buffers = (state.get(name) for name in self.BUFFERS)
        return next((buffer for buffer in buffers if isinstance(buffer, Tensor)), None)
