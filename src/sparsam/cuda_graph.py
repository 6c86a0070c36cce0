"""A whole training step as one CUDA graph: what is captured is `opt.step(closure)` itself."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsam.ascents import Ascent
from sparsam.distributed.shards import any_dtensor
from sparsam.errors import CaptureError, UserRuntimeError
from sparsam.sam import SAM
from sparsam.selection import Selection
from sparsam.share import Rows

WARM_UP = 3
ATTEMPTS = 3  # to capture a model that takes one path to a cut, then another


class _Graph(NamedTuple):
    """A captured step."""

    graph: torch.cuda.CUDAGraph
    loss: Tensor  # where it leaves the loss
    moved: Selection | None  # what it perturbs


class CapturedStep:
    """Takes steps like `opt.step(closure)`, from a CUDA graph wherever that is possible.

    The first steps run eagerly, as do those that make a mask or prove a path to a cut. Then the graph is captured. It
    is captured again if an update changes which tensors the mask is made of, if weights are frozen or freed, and after
    `load_state_dict()`. A schedule with several ascents has a graph for each, and one for base steps. A step that draws
    random numbers cannot be captured, because its two passes could not be made to draw the same ones: it stays eager,
    and `eager_because` says so. So does a model that takes one path to a cut, then another.

    The closure must read its batch from tensors that stay where they are, and the learning rate and rho must be device
    tensors if they change.

    Args:
        opt: A :class:`SAM`, or any optimizer, whose step reads nothing on the host.
        closure: As for `opt.step`.
    """

    def __init__(self, opt: Optimizer, closure: Callable[[], Tensor] | Callable[[Rows], Tensor]) -> None:
        if any_dtensor(p for group in opt.param_groups for p in group["params"]):
            raise UserRuntimeError("CapturedStep needs whole parameters, but some are sharded; call opt.step(closure)")
        if not torch.cuda.is_available():
            raise UserRuntimeError("CapturedStep needs a CUDA device, but there is none; call opt.step(closure)")
        self.opt, self.closure = opt, closure
        self.eager_because: str | None = None
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # of eager steps: not the default one
        self._taken: Counter[Ascent | None] = Counter()
        self._graphs: dict[Ascent | None, _Graph] = {}
        self._selection: Selection | None = None  # what the graphs read: the mask ...
        self._inputs: object = None  # ... and plain values
        self._refused = 0  # captures that met a new path

    def __call__(self) -> Tensor:
        """Take a step; return the loss, in a tensor that the next step may overwrite."""
        sam = self.opt if isinstance(self.opt, SAM) else None
        ascent = sam._coming.ascent(sam.steps) if sam else None
        selection, trained = sam._perturber.graph_inputs(sam._params()) if sam else (None, None)
        inputs = sam and sam._reloads, trained
        if inputs != self._inputs:
            self._taken.clear()  # what is trained decides a path through the model, which eager steps prove
            self._graphs.clear()
            self._inputs = inputs
        self._taken[ascent] += 1
        if self._taken[ascent] <= WARM_UP or self.eager_because or (sam and self._makes_mask(sam)):
            return self._eager()
        if selection is not self._selection:
            self._graphs.clear()  # all of them: they share memory
            self._selection = selection
        captured = self._graphs.get(ascent) or self._capture()
        if captured is None:
            self._taken[ascent] = 1
            return self._eager()
        self._graphs[ascent] = captured
        captured.graph.replay()
        if sam:
            sam.steps += 1
            sam._perturber.moved = captured.moved
        return captured.loss

    def _makes_mask(self, sam: SAM) -> bool:
        return sam.needs_second_pass and sam._perturber.mask_is_due(sam._params(), sam.steps)

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

    def _capture(self) -> _Graph | None:
        """Record a step, which takes none; None if the step takes a path that eager steps have to prove."""
        sam = self.opt if isinstance(self.opt, SAM) else None
        graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in self._graphs.values()), None)  # one step runs at a time
        steps = sam.steps if sam else 0
        params = [p for group in self.opt.param_groups for p in group["params"]]
        grads = [p.grad for p in params]
        try:
            # On a stream of its own: graphs of one stream share cuBLAS' workspace, and another run's may run beside it.
            with _gc_disabled(), torch.cuda.graph(graph, pool=pool, stream=self._stream):
                loss = self._step()
        except CaptureError:
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad  # those of the graph were never computed
            if sam:
                sam._used_gradients.note(params)  # a closure that fills them with zeros has made them look new
            self._refused += 1
            if self._refused == ATTEMPTS:
                self.eager_because = "the model takes one path to the cut, then another"
            return None
        if sam:
            sam.steps = steps
        return _Graph(graph, loss, sam._perturber.moved if sam else None)


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Freeing an old CUDA graph during a capture ends the capture, so Python's collector is off in this block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
