"""Proof that a pass which was cut short gives what a whole pass gives.

No rule about modules can foresee what Python code does beside calling them. So each new path through a model is proven
before it is trusted. A whole pass and a replayed one start from the same weights, buffers and random numbers. They must
end with the same loss, gradients, buffers and random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparsam.randomness import RngState, get_rng_state

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
ROUGH = 2e-2  # in bf16, fp16 and TF32
NOISE = 3.0  # a difference of so many times that of two whole passes is none


def named(model: nn.Module, params: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a model, and those of its optimizer that are not in it, by name."""
    known: dict[str, Tensor] = dict(model.named_parameters())
    inside = set(known.values())
    return {**known, **{f"parameter {i} of the optimizer": p for i, p in enumerate(params) if p not in inside}}


@dataclass
class Outcome:
    """What a pass left."""

    loss: list[Tensor]
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    random: RngState

    @classmethod
    def of(cls, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], loss: Any) -> Outcome:
        """Copy what a pass has left in gradients, buffers and torch's generators, and what it returned."""
        leaves = [leaf for leaf in tree_leaves(loss) if isinstance(leaf, (Tensor, float))]
        return cls(
            [torch.as_tensor(leaf).detach().clone() for leaf in leaves],
            {name: None if p.grad is None else p.grad.detach().clone() for name, p in params.items()},
            {name: buffer.detach().clone() for name, buffer in buffers.items()},
            get_rng_state({p.device for p in params.values()}),
        )

    @torch.no_grad()
    def put_back(self, params: Mapping[str, Tensor]) -> None:
        """Let the gradients be these again."""
        for name, p in params.items():
            grad = self.grads[name]
            if grad is None or p.grad is None or p.grad.layout != grad.layout or p.grad.layout != torch.strided:
                p.grad = grad
            else:
                p.grad.copy_(grad)  # DistributedDataParallel's gradients lie in its buckets


def difference(
    one: Outcome, other: Outcome, *, rough: bool, but: Collection[str] = (), noise: Outcome | None = None
) -> str:
    """Say in what two outcomes differ more than rounding does; nothing if they do not.

    Args:
        one: Of a whole pass.
        other: Of another pass.
        rough: Whether the passes are computed in bf16, fp16 or TF32.
        but: Names of parameters whose gradients are not compared.
        noise: Of a second whole pass, if whole passes are known to differ.
    """
    if any(
        not torch.equal(state, other.random[device]) for device, state in one.random.items() if device in other.random
    ):
        return "it drew other random numbers"
    if len(one.loss) != len(other.loss):
        return "it returned another loss"
    for k, (loss, other_loss) in enumerate(zip(one.loss, other.loss, strict=True)):
        apart = _apart(loss, other_loss, rough, noise.loss[k] if noise else None)
        if apart:
            return f"its loss is another one ({apart})"
    for name, grad in one.grads.items():
        if name not in but:
            apart = _apart(grad, other.grads[name], rough, noise.grads[name] if noise else None)
            if apart:
                return f"its gradient of {name!r} is another one ({apart})"
    for name, buffer in one.buffers.items():
        if name in other.buffers:  # a pass from the cut leaves those before it alone
            apart = _apart(buffer, other.buffers[name], rough, noise.buffers.get(name) if noise else None)
            if apart:
                return f"its buffer {name!r} is another one ({apart})"
    return ""


def matched(whole: Outcome, other: Outcome, but: Collection[str]) -> Outcome:
    """Return an outcome with gradients multiplied by the one factor that brings them closest to those of a whole pass.

    A closure that clips gradients clips those of the suffix alone in a pass that ends at the cut. The perturbation
    depends on their direction only.
    """
    pairs = [
        (a.double().flatten(), b.double().flatten())
        for name, a in whole.grads.items()
        if name not in but and a is not None and (b := other.grads[name]) is not None
    ]
    length = sum(float(b.dot(b)) for _, b in pairs)
    factor = sum(float(a.dot(b)) for a, b in pairs) / length if length else 1.0
    if not 0 < factor < math.inf or abs(factor - 1) < 1e-6:
        return other
    return replace(other, grads={name: None if g is None else g * factor for name, g in other.grads.items()})


def is_repeatable(one: Outcome, other: Outcome, *, rough: bool, but: Collection[str]) -> bool:
    """Tell whether two whole passes differ by no more than rounding, over all gradients together."""
    pairs = [(a, other.grads[name]) for name, a in one.grads.items() if name not in but]
    if any((a is None) != (b is None) for a, b in pairs):
        return False
    grads = [(a.double(), b.double()) for a, b in pairs if a is not None and b is not None]
    length = sum(float(a.square().sum()) for a, _ in grads)
    apart = sum(float((a - b).square().sum()) for a, b in grads)
    dtypes = {a.dtype for a, _ in pairs if a is not None}
    tolerance = max((_tolerance(dtype, rough) for dtype in dtypes), default=ROUGH)
    return apart <= tolerance**2 * length


def _apart(a: Tensor | None, b: Tensor | None, rough: bool, noise: Tensor | None) -> str:
    """Say how far two tensors are apart, if that is too far."""
    if a is None or b is None:
        missing = a if b is None else b
        return "" if missing is None or not bool(missing.any()) else "there is none in one of the passes"
    if a.shape != b.shape:
        return f"of shape {tuple(b.shape)}, not {tuple(a.shape)}"
    if a.layout != torch.strided or b.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if not a.is_floating_point():  # a counter, say
        return "" if torch.equal(a, b) else "other values"
    length, apart = float(a.double().norm()), float((a.double() - b.double()).norm())
    allowed = _tolerance(a.dtype, rough) * length
    if noise is not None:
        allowed = max(allowed, NOISE * float((a.double() - noise.double()).norm()))
    if (
        apart <= allowed
        or torch.equal(a, b)
        or ((a.isnan() == b.isnan()).all() and a.nan_to_num().equal(b.nan_to_num()))
    ):
        return ""
    return f"relative difference {apart / length:.2g}" if length else f"{apart:.2g} in place of 0"


def _tolerance(dtype: torch.dtype, rough: bool) -> float:
    return ROUGH if rough and dtype != torch.float64 else TOLERANCE.get(dtype, ROUGH)
