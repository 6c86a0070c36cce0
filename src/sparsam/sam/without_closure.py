"""The passes of a step for whoever calls ``optimizer.step()`` without a closure: a trainer, or a gradient scaler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsam.sam.optimizer import SAM
from sparsam.share import WHOLE, Rows, fraction, mean_loss, on_rows, split, weights
from sparsam.share import scale as scale_gradients


def run_passes(opt: SAM, backward: Callable[..., Any], scale: Tensor | None = None) -> Any:
    r"""Leave in `.grad` what the coming ``opt.step()`` takes; return what the first call of `backward` returned.

    The gradient is :math:`\nabla f(w + \epsilon)`. A sharpness-aware step calls `backward` twice, at w and at
    w + eps. A base step calls it once at w, a step of one pass once at w + eps. If the passes see a share of the batch,
    `backward` takes the rows that a call is for, is called a third time, for the rest at w, and the result is the loss
    of the whole batch.

    Args:
        opt: The optimizer.
        backward: Forward and backward of the whole batch, which adds to the gradients and does not clear them.
        scale: What the loss is multiplied with, as by a GradScaler.
    """
    opt.zero_grad()  # the step starts here, whatever one that was skipped has left
    if opt.share < 1:
        if opt.needs_second_pass:
            return _run_on_share(opt, backward, scale)
        backward = partial(backward, WHOLE)
    perturbed = partial(opt._perturbed, opt._coming.ascent(opt.steps))
    if not opt.needs_second_pass:
        with perturbed():
            return backward()
    with opt._replicas.first_pass():  # perturbation="local" does not synchronise it
        result = backward()
    with perturbed(scale=scale):
        opt.zero_grad()
        backward()
    return result


def _run_on_share(opt: SAM, backward: Callable[[Rows], Any], scale: Tensor | None) -> Any:
    opt._replicas.check_uneven("a share of the batch")
    params = [p for group in opt.param_groups for p in group["params"]]
    share, rest = split(opt.share)
    with opt._replicas.first_pass():
        of_share = on_rows(backward, share)()
    if share.accumulates:
        scale_gradients(params, 1 / fraction(share))  # to their mean, for ascents that remember it
    with opt._perturbed(opt._coming.ascent(opt.steps), scale=scale), opt._replicas.unsynchronised():
        opt.zero_grad()
        on_rows(backward, share)()
    loss = of_share
    if fraction(share) < 1:
        by_share, by_rest = weights(share, params)
        scale_gradients(params, by_share / by_rest)
        with opt._replicas.unsynchronised():
            of_rest = on_rows(backward, rest, like=share)()  # which adds to the gradient of the share
        scale_gradients(params, by_rest)
        loss = mean_loss(of_share, of_rest, *weights(share))
    opt._replicas.average_gradients(params)  # after each rank has weighed its own rows
    return loss


def current_scale(scaler: torch.amp.GradScaler | None, device: torch.device) -> Tensor | None:
    """Return what a scaler multiplies the loss with, on the device: ``get_scale()`` would wait for it."""
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler.scale(torch.ones((), device=device))
