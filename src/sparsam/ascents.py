r"""Which way: the direction d of a perturbation, :math:`\epsilon = \rho\, d / \lVert d \rVert_2 \odot m`.

An ascent holds settings, no state. What it keeps between steps lies in a `memory` that the optimizer owns, saves and
hands to it. Names follow the papers: gradient g, mean of gradients m, momentum v.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsam.checks import check_number, check_rho, check_share
from sparsam.errors import UserRuntimeError, UserValueError
from sparsam.perturbation import accumulation_dtype, blend, converted
from sparsam.settings import Policy, Setting

Memory = dict[Tensor, dict[str, Tensor]]
"""What an ascent keeps between steps: named tensors, by parameter."""


class Ascent(Policy, ABC):
    """Says which way a step perturbs the weights."""

    passes: ClassVar[int] = 2
    """2: the direction comes from a first pass at w, and a second pass follows at w + eps, where a mask allows it.
    1: the direction is known before the step, every weight moves along it, and the only pass is at w + eps."""

    @abstractmethod
    def direction(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], memory: Memory, base: Optimizer
    ) -> Sequence[Tensor | None]:
        """Return the direction d, a tensor for each parameter; None: the parameter stays where it is.

        Args:
            params: The parameters that take part. With two passes: those in the mask's scope that have a gradient.
            grads: The gradient of each at w; nothing if the ascent takes one pass.
            memory: What this ascent has kept; it may add to it.
            base: The base optimizer.
        """

    def remember(self, params: Sequence[Tensor], grads: Sequence[Tensor], memory: Memory, norm: Tensor) -> None:
        """Bring the memory up to date, after the weights were perturbed.

        Args:
            params, grads, memory: As for :meth:`direction`.
            norm: That of d: not finite if a gradient is not.
        """

    def radius(self, rho: float | Tensor) -> float | Tensor:
        """Return the radius, given that of a parameter group; below 0 the perturbation goes against d."""
        return rho

    def check(self, base: Optimizer) -> None:
        """Refuse base optimizers that the ascent cannot work with."""


class GradientAscent(Ascent):
    """d = g: SAM."""

    def direction(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], memory: Memory, base: Optimizer
    ) -> Sequence[Tensor]:
        """Return g."""
        return grads


class FriendlyAscent(Ascent):
    r"""F-SAM (Li et al., CVPR 2024): leaves out of the ascent what batches have in common.

    .. math::  d = g - \sigma m, \qquad m \leftarrow \lambda m + (1 - \lambda)\, g

    A parameter's first gradient sets its mean: d = g, m = g. The mean follows g over the whole scope of the mask,
    whatever the mask selects. A gradient that is not finite does not move it. The device decides that: nothing waits.

    Args:
        sigma: How much of the mean is subtracted, at least 0.
        decay: :math:`\lambda`, how much of the mean stays in each step, in [0, 1].
    """

    def __init__(self, sigma: float = 1.0, decay: float = 0.6) -> None:
        check_number("sigma", sigma, "a finite number >= 0", lambda value: 0 <= value < float("inf"))
        check_share("decay", decay)
        self.sigma, self.decay = float(sigma), float(decay)

    def settings(self) -> dict[str, Setting]:
        """Return sigma and decay."""
        return {**super().settings(), "sigma": self.sigma, "decay": self.decay}

    def direction(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], memory: Memory, base: Optimizer
    ) -> Sequence[Tensor]:
        """Return g - sigma m."""
        self._meet([p for p in params if p not in memory], memory)
        means = [memory[p]["mean"] for p in params]
        return torch._foreach_sub(converted(grads, means), means, alpha=self.sigma)

    def remember(self, params: Sequence[Tensor], grads: Sequence[Tensor], memory: Memory, norm: Tensor) -> None:
        """Let m follow g, where g is finite."""
        together: dict[int, list[int]] = {}  # parameters that came in the same step share `seen`
        for i, p in enumerate(params):
            together.setdefault(id(memory[p]["seen"]), []).append(i)
        for indices in together.values():
            seen = memory[params[indices[0]]]["seen"]
            finite = norm.isfinite().to(seen.device)
            means = [memory[params[i]]["mean"] for i in indices]
            blend(means, [grads[i] for i in indices], 1 - self.decay * seen, where=finite)
            seen.copy_(torch.maximum(seen, finite.to(seen.dtype)))

    def _meet(self, new: Sequence[Tensor], memory: Memory) -> None:
        """Give new parameters a mean of 0, and note on the device that no gradient has set it yet."""
        seen: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        for p in new:
            dtype = accumulation_dtype(p)
            none = seen.setdefault((p.device, dtype), torch.zeros((), dtype=dtype, device=p.device))
            memory[p] = {"mean": torch.zeros_like(p, dtype=dtype, requires_grad=False), "seen": none}


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
        """Refuse base optimizers without a momentum."""
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
