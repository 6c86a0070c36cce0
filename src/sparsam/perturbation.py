r"""The arithmetic of one perturbation: pure functions on lists of tensors.

Names follow the paper: weights w, gradient g, mask m, radius rho, perturbation eps:

.. math::  \epsilon = \rho \, \frac{g}{\lVert g \rVert_2} \odot m
           \qquad\text{adaptive (ASAM):}\qquad
           \epsilon = \rho \, \frac{w^2 \odot g}{\lVert\, |w| \odot g \,\rVert_2} \odot m

The norm is that of the whole gradient, also of what the mask leaves out, unless the caller has another one.

Each list is worked on in *buckets*: the tensors that share a device and a dtype (and a rho). On a GPU a bucket costs a
handful of kernels however many layers it has, and the GPU decides whether to perturb: nothing here waits for it. On a
CPU memory is what takes time: each tensor is gone over as few times as possible. What is made anew is small, because
large pieces of memory come from the system, page by page, and go back to it at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

# Where torch's fused SGD is used. On CUDA it reads the scale in float32, which is not enough for float64. On a CPU it
# leaves most bf16 and fp16 weights as they are, and saves nothing beside add_.
FUSED = {"cuda": (torch.float32, torch.bfloat16, torch.float16)}
SLAB = 2**19  # numbers that a thread works on at a time, on a CPU
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


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
        for indices in _buckets((rhos[i], params[i], i) for i in chosen if params[i].numel()):
            w = [params[i] for i in indices]
            d = [directions[i] for i in indices]
            m = [selection[i] for i in indices]
            scale = (rhos[indices[0]] / norm).to(w[0].device, accumulation_dtype(w[0]))
            saved.append(_save_bucket(w))
            if _is_on_host(w[0]):
                _add_on_host(w, saved[-1].copies, d, m, scale.item(), adaptive)
            else:
                _add_on_device(w, d, m, scale, adaptive)
    except BaseException:  # out of memory, say: all or nothing
        restore(saved)
        raise
    return saved


def gradient_norm(params: Sequence[Tensor], grads: Sequence[Tensor], *, adaptive: bool) -> Tensor:
    r"""Return the 0-d tensor :math:`\lVert g \rVert_2`, or :math:`\lVert\, |w| \odot g \,\rVert_2` if adaptive."""
    norms: list[Tensor] = []
    buckets = _buckets((None, g, i) for i, g in enumerate(grads))
    for indices in buckets:
        bucket = [grads[i] for i in indices]
        dtype = accumulation_dtype(bucket[0])
        if adaptive and _is_on_host(bucket[0]):
            pairs = [pair for i in indices for pair in zip(_slabs(params[i]), _slabs(grads[i]), strict=True)]
            norms += [torch.linalg.vector_norm(w.to(dtype) * g) for w, g in pairs]
        elif adaptive:
            w = [params[i] for i in indices]
            flat = _flat_copies(bucket, dtype, like=w)[0] * _flat_copies(w, dtype)[0]
            norms.append(torch.linalg.vector_norm(flat))
        else:
            norms += torch._foreach_norm(bucket, 2, dtype)
    if len(buckets) > 1:
        device = norms[0].device
        widest = max((n.dtype for n in norms), key=lambda dtype: dtype.itemsize)
        norms = [n.to(device, widest) for n in norms]
    return torch.linalg.vector_norm(torch.stack(norms))  # type: ignore[no-any-return]


def blended(targets: Sequence[Tensor], sources: Sequence[Tensor], weight: Tensor, *, where: Tensor) -> list[Tensor]:
    """Return t + weight (s - t) for targets t and sources s if `where` is true, else t: the device decides.

    Args:
        targets, sources: Tensors of the same shapes.
        weight: A number in a 0-d tensor.
        where: A bool in a 0-d tensor. Where it is false a source that is not finite does no harm.
    """
    result = list(targets)
    for indices in _buckets((None, t, i) for i, t in enumerate(targets)):
        old, new = [targets[i] for i in indices], [sources[i] for i in indices]
        share = weight.to(old[0].dtype)
        if _is_on_host(old[0]):
            if not where:
                continue
            views = list(torch._foreach_lerp(old, converted(new, old), share.item()))
        elif _can_be_fused(old, new) and _have_same_strides(old, new):
            views = _flat_copies(old, share.dtype)[1]
            _fused_add(views, new, share, ~where, decay=1.0)
        else:
            flat, views = _flat_copies(new, share.dtype, like=old)
            before = _flat_copies(old, share.dtype)[0]
            flat.copy_(torch.where(where, torch.lerp(before, flat, share), before))
        for i, view in zip(indices, views, strict=True):
            result[i] = view
    return result


def converted(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in the dtypes of others: the same ones where they have those already."""
    result, pairs = list(tensors), zip(tensors, like, strict=True)
    others = [(t.dtype, other, i) for i, (t, other) in enumerate(pairs) if t.dtype != other.dtype]
    for indices in _buckets(others):
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


def _is_on_host(t: Tensor) -> bool:
    return t.device.type == "cpu"


def _add_on_host(
    w: list[Tensor],
    copies: list[Tensor],
    d: list[Tensor],
    m: list[Tensor | bool],
    scale: float,
    adaptive: bool,
) -> None:
    """Add eps to the tensors of one bucket, of which there are copies."""
    if not 0 < abs(scale) < math.inf:  # a norm of 0, inf or NaN, or rho = 0
        return
    masked = any(isinstance(mask, Tensor) for mask in m)
    if not masked and not adaptive and w[0].dtype == accumulation_dtype(w[0]):
        torch._foreach_add_(w, d, alpha=scale)  # makes nothing anew
        return
    for p, copy, direction, mask in zip(w, copies, d, m, strict=True):
        masks = [mask] if isinstance(mask, Tensor) else []
        for slabs in zip(*map(_slabs, [p, copy, direction, *masks]), strict=True):
            _add_slab_on_host(*slabs, scale=scale, adaptive=adaptive)


def _add_slab_on_host(
    w: Tensor, copy: Tensor, direction: Tensor, mask: Tensor | None = None, *, scale: float, adaptive: bool
) -> None:
    wide = accumulation_dtype(w)
    eps, factor = direction.to(wide), scale
    if adaptive:  # the copy's square: another tensor may share the memory of w
        eps = copy.to(wide).square().mul_(eps)
    if mask is not None:
        # Bits times 1 or 0: 0.0 * inf would be NaN, and torch.where takes five times as long. What is left out is
        # +0.0. With a factor below 0 it adds -0.0, and w + (-0.0) is w bit for bit, also for w = -0.0.
        eps, factor = eps.neg() if scale > 0 else eps.clone(), -abs(scale)
        eps.view(BITS[wide]).mul_(mask)
    if w.dtype == wide:
        w.add_(eps, alpha=factor)
    else:  # torch would round the factor
        w.copy_(w.to(wide).add_(eps, alpha=factor))


def _slabs(t: Tensor) -> Sequence[Tensor]:
    """Cut a tensor along its first dimension into pieces that are small, but large enough for all threads."""
    if t.numel() <= (size := SLAB * torch.get_num_threads()):
        return [t]
    return torch.split(t, max(1, size * len(t) // t.numel()))


def _add_on_device(w: list[Tensor], d: list[Tensor], m: list[Tensor | bool], scale: Tensor, adaptive: bool) -> None:
    """Add eps to the tensors of one bucket; their device decides whether to."""
    leave = scale / scale != 1  # a norm of 0, inf or NaN, or rho = 0
    wide = accumulation_dtype(w[0])
    fused = _can_be_fused(w, d) and not (adaptive and w[0].dtype != wide)
    masked = any(isinstance(mask, Tensor) for mask in m)
    eps = d
    if adaptive or masked or not fused or not _have_same_strides(w, d):
        flat, eps = _flat_copies(d, w[0].dtype if fused else wide, like=w)
        if adaptive:
            factors = converted(w, eps)
            torch._foreach_mul_(eps, factors)
            torch._foreach_mul_(eps, factors)
        if masked:  # selected, because 0 * inf is NaN; and w + (-0.0) is w bit for bit, also for w = -0.0
            torch.where(_flat_mask(m, w, flat), flat, -0.0 * scale, out=flat)
        if not fused:
            eps = _views(flat.mul_(scale).masked_fill_(leave, -0.0).to(w[0].dtype), w)
    if fused:
        _fused_add(w, eps, scale, leave)
    else:
        torch._foreach_add_(w, eps)


def _can_be_fused(w: list[Tensor], d: list[Tensor]) -> bool:
    dtype = w[0].dtype
    return dtype in FUSED.get(w[0].device.type, ()) and all(
        direction.dtype == dtype and direction.layout == torch.strided and _is_dense(p)
        for p, direction in zip(w, d, strict=True)
    )


def _have_same_strides(some: list[Tensor], others: list[Tensor]) -> bool:
    """Tell whether tensors lie in memory alike. Where a dimension has one entry its stride does not matter."""
    rows = [(a.shape, a.stride(), b.stride()) for a, b in zip(some, others, strict=True)]
    differ = [row for row in rows if row[1] != row[2]]
    return all(n == 1 or s == t for row in differ for n, s, t in zip(*row, strict=True))


def _fused_add(w: list[Tensor], d: list[Tensor], scale: Tensor, leave: Tensor, decay: float = 0.0) -> None:
    """Compute w += scale (d - decay w) in one pass over memory, or nothing where `leave` is true: SGD, uphill."""
    torch._fused_sgd_(
        w,
        d,
        [],
        weight_decay=decay,
        momentum=0.0,
        lr=scale,
        dampening=0.0,
        nesterov=False,
        maximize=True,
        is_first_step=False,
        grad_scale=None,
        found_inf=leave.float(),
    )
    torch.autograd.graph.increment_version(w)  # which that function does not


def _flat_mask(m: list[Tensor | bool], w: list[Tensor], flat: Tensor) -> Tensor:
    """Return the masks in one flat buffer."""
    keep = torch.ones_like(flat, dtype=torch.bool)
    pairs = [(k, mask) for k, mask in zip(_views(keep, w), m, strict=True) if isinstance(mask, Tensor)]
    torch._foreach_copy_([k for k, _ in pairs], [mask for _, mask in pairs])
    return keep


def _save_bucket(tensors: list[Tensor]) -> Saved:
    if _is_on_host(tensors[0]):
        return Saved(tensors, [t.clone() for t in tensors])
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
    starts = accumulate([t.numel() for t in like], initial=int(flat.storage_offset()))
    return [flat.as_strided(t.shape, _dense_strides(t), start) for t, start in zip(like, starts, strict=False)]


def _dense_strides(t: Tensor) -> tuple[int, ...]:
    """Return the strides torch gives to a dense copy of t: t's own if t is dense, so kernels can be fused."""
    return t.stride() if _is_dense(t) else torch.empty_like(t, device="meta").stride()


def _is_dense(t: Tensor) -> bool:
    return t.is_contiguous() or t.is_contiguous(memory_format=torch.channels_last)


def _buckets(entries: Iterable[tuple[Hashable, Tensor, int]]) -> Collection[list[int]]:
    """Group the indices of tensors that one kernel can treat: equal key, device and dtype."""
    buckets: dict[Hashable, list[int]] = {}
    for key, tensor, index in entries:
        buckets.setdefault((key, tensor.device, tensor.dtype), []).append(index)
    return buckets.values()
