"""F-SAM: the gradient without what batches have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsam.ascents.base import Ascent, Memory
from sparsam.checks import check_number, check_share
from sparsam.distributed.shards import local_parts
from sparsam.perturbation import accumulation_dtype, blended, converted
from sparsam.settings import Setting


class FriendlyAscent(Ascent):
    r"""F-SAM (Li et al., CVPR 2024): leaves out of the ascent what batches have in common.

    .. math::  d = g - \sigma m, \qquad m \leftarrow \lambda m + (1 - \lambda)\, g

    A parameter's first gradient sets its mean: d = g, m = g. The mean follows g over the whole scope of the mask,
    whatever the mask selects. A gradient that is not finite does not move it (the device decides that: nothing
    waits), nor does a step that is given up.

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
        if not params:
            return []
        self.start([p for p in params if p not in memory], memory)
        means = local_parts(memory[p]["mean"] for p in params)
        return torch._foreach_sub(converted(local_parts(grads), means), means, alpha=self.sigma)

    def remember(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], memory: Memory, norm: Tensor
    ) -> Callable[[], None]:
        """Return what lets m follow g, where g is finite."""
        kept = [memory[p] for p in params]
        together: dict[int, list[int]] = {}  # parameters that came in the same step share `seen`
        for i, own in enumerate(kept):
            together.setdefault(id(own["seen"]), []).append(i)
        updates: list[tuple[list[Tensor], list[Tensor]]] = []
        for indices in together.values():
            seen = kept[indices[0]]["seen"]
            others = len(memory) - len(indices)
            if others and sum(own["seen"] is seen for own in memory.values()) > len(indices):  # they go their own way
                seen = seen.clone()
                for i in indices:
                    kept[i]["seen"] = seen
            finite = norm.isfinite().to(seen.device)
            means = local_parts(kept[i]["mean"] for i in indices)
            new = blended(means, local_parts(grads[i] for i in indices), 1 - self.decay * seen, where=finite)
            updates.append(([*means, seen], [*new, torch.maximum(seen, finite.to(seen.dtype))]))

        def update() -> None:
            for old, new in updates:
                torch._foreach_copy_(old, new)

        return update

    def start(self, params: Sequence[Tensor], memory: Memory) -> None:
        """Give new parameters a mean of 0, and note on the device that no gradient has set it yet."""
        seen: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        for p in params:
            dtype = accumulation_dtype(p)
            none = seen.setdefault((p.device, dtype), torch.zeros((), dtype=dtype, device=p.device))
            memory[p] = {"mean": torch.zeros_like(p, dtype=dtype, requires_grad=False), "seen": none}
