"""A whole training step as one CUDA graph: what is captured is `opt.step(closure)` itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsam.masks.base import StepKind
from sparsam.sam import SAM
from sparsam.selection import Selection

WARM_UP = 3


class CapturedStep:
    """Takes steps like `opt.step(closure)`, from a CUDA graph wherever that is possible.

    The first steps run eagerly, as do those that make a mask; the graph is captured after them, and again if an update
    changes which tensors the mask is made of, if weights are frozen or freed, and after `load_state_dict()`. A mask
    with several kinds of steps has a graph for each kind. A step that draws random numbers cannot be captured (its two
    passes could not be made to draw the same ones): it stays eager, and `eager_because` says so.

    The closure must read its batch from tensors that stay where they are, and the learning rate and rho must be device
    tensors if they change.

    Args:
        opt: A :class:`SAM`, or any optimizer, whose step reads nothing on the host.
        closure: As for `opt.step`.
    """

    def __init__(self, opt: Optimizer, closure: Callable[[], Tensor]) -> None:
        self.opt, self.closure = opt, closure
        self.eager_because: str | None = None
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # of eager steps: not the default one
        self._taken: Counter[StepKind | None] = Counter()
        self._graphs: dict[StepKind | None, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._captured_for: tuple[Selection | None, object] = None, None
        if isinstance(opt, SAM):
            opt.captured = True

    def __call__(self) -> Tensor:
        """Take a step; return the loss, in a tensor that the next step may overwrite."""
        sam = self.opt if isinstance(self.opt, SAM) else None
        kind, selection = (sam.mask.kind(sam.steps), sam.selection) if sam else (None, None)
        self._taken[kind] += 1
        if self._taken[kind] <= WARM_UP or self.eager_because or (sam and sam.mask_is_due()):
            return self._eager()
        inputs = sam and (sam.reloads, [p.requires_grad for group in sam.param_groups for p in group["params"]])
        if selection is not self._captured_for[0] or inputs != self._captured_for[1]:
            self._graphs.clear()  # all of them: they share memory
            self._captured_for = selection, inputs
        if kind not in self._graphs:
            self._graphs[kind] = self._capture()
        graph, loss = self._graphs[kind]
        graph.replay()
        if sam:
            sam.steps += 1
        return loss

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

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Return a graph, and the tensor where it leaves the loss."""
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other, _ in self._graphs.values()), None)  # one step runs at a time
        steps = self.opt.steps if isinstance(self.opt, SAM) else 0
        # On a stream of its own: graphs of one stream share cuBLAS' workspace, and another run's may run beside it.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream):
            loss = self._step()
        if isinstance(self.opt, SAM):
            self.opt.steps = steps  # a capture records a step and takes none
        return graph, loss
