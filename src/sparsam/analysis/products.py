r"""Hessian products over one batch.

.. math::  H v = \frac{d}{dt}\, \nabla \ell(w + t v) \Big|_{t = 0} = \nabla (\nabla \ell \cdot v)

The first form differentiates the gradient in forward mode, the second in reverse mode. Both are exact and take the same
number of operations. On a GPU reverse mode is slow, as torch's kernels for the double backward of a convolution are.
Forward mode launches many small kernels for a BatchNorm, unless that is folded into the convolution before it
(:mod:`sparsam.analysis.fusion`; benchmarks/looking.py times all three).

So forward mode is used, folded if possible, if it agrees with reverse mode on the first batch. Some modules have no
forward mode. For others it differs from the derivative of the gradient: code under `no_grad`, padded embeddings.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from sparsam.analysis.fusion import traced_and_folded
from sparsam.analysis.kernels import kernels
from sparsam.randomness import fork_rng, random_generator

# The largest ‖difference‖ / ‖H v‖ of the two forms that rounding explains: for the model itself, and folded. Folding
# moves some activations across the kink of a ReLU, which in float32 changes H v by about 1e-3.
AGREEMENT = {torch.float64: (1e-8, 1e-8)}
OTHER_AGREEMENT = (1e-3, 3e-2)

Loss = Callable[[Any, Any, nn.Module | None], Tensor]


class HessianProduct:
    """v -> H v of a scalar loss.

    Args:
        model: The module that holds the weights, in eval mode when it is called.
        loss: `loss(x, y, module)`. It runs the module in place of the model; None: the model itself.
        params: The weights w.
    """

    def __init__(self, model: nn.Module, loss: Loss, params: Sequence[Tensor]) -> None:
        self.model, self.loss, self.params = model, loss, list(params)
        self.forward_mode: bool | None = None
        """Whether products are computed in forward mode; None: decided with the first batch."""
        self.folded: nn.Module | None = None
        """What forward mode runs in place of the model; None: the model itself."""

    def __call__(self, x: Any, y: Any, vector: Sequence[Tensor]) -> list[Tensor]:
        """Return one tensor for each parameter."""
        if self.forward_mode is None:
            self.forward_mode = self._choose(x, y)
        if self.forward_mode:
            products = self._forward(x, y, vector)
            if products is not None:
                return products
            self.forward_mode = False
        return self._reverse(x, y, vector)

    def _choose(self, x: Any, y: Any) -> bool:
        """Tell whether forward mode, folded or not, agrees with reverse mode for a random vector."""
        for module in self.model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                return False  # loses tangents once it has specialised itself
            if getattr(module, "padding_idx", None) is not None:
                return False  # another function in forward mode, which this batch may not show
        generator = random_generator(0)
        vector = [torch.randn(p.shape, generator=generator).to(p) for p in self.params]
        with kernels():
            with fork_rng({p.device for p in self.params}):
                modules = _folded(self.model)  # before any run: a model may keep tensors that cannot be copied
                reverse = self._reverse(x, y, vector)

            def near(module: nn.Module | None, limit: float) -> bool:
                self.folded = module
                return self._distance(x, y, vector, reverse) <= limit

            sharp, blurred = AGREEMENT.get(self.params[0].dtype, OTHER_AGREEMENT)
            if modules is not None:
                traced, folded = modules
                # A trace rounds as the model does, so a sharp limit tells whether it is the same function.
                if near(traced, sharp) and near(folded, blurred):
                    return True
            return near(None, sharp)

    def _distance(self, x: Any, y: Any, vector: list[Tensor], reverse: list[Tensor]) -> float:
        """Return the relative distance of the products in forward and reverse mode; infinite if forward mode fails."""
        try:
            with fork_rng({p.device for p in self.params}):
                forward = self._forward(x, y, vector)
        except torch.OutOfMemoryError:
            if self.folded is None:
                raise
            forward = None  # a trace does not checkpoint activations as the model may do
        except Exception:
            forward = None
        if forward is None:
            return math.inf
        distance, length = (
            torch.stack(torch._foreach_norm(tensors, dtype=torch.float64)).norm()
            for tensors in (torch._foreach_sub(forward, reverse), reverse)
        )
        return float(distance / length)

    def _forward(self, x: Any, y: Any, vector: Sequence[Tensor]) -> list[Tensor] | None:
        try:
            return self._tangents(x, y, vector)
        except RuntimeError as error:
            if "KeyboardInterrupt" in str(error):  # torch's old compiler, which its formulas are written in, wraps it
                raise KeyboardInterrupt from None
            raise

    def _tangents(self, x: Any, y: Any, vector: Sequence[Tensor]) -> list[Tensor] | None:
        with forward_ad.dual_level():
            duals = _duals(self.params, vector)
            with _swapped(self.model, dict(zip(self.params, duals, strict=True))):  # whose modules the folded one runs
                loss = self.loss(x, y, self.folded)
                if not loss.requires_grad:
                    return None
                # Inside, because checkpointing runs the model again here.
                found = torch.autograd.grad(loss, [*duals, *self.params], allow_unused=True)
            grads, others = found[: len(duals)], found[len(duals) :]
            if any(g is not None for g in others):
                return None  # the loss also depends on the weights on another path, without tangents
            tangents = [g if g is None else forward_ad.unpack_dual(g).tangent for g in grads]  # type: ignore[no-untyped-call]
        if all(t is None for t in tangents):
            return None
        return [torch.zeros_like(p) if t is None else t for p, t in zip(self.params, tangents, strict=True)]

    def _reverse(self, x: Any, y: Any, vector: Sequence[Tensor]) -> list[Tensor]:
        loss = self.loss(x, y, None)
        grads = torch.autograd.grad(loss, self.params, create_graph=True, allow_unused=True, materialize_grads=True)
        dot = sum((g * v).sum() for g, v in zip(grads, vector, strict=True))
        if not isinstance(dot, Tensor) or not dot.requires_grad:
            return [torch.zeros_like(p) for p in self.params]  # linear in the weights: there is no curvature
        return list(torch.autograd.grad(dot, self.params, allow_unused=True, materialize_grads=True))


def _folded(model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    try:
        return traced_and_folded(model)
    except Exception:  # what cannot be copied or traced
        return None


def _duals(params: Sequence[Tensor], vector: Sequence[Tensor]) -> list[Tensor]:
    """Return new leaves with the values of the parameters and with tangents."""
    with warnings.catch_warnings():  # on first use torch compiles formulas, with its own, old compiler
        warnings.simplefilter("ignore", DeprecationWarning)
        return [
            forward_ad.make_dual(p.detach().requires_grad_(), v)  # type: ignore[no-untyped-call]
            for p, v in zip(params, vector, strict=True)
        ]


@contextmanager
def _swapped(model: nn.Module, new: dict[Tensor, Tensor]) -> Iterator[None]:
    """Replace parameters by other tensors.

    torch.func.functional_call does not restore a module that the model holds under two names.
    """
    places = [
        (module._parameters, name, p)
        for module in model.modules()
        for name, p in module._parameters.items()
        if p is not None and p in new
    ]
    try:
        for parameters, name, p in places:
            parameters[name] = new[p]  # type: ignore[assignment]
        yield
    finally:
        for parameters, name, p in places:
            parameters[name] = p
