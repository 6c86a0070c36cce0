r"""A loss over a fixed set of samples, as a function of the weights. Every tool in this folder works on one.

.. math::  f(w) = \frac{1}{N} \sum_b n_b\, \ell(\text{model}_w(x_b), y_b)

over batches b of :math:`n_b` samples, N in all, so that batches of unequal size count by their samples. The model runs
in eval mode (BatchNorm uses its running statistics, dropout is off). Afterwards it is as it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sparsam.analysis.kernels import twice_differentiable
from sparsam.analysis.products import HessianProduct
from sparsam.checks import check_whole
from sparsam.errors import UserTypeError, UserValueError
from sparsam.passes import eval_mode
from sparsam.randomness import fork_rng
from sparsam.replay.autograd_graph import tensors_in


class Objective:
    """The mean loss of a model over data that stays on the model's device.

    Args:
        model: Any module. Its trainable parameters are the weights w; a shared parameter counts once. As long as the
            objective is used, nothing of the model may change but weights and buffers.
        loss_fn: `loss_fn(outputs, targets)`, the mean over the batch, or one loss for each sample.
        data: A pair of tensors (inputs, targets), or batches of such pairs: a DataLoader, a list.
        batch_size: The size of the batches into which a pair of tensors is split.

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
        _check(model, self.params)
        self.device = self.params[0].device
        self.batches: list[tuple[Any, Any]] = []
        self.sizes: list[int] = []
        with fork_rng({self.device}):  # a loader that shuffles draws some
            for batch in _batches(data, batch_size):
                x, y = tree_map_only(Tensor, lambda t: t.to(self.device), _pair(batch))
                size = next(len(t) for t in tensors_in(x) if t.dim())
                if size:
                    self.batches.append((x, y))
                    self.sizes.append(size)
        self.count = sum(self.sizes)
        if not self.count:
            raise UserValueError("data must hold at least one sample, but is empty")
        self.product = HessianProduct(model, self._loss, self.params)

    def parts(self) -> Iterator[Objective]:
        """Yield one objective for each batch."""
        for batch in self.batches:
            yield Objective(self.model, self.loss_fn, [batch])

    def loss(self, forward: Callable[[Any], Any] | None = None) -> Tensor:
        """Return f(w) as a float64 tensor on the device, without a synchronisation.

        Args:
            forward: Computes the outputs in place of the model.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with eval_mode(self.model), torch.no_grad():
            for x, y, share in self._weighted():
                total += self._loss(x, y, forward).double() * share
        return total

    def gradient(self) -> list[Tensor]:
        """Return the gradient of f at w. It is zero for parameters that are not used."""
        total = [torch.zeros_like(p) for p in self.params]
        with eval_mode(self.model), torch.enable_grad():
            for x, y, share in self._weighted():
                loss = self._loss(x, y) * share
                grads = torch.autograd.grad(loss, self.params, allow_unused=True, materialize_grads=True)
                torch._foreach_add_(total, list(grads))
        return total

    def hessian_product(self, vector: Sequence[Tensor]) -> list[Tensor]:
        r"""Return :math:`\nabla^2 f(w)\, v` for one tensor v a parameter."""
        total = [torch.zeros_like(p) for p in self.params]
        with eval_mode(self.model), torch.enable_grad(), twice_differentiable(self.model):
            for x, y, share in self._weighted():
                torch._foreach_add_(total, self.product(x, y, vector), alpha=share)
        return total

    def _weighted(self) -> Iterator[tuple[Any, Any, float]]:
        for (x, y), size in zip(self.batches, self.sizes, strict=True):
            yield x, y, size / self.count

    def _loss(self, x: Any, y: Any, forward: Callable[[Any], Any] | None = None) -> Tensor:
        before = [t._version for t in tensors_in(x) if not t.is_inference()]
        loss = self.loss_fn((forward or self.model)(x), y)
        if before != [t._version for t in tensors_in(x) if not t.is_inference()]:
            raise UserValueError(
                "model must not write into its inputs, but did, so the next loss would differ: let it clone them, or "
                "start with inplace=False"
            )
        return loss.mean() if loss.dim() else loss


def check_objective(objective: object) -> None:
    """Refuse anything but an objective, such as a bare model."""
    if not isinstance(objective, Objective):
        given = type(objective).__name__
        raise UserTypeError(f"objective must be an Objective(model, loss_fn, data), but is a {given}")


def _check(model: nn.Module, params: Sequence[Tensor]) -> None:
    if not params:
        raise UserValueError("model must have a parameter that requires a gradient, but all are frozen")
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise UserValueError(f"model must be on one device, but is on {', '.join(sorted(map(str, devices)))}")
    if any(p.is_complex() for p in params):
        raise UserValueError("model must have real weights, but some are complex")
    embeddings = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    writing = [name for name, m in embeddings if m.max_norm is not None]
    if writing:
        raise UserValueError(f"model must not change its weights in a forward pass, but {writing[0]!r} has a max_norm")


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        given = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise UserTypeError(f"data must be a pair of tensors or batches of (inputs, targets), but holds a {given}")
    if not any(t.dim() for t in tensors_in(batch[0])):
        raise UserTypeError(f"the inputs of a batch must hold a tensor of samples, but are {type(batch[0]).__name__}")
    return batch[0], batch[1]


def is_pair(data: object) -> TypeGuard[tuple[Tensor, Tensor]]:
    """Tell whether data is a pair of tensors, which an objective splits into batches."""
    return isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(t, Tensor) for t in data)


def _batches(data: Any, batch_size: int) -> Iterable[Any]:
    check_whole("batch_size", batch_size)
    if is_pair(data):
        x, y = data
        if len(x) != len(y):
            raise UserValueError(
                f"data must have a target for each input, but has {len(x)} inputs and {len(y)} targets"
            )
        return list(zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True))
    if isinstance(data, Tensor) or not isinstance(data, Iterable):
        raise UserTypeError(
            f"data must be a pair of tensors or batches of (inputs, targets), but is a {type(data).__name__}"
        )
    return data
