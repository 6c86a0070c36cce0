r"""The diagonal of the empirical Fisher information.

.. math::  \hat F = \frac{1}{N} \sum_{i=1}^{N} \big(\nabla_w \ell_i\big)^2,
           \qquad \ell_i = -\log p_w(y_i \mid x_i)

*exact* takes the gradient of each sample. *signs* multiplies the losses of a chunk by independent random
signs :math:`s_i = \pm 1` and takes one gradient of their sum: its square has the right expectation,
:math:`E\big[(\sum_i s_i g_i)^2\big] = \sum_i g_i^2`, because :math:`E[s_i s_j] = 0`, at the price of one ordinary
backward pass and through any module.

Samples must not see each other, so the model is in eval mode meanwhile: BatchNorm uses its running
statistics and does not move them. Whatever happens, modes, buffers, gradients and torch's random numbers
are afterwards what they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from sparsam.checks import check_choice, check_whole
from sparsam.distributed.shards import aligned, any_dtensor, check_same_everywhere, fsdp_modules, local_parts
from sparsam.errors import UserTypeError, UserValueError
from sparsam.passes import call_model, eval_mode, model_arguments, naming_inputs

METHODS = ("exact", "signs")
SIGNS_CHUNK = 32  # larger chunks cost less and are noisier; docs/fisher.md has the figures
MANY_CHUNKS = 64  # rather than more of them, chunks are larger: up to twice as large

Loss = Callable[[Any, Any], Tensor]


def diagonal_fisher(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Any,
    targets: Any,
    *,
    method: str = "exact",
    chunk_size: int | None = None,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    r"""Return :math:`\frac1N\sum_i(\nabla_w\ell_i)^2`, one tensor for each parameter that requires a gradient.

    The order is that of `model.parameters()`; the dtype is the parameter's, at least float32. Where parameters are
    sharded (DTensors), all processes pass the same samples, and the result is sharded as the parameters are.

    Args:
        model: Any module; `model(inputs)` is called (`model(*inputs)` for a tuple or a list, `model(**inputs)` for a
            dict). Of a DistributedDataParallel its inside: the result is that of this process' samples.
        loss_fn: `loss_fn(outputs, targets)`, which sees one sample at a time, so that it may be mean-reduced.
        inputs: A tensor whose first dimension is the sample, or a tuple, list or dict of such tensors. A model that
            takes a dict, a tuple or a list as its one argument gets it in a tuple: `(dict,)`.
        targets: The same for the targets.
        method: "exact" or "signs", see the module's text.
        chunk_size: Samples handled at once. For "signs" at most this many share a backward pass (default:
            32, and up to 64 where there are more than 2,048). For "exact" None means one by one, which any module can
            do; a number takes that many through `torch.func.vmap`, faster on a GPU, for modules that vmap can handle.
        generator: Where "signs" draws its signs from; torch's global generator if None.
    """
    check_loss(loss_fn)
    check_choice("method", method, METHODS)
    if chunk_size is not None:
        check_whole("chunk_size", chunk_size, allowed="a whole number >= 1, or None")
    if isinstance(model, DistributedDataParallel):
        model = model.module  # it would wait for gradients that are not summed up
    samples = _sample_count(inputs, targets)
    for module in fsdp_modules(model.modules()):
        module.reshard()  # what was gathered stands in for the parameters
    params = [p for p in model.parameters() if p.requires_grad]
    if not params:
        raise UserValueError("model has no parameter that requires a gradient, so it has no Fisher information")

    if any_dtensor(params) and method == "exact" and chunk_size is not None:
        raise UserValueError(
            f"chunk_size must be None for method='exact' where parameters are sharded (DTensors), which vmap cannot "
            f"handle, but is {chunk_size}; method='signs' handles chunks"
        )
    tensors = [t for t in tree_leaves((inputs, targets)) if isinstance(t, Tensor)]
    check_same_everywhere(tensors, params, "inputs and targets (of FisherMask: the data set)")
    chunk = chunk_size or (signs_chunk(samples) if method == "signs" else 1)
    signs = _random_signs(samples, generator).to(params[0].device) if method == "signs" else None
    losses = _Losses(loss_fn)
    total = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in params]
    with eval_mode(model), torch.enable_grad():
        for start in range(0, samples, chunk):
            stop = min(start + chunk, samples)
            x, y = _slice((inputs, targets), start, stop)
            if signs is not None:
                _add_squares(total, _signed_gradient(model, losses, params, x, y, signs[start:stop]))
            elif chunk_size is None:
                _add_squares(total, _gradient(_loss(loss_fn, _outputs(model, x), y), params))
            else:
                for sum_of_squares, g in zip(total, _each_gradient(model, loss_fn, x, y), strict=True):
                    sum_of_squares += g.to(sum_of_squares.dtype).square().sum(0)
    torch._foreach_div_(local_parts(total), samples)
    return total


def signs_chunk(samples: int) -> int:
    """Return how many of so many samples share a backward pass by default.

    >>> [signs_chunk(samples) for samples in (16, 2048, 3072, 4096, 50_000)]
    [32, 32, 48, 64, 64]
    """
    return min(max(SIGNS_CHUNK, samples // MANY_CHUNKS), 2 * SIGNS_CHUNK)


def _random_signs(count: int, generator: torch.Generator | None) -> Tensor:
    device = "cpu" if generator is None else generator.device
    return torch.randint(0, 2, (count,), generator=generator, device=device) * 2 - 1


class _Losses:
    """The loss of each sample: of a chunk at once, through vmap; one by one if the loss does not allow that.

    `F.cross_entropy` of classes can say them itself, which takes a fraction of vmap's time.
    """

    def __init__(self, loss_fn: Loss) -> None:
        self.loss_fn = loss_fn
        self.at_once = True

    def __call__(self, outputs: Any, targets: Any, count: int) -> Tensor:
        """Return `count` losses."""
        if self.at_once:
            try:
                return self._batched(outputs, targets)
            except Exception:  # it looks into its tensors, draws random numbers, ...; what is wrong with it comes again
                self.at_once = False
        samples = (_slice((outputs, targets), i, i + 1) for i in range(count))
        return torch.stack([_loss(self.loss_fn, *sample) for sample in samples])

    def _batched(self, outputs: Any, targets: Any) -> Tensor:
        if self.loss_fn is F.cross_entropy and outputs.dim() == 2 and targets.dim() == 1:
            return F.cross_entropy(outputs, targets, reduction="none")
        leaves, spec = tree_flatten((outputs, targets))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def sample_loss(*tensors: Tensor) -> Tensor:
            sample = list(leaves)
            for i, t in zip(places, tensors, strict=True):
                sample[i] = t.unsqueeze(0)
            return _loss(self.loss_fn, *tree_unflatten(sample, spec))

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            return vmap(sample_loss)(*(leaves[i] for i in places))


def _add_squares(total: list[Tensor], gradients: list[Tensor]) -> None:
    gradients = local_parts(gradients)
    torch._foreach_addcmul_(local_parts(total), gradients, gradients)  # of half precision: widened before it is squared


def _signed_gradient(
    model: nn.Module, losses_of: _Losses, params: Sequence[Tensor], x: Any, y: Any, signs: Tensor
) -> list[Tensor]:
    """Return the gradient of the sum of the chunk's losses, each multiplied by its sign."""
    outputs = _outputs(model, x)
    shape = tree_leaves(outputs)[0].shape
    if not shape or shape[0] != len(signs):
        raise UserValueError(
            f"method='signs' needs one output row for each sample, but {len(signs)} samples gave an output of shape "
            f"{tuple(shape)}; method='exact' does without"
        )
    losses = losses_of(outputs, y, len(signs))
    return _gradient((losses * signs.to(losses.device)).sum(), params)


def _each_gradient(model: nn.Module, loss_fn: Loss, x: Any, y: Any) -> list[Tensor]:
    """Return the gradients of the chunk's samples, stacked along a new first dimension."""
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def sample_loss(weights: dict[str, Tensor], x: Any, y: Any) -> Tensor:
        x, y = tree_map_only(Tensor, lambda t: t.unsqueeze(0), (x, y))
        args, kwargs = model_arguments(x)
        return _loss(loss_fn, functional_call(model, weights, args, kwargs), y)

    try:
        return list(vmap(grad(sample_loss), in_dims=(None, 0, 0))(trainable, x, y).values())
    except Exception:
        _outputs(model, x)  # raises if the inputs are to blame, not vmap
        raise


def _outputs(model: nn.Module, inputs: Any) -> Any:
    with naming_inputs("inputs (of FisherMask: those in dataset) must be what the model is called with", inputs):
        return call_model(model, inputs)


def _gradient(loss: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    if any_dtensor(params):
        return _gradient_by_backward(loss, params)
    return list(torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True))


def _gradient_by_backward(loss: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of sharded parameters, which FSDP puts into `.grad` alone."""
    before = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        return [torch.zeros_like(p) if p.grad is None else aligned(p.grad, p) for p in params]
    finally:
        for p, grad in zip(params, before, strict=True):
            p.grad = grad


def check_loss(loss_fn: object) -> None:
    """Refuse a loss that cannot be called, and the class of one, which would take outputs and targets as settings."""
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        name = loss_fn.__name__
        raise UserTypeError(
            f"loss_fn must be a function of outputs and targets, but is the class {name}; pass {name}()"
        )
    if not callable(loss_fn):
        raise UserTypeError(f"loss_fn must be a function of outputs and targets, but is a {type(loss_fn).__name__}")


def _loss(loss_fn: Loss, outputs: Any, targets: Any) -> Tensor:
    loss = loss_fn(outputs, targets)
    if not isinstance(loss, Tensor):
        raise UserTypeError(f"loss_fn(outputs, targets) must return a tensor, but returned a {type(loss).__name__}")
    return loss.sum()


def _slice(tree: Any, start: int, stop: int) -> Any:
    return tree_map_only(Tensor, lambda t: t[start:stop], tree)


def _sample_count(inputs: Any, targets: Any) -> int:
    counts = {len(t) if t.dim() else 0 for t in tree_leaves((inputs, targets)) if isinstance(t, Tensor)}
    if len(counts) != 1 or 0 in counts:
        raise UserValueError(
            f"inputs and targets must be tensors with the same, positive number of samples, but have "
            f"{', '.join(map(str, sorted(counts))) or 'none'}"
        )
    return counts.pop()
