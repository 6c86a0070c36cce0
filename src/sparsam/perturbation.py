r"""The arithmetic of one perturbation: pure functions on lists of tensors.

Names follow the paper: weights w, gradient g, mask m, radius rho, perturbation eps:

.. math::  \epsilon = \rho \, \frac{g}{\lVert g \rVert_2} \odot m
           \qquad\text{adaptive (ASAM):}\qquad
           \epsilon = \rho \, \frac{w^2 \odot g}{\lVert\, |w| \odot g \,\rVert_2} \odot m

The norm is that of the whole gradient, also of what the mask leaves out, unless the caller has another one.

Each list is worked on in *buckets*: the tensors that share a device and a dtype (and a rho) lie side by
side in one flat buffer, so that a bucket costs a handful of kernels however many layers it has, and so
that "perturb or not" can be decided on the device: nothing here waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Saved(NamedTuple):
    """Tensors and copies of what they held."""

    tensors: list[Tensor]
    copies: list[Tensor]


def perturb(
    params: Sequence[Tensor],
    directions: Sequence[Tensor],
    selection: Sequence[Tensor | bool],
    rhos: Sequence[float | Tensor],
    *,
    adaptive: bool = False,
    norm: Tensor | None = None,
) -> list[Saved]:
    """Add eps to the weights in place; return what :func:`restore` needs to take it back.

    Only tensors of which something is perturbed are saved. A direction whose norm is zero or not finite
    gives no perturbation.

    Args:
        params, directions, selection, rhos: One of each for every tensor. A rho below 0 goes against the direction.
        adaptive: The perturbation of ASAM.
        norm: To divide by; default: that of all the directions.
    """
    if norm is None:
        norm = gradient_norm(params, directions, adaptive=adaptive)
    chosen = [i for i, m in enumerate(selection) if m is not False and (isinstance(rhos[i], Tensor) or rhos[i])]
    saved: list[Saved] = []
    try:
        for indices in _buckets((id(rhos[i]), params[i], i) for i in chosen):
            w = [params[i] for i in indices]
            d = [directions[i] for i in indices]
            m = [selection[i] for i in indices]
            eps = _perturbation(w, d, m, rhos[indices[0]], norm, adaptive)
            saved.append(_save_bucket(w))
            torch._foreach_add_(w, eps)
    except BaseException:  # out of memory, say: all or nothing
        restore(saved)
        raise
    return saved


def gradient_norm(params: Sequence[Tensor], grads: Sequence[Tensor], *, adaptive: bool) -> Tensor:
    r"""Return the 0-d tensor :math:`\lVert g \rVert_2`, or :math:`\lVert\, |w| \odot g \,\rVert_2` if adaptive."""
    norms: list[Tensor] = []
    for indices in _buckets((None, g, i) for i, g in enumerate(grads)):
        bucket = [grads[i] for i in indices]
        dtype = accumulation_dtype(bucket[0])
        if adaptive:
            w = [params[i] for i in indices]
            flat = _flat_copies(bucket, dtype, like=w)[0] * _flat_copies(w, dtype)[0]
            norms.append(torch.linalg.vector_norm(flat))
        else:
            norms += torch._foreach_norm(bucket, 2, dtype)
    device = norms[0].device
    widest = max((n.dtype for n in norms), key=lambda dtype: dtype.itemsize)
    together = torch.stack([n.to(device, widest) for n in norms])
    return torch.linalg.vector_norm(together)  # type: ignore[no-any-return]


def blended(targets: Sequence[Tensor], sources: Sequence[Tensor], weight: Tensor, *, where: Tensor) -> list[Tensor]:
    """Return t + weight (s - t) for targets t and sources s if `where` is true, else t: the device decides.

    Args:
        targets, sources: Tensors of the same shapes.
        weight: A number in a 0-d tensor.
        where: A bool in a 0-d tensor. Where it is false a source that is not finite does no harm.
    """
    result = list(targets)
    for indices in _buckets((None, t, i) for i, t in enumerate(targets)):
        bucket = [targets[i] for i in indices]
        old, _ = _flat_copies(bucket, bucket[0].dtype)
        new, views = _flat_copies([sources[i] for i in indices], old.dtype, like=bucket)
        new.copy_(torch.where(where, torch.lerp(old, new, weight.to(old.dtype)), old))
        for i, view in zip(indices, views, strict=True):
            result[i] = view
    return result


def converted(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in the dtypes of others: the same ones where they have those already."""
    result = list(tensors)
    for indices in _buckets((t.dtype, other, i) for i, (t, other) in enumerate(zip(tensors, like, strict=True))):
        if tensors[indices[0]].dtype != like[indices[0]].dtype:
            bucket = [tensors[i] for i in indices]
            views = _flat_copies(bucket, like[indices[0]].dtype, like=[like[i] for i in indices])[1]
            for i, view in zip(indices, views, strict=True):
                result[i] = view
    return result


def accumulation_dtype(t: Tensor) -> torch.dtype:
    """Return the dtype in which sums over a tensor are kept."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def save(tensors: Iterable[Tensor]) -> list[Saved]:
    """Copy the tensors aside, bit for bit."""
    tensors = list(tensors)
    return [
        _save_bucket([tensors[i] for i in indices]) for indices in _buckets((None, t, i) for i, t in enumerate(tensors))
    ]


def restore(saved: Iterable[Saved]) -> None:
    """Copy back what :func:`save` or :func:`perturb` put aside, bit for bit."""
    for tensors, copies in reversed(list(saved)):  # the first copies of shared memory are the right ones
        torch._foreach_copy_(tensors, copies)


def _perturbation(
    w: list[Tensor],
    d: list[Tensor],
    m: list[Tensor | bool],
    rho: float | Tensor,
    norm: Tensor,
    adaptive: bool,
) -> list[Tensor]:
    """Return eps for the tensors of one bucket."""
    dtype = accumulation_dtype(w[0])
    scale = (rho / norm).to(w[0].device)
    leave = ~((scale != 0) & (scale.abs() < torch.inf))  # true for a norm of 0, inf or NaN, and for rho = 0
    flat, eps = _flat_copies(d, dtype, like=w)
    if adaptive:
        flat.mul_(_flat_copies(w, flat.dtype)[0].square_())
    flat.mul_(scale)
    # Selected, not multiplied by zero: 0 * inf is NaN. And w + (-0.0) is w bit for bit, also for w = -0.0.
    keep = _flat_mask(m, w, flat)
    flat.masked_fill_(leave if keep is None else leave | ~keep, -0.0)
    if flat.dtype == w[0].dtype:
        return eps
    return _views(flat.to(w[0].dtype), w)


def _flat_mask(m: list[Tensor | bool], w: list[Tensor], flat: Tensor) -> Tensor | None:
    """Return the masks in one flat buffer; None if all weights are selected."""
    if not any(isinstance(mask, Tensor) for mask in m):
        return None
    keep = torch.ones_like(flat, dtype=torch.bool)
    pairs = [(k, mask) for k, mask in zip(_views(keep, w), m, strict=True) if isinstance(mask, Tensor)]
    torch._foreach_copy_([k for k, _ in pairs], [mask for _, mask in pairs])
    return keep


def _save_bucket(tensors: list[Tensor]) -> Saved:
    return Saved(tensors, _flat_copies(tensors, tensors[0].dtype)[1])


def _flat_copies(
    tensors: list[Tensor], dtype: torch.dtype, like: list[Tensor] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Copy the tensors into one flat buffer; return it and its views, shaped and strided as `like`."""
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=dtype, device=tensors[0].device)
    views = _views(flat, like or tensors)
    torch._foreach_copy_(views, tensors)
    return flat, views


def _views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Cut a flat buffer into tensors with the shapes and, where they are dense, the strides of `like`."""
    pieces = torch.split(flat, [t.numel() for t in like])
    return [
        piece.view(t.shape) if t.is_contiguous() else piece.as_strided(t.shape, _dense_strides(t))
        for piece, t in zip(pieces, like, strict=True)
    ]


def _dense_strides(t: Tensor) -> tuple[int, ...]:
    """Return the strides torch gives to a dense copy of t: t's own if t is dense, so kernels can be fused."""
    if t.is_contiguous(memory_format=torch.channels_last):
        return t.stride()
    return torch.empty_like(t, device="meta").stride()


def _buckets(entries: Iterable[tuple[Hashable, Tensor, int]]) -> Iterable[list[int]]:
    """Group the indices of tensors that one kernel can treat: equal key, device and dtype."""
    buckets: dict[Hashable, list[int]] = {}
    for key, tensor, index in entries:
        buckets.setdefault((key, tensor.device, tensor.dtype), []).append(index)
    return buckets.values()
