"""Which of torch's kernels compute second derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def kernels(precision: str = "ieee") -> Iterator[None]:
    """Choose how a GPU rounds in convolutions and matrix products.

    Args:
        precision: "ieee", or "tf32", torch's default for convolutions. TF32 keeps three digits, so H v is linear in v
            to three digits only.
    """
    cudnn: Any = torch.backends.cudnn
    backends = [cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = precision
        yield
    finally:
        for backend, old in zip(backends, before, strict=True):
            backend.fp32_precision = old


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Run a model without compiled code and fused attention, which have no second derivative."""
    compiled = any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in model.modules())
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext(), sdpa_kernel(SDPBackend.MATH):
        yield
