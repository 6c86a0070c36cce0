r"""Perturbing along the momentum, which is there before a step begins: one pass is enough (Becker et al. 2024).

.. math::  \epsilon = -\rho\, \frac{v}{\lVert v \rVert_2}

with v the base optimizer's momentum. That is ahead, where the next steps go: across a narrow valley they overshoot, and
what is found there is the slope of its other side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sparsam.errors import UserRuntimeError, UserValueError
from sparsam.perturbation import Saved, perturb

BUFFERS = ("momentum_buffer", "exp_avg")  # of SGD and its like, and of Adam's family


def check_momentum(base: Optimizer) -> None:
    """Refuse base optimizers without a momentum."""
    for i, group in enumerate(base.param_groups):
        if not group.get("momentum") and not group.get("betas", (0,))[0]:
            raise UserValueError(
                f"momentum_rho needs a base optimizer with momentum, such as SGD with momentum=0.9 or AdamW, but "
                f"{type(base).__name__} has none in parameter group {i}"
            )


def perturb_along_momentum(
    params: Sequence[Tensor],
    state: Mapping[Tensor, Mapping[str, Any]],
    rho: float,
    *,
    adaptive: bool = False,
) -> list[Saved]:
    """Add eps to the weights in place; return what :func:`sparsam.perturbation.restore` needs to take it back.

    Args:
        params: The weights. Frozen ones stay, and those without a momentum, as all are before the first step.
        state: The base optimizer's.
        rho: The radius.
        adaptive: Scale as ASAM does, with v in place of the gradient.
    """
    trained = [p for p in params if p.requires_grad and state.get(p)]
    moving = {p: state[p][name] for p in trained for name in BUFFERS if isinstance(state[p].get(name), Tensor)}
    if trained and not moving:
        raise UserRuntimeError(
            f"momentum_rho finds no momentum in the base optimizer's state, which has {', '.join(state[trained[0]])}: "
            f"it must be called {' or '.join(BUFFERS)}"
        )
    if not moving:
        return []
    everything, rhos = [True] * len(moving), [-rho] * len(moving)
    return perturb(list(moving), list(moving.values()), everything, rhos, adaptive=adaptive, guard=False)
