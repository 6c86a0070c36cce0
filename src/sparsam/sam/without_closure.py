"""The passes of a step for whoever calls ``optimizer.step()`` without a closure: a trainer, or a gradient scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsam.sam.optimizer import SAM


def run_passes(opt: SAM, backward: Callable[[], Any], scale: Tensor | None = None) -> Any:
    r"""Leave in `.grad` what the coming ``opt.step()`` takes; return what the first call of `backward` returned.

    The gradient is :math:`\nabla f(w + \epsilon)`. A sharpness-aware step calls `backward` twice, at w and at
    w + eps. A base step calls it once at w, a step of one pass once at w + eps.

    Args:
        opt: The optimizer.
        backward: Forward and backward of the whole batch, which adds to the gradients and does not clear them.
        scale: What the loss is multiplied with, as by a GradScaler.
    """
    opt.zero_grad()  # the step starts here, whatever one that was skipped has left
    if not opt.needs_second_pass:
        with opt.perturbed():
            return backward()
    with opt._replicas.first_pass():  # perturbation="local" does not synchronise it
        result = backward()
    with opt.perturbed(scale=scale):
        opt.zero_grad()
        backward()
    return result


def current_scale(scaler: torch.amp.GradScaler | None, device: torch.device) -> Tensor | None:
    """Return what a scaler multiplies the loss with, on the device: ``get_scale()`` would wait for it."""
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler.scale(torch.ones((), device=device))
