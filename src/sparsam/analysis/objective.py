r"""A loss over a fixed set of samples, as a function of the weights: what every tool in this folder looks at.

.. math::  f(w) = \frac{1}{N} \sum_b n_b\, \ell(\text{model}_w(x_b), y_b)

over batches b of :math:`n_b` samples, N in all, so that batches of unequal size count by their samples. The model is in
eval mode while it is looked at (BatchNorm uses its running statistics, dropout is off), and comes back as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sparsam.analysis.products import HessianProduct
from sparsam.autograd_graph import tensors_in
from sparsam.passes import looked_at


class Objective:
    """The mean loss of a model over data that stays on the model's device.

    Args:
        model: Any module. Its trainable parameters, shared ones once, are the weights w.
        loss_fn: `loss_fn(outputs, targets)`, the mean over the batch, or one loss for each sample.
        data: A pair of tensors (inputs, targets), or batches of such pairs: a DataLoader, a list.
        batch_size: How a pair of tensors is cut into batches.

    >>> data = torch.ones(4, 2), torch.zeros(4, 1)
    >>> objective = Objective(nn.Linear(2, 1, bias=False), nn.functional.mse_loss, data)
    >>> objective.count, len(objective.batches), sum(p.numel() for p in objective.params)
    (4, 1, 2)
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        data: tuple[Any, Any] | Iterable[tuple[Any, Any]],
        *,
        batch_size: int = 1000,
    ) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.params = [p for p in model.parameters() if p.requires_grad]
        if not self.params:
            raise ValueError("model must have a parameter that requires a gradient, but all are frozen")
        devices = {p.device for p in model.parameters()}
        if len(devices) > 1:
            raise ValueError(f"model must be on one device, but is on {', '.join(sorted(map(str, devices)))}")
        self.device = devices.pop()
        self.batches: list[tuple[Any, Any]] = []
        self.sizes: list[int] = []
        for x, y in _batches(data, batch_size):
            x, y = tree_map_only(Tensor, lambda t: t.to(self.device), (x, y))
            self.batches.append((x, y))
            self.sizes.append(len(tensors_in(x)[0]))
        self.count = sum(self.sizes)
        if not self.count:
            raise ValueError("data must hold at least one sample, but is empty")
        self._hessian_product = HessianProduct(model, self._loss, self.params)

    def parts(self) -> Iterator[Objective]:
        """Yield one objective for each batch."""
        for batch in self.batches:
            yield Objective(self.model, self.loss_fn, [batch])

    def outputs(self, x: Any) -> Any:
        """Return what the model returns."""
        return self.model(x)

    def loss(self) -> Tensor:
        """Return f(w) as a float64 tensor on the device, without waiting for it."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with looked_at(self.model), torch.no_grad():
            for loss, share in self._losses():
                total += loss.double() * share
        return total

    def gradient(self) -> list[Tensor]:
        """Return the gradient of f at w; where a parameter is not used, zeros."""
        total = [torch.zeros_like(p) for p in self.params]
        with looked_at(self.model), torch.enable_grad():
            for loss, share in self._losses():
                grads = torch.autograd.grad(loss * share, self.params, allow_unused=True, materialize_grads=True)
                torch._foreach_add_(total, list(grads))
        return total

    def hessian_product(self, vector: Sequence[Tensor]) -> list[Tensor]:
        r"""Return :math:`\nabla^2 f(w)\, v` for one tensor v a parameter."""
        total = [torch.zeros_like(p) for p in self.params]
        with looked_at(self.model), torch.enable_grad():
            for (x, y), size in zip(self.batches, self.sizes, strict=True):
                products = self._hessian_product(x, y, vector)
                torch._foreach_add_(total, products, alpha=size / self.count)
        return total

    def _losses(self) -> Iterator[tuple[Tensor, float]]:
        for (x, y), size in zip(self.batches, self.sizes, strict=True):
            yield self._loss(x, y), size / self.count

    def _loss(self, x: Any, y: Any) -> Tensor:
        loss = self.loss_fn(self.outputs(x), y)
        return loss.mean() if loss.dim() else loss


def _batches(data: Any, batch_size: int) -> Iterable[tuple[Any, Any]]:
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(t, Tensor) for t in data):
        x, y = data
        if len(x) != len(y):
            raise ValueError(f"data must have a target for each input, but has {len(x)} inputs and {len(y)} targets")
        return list(zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True))
    if isinstance(data, Tensor) or not isinstance(data, Iterable):
        raise TypeError(
            f"data must be a pair of tensors or an iterable of (inputs, targets), but is {type(data).__name__}"
        )
    return data
