"""A whole training step as one CUDA graph: what is captured is `opt.step(closure)` itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsam.optimizer import SAM

WARM_UP = 3


class CapturedStep:
    """Takes steps like `opt.step(closure)`, from a CUDA graph wherever that is possible.

    The first steps run eagerly, as do those that make a mask; the graph is captured after them, and again if an update
    changes which tensors the mask is made of. A step that draws random numbers cannot be captured (its two passes could
    not be made to draw the same ones): it stays eager, and `eager_because` says so.

    The closure must read its batch from tensors that stay where they are, and the learning rate and rho must be device
    tensors if they change.

    Args:
        opt: A :class:`SAM`, or any optimizer, whose step reads nothing on the host.
        closure: As for `opt.step`.
    """

    def __init__(self, opt: Optimizer, closure: Callable[[], Tensor]) -> None:
        self.opt, self.closure = opt, closure
        self.eager_because: str | None = None
        self._taken = 0
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # of eager steps: not the default one
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: Any = None
        self._captured_for: object = None

    def __call__(self) -> Tensor:
        """Take a step; return the loss, in a tensor that the next step may overwrite."""
        self._taken += 1
        sam = self.opt if isinstance(self.opt, SAM) else None
        if self._taken <= WARM_UP or self.eager_because or (sam and sam.mask_is_due()):
            return self._eager()
        selection = sam.selection if sam else None
        if self._graph is None or selection is not self._captured_for:
            self._capture()
            self._captured_for = selection
        assert self._graph is not None
        self._graph.replay()
        if sam:
            sam.steps += 1
        return self._loss  # type: ignore[no-any-return]

    def _eager(self) -> Tensor:
        before = torch.get_rng_state(), torch.cuda.get_rng_state()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._step()
        torch.cuda.current_stream().wait_stream(self._stream)
        after = torch.get_rng_state(), torch.cuda.get_rng_state()
        if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            self.eager_because = "the model draws random numbers"
        return loss

    def _step(self) -> Tensor:
        """Take a step; a loss that kept its graph would tie autograd to the stream that it was made on."""
        loss: Tensor = self.opt.step(self.closure)  # type: ignore[assignment, arg-type]
        return loss.detach()

    def _capture(self) -> None:
        self._graph = None  # frees the memory of the one before
        graph = torch.cuda.CUDAGraph()
        steps = self.opt.steps if isinstance(self.opt, SAM) else 0
        with torch.cuda.graph(graph):
            self._loss = self._step()
        if isinstance(self.opt, SAM):
            self.opt.steps = steps  # a capture records a step and takes none
        self._graph = graph
