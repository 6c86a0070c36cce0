"""Replay: what lies before the cut is not computed twice.

A *cut* is the input of one module. What comes before it is the *prefix*, what follows it the *suffix*. If every
perturbed weight lies in the suffix, then the prefix has the same weights, inputs and random numbers in both passes of a
SAM step. So its activations and its graph can be kept:

====== ================================== ======================================================
pass   forward                            backward
====== ================================== ======================================================
first  everything                         the suffix only: the cut is detached
second the suffix only, from the recorded the suffix through its new graph, then the prefix
       input                              through the graph that the first pass left
====== ================================== ======================================================

The gradient is that of the plain masked step, bit for bit. The cost is 1 + f, with f the suffix' fraction of a pass.
All this happens inside an ordinary closure: in both passes calls of modules go through this package
(:mod:`sparsam.replay.calls`), and between steps the model is as it was.

In the second pass a module of the prefix returns what it returned in the first. If that has been changed in place since
(by an in-place ReLU after a normalisation, say), it returns a placeholder of NaN: mostly nobody reads its values. The
module at the cut is called with the recorded input.

Whatever does not fit is computed in full in the second pass: exact all the same, and one warning says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel

from sparsam.errors import warn
from sparsam.passes import is_compiled
from sparsam.replay.autograd_graph import leaf_of, reachable_nodes, tensors_in
from sparsam.replay.calls import intercepted
from sparsam.replay.modules import Places, places_of, unwrap
from sparsam.replay.recording import Before, EndOfGradient, Recorder, Recording
from sparsam.replay.reuse import Reuse

MAX_PATHS = 64  # to remember; a model with random depth has more


class Replay:
    """Takes the two passes of a step through a model, the second from a cut.

    Args:
        model: Any module whose parts are called by Python code. Of a DistributedDataParallel, its inside.
        cut: The name of the module whose input is the cut.
    """

    def __init__(self, model: nn.Module, cut: str) -> None:
        self.wrapper, self.model, self.cut = model, unwrap(model), cut
        self.recording: Recording | None = None
        self._paths: dict[tuple[Any, ...], _Path] = {}  # that first passes took
        self._places: Places | None = None
        self._ahead: list[tuple[str, nn.Module]] = []  # modules before the cut, from the next step on
        self.check_placeholders = False  # whether a placeholder may have been read, on a path where it never was before
        self._trusted: set[tuple[Any, ...]] = set()  # paths on which that was found to be harmless
        self._equal_copies = False  # whether the closure makes its batch anew in each call, with the same values
        self._off: str | None = None  # why replay is not even tried
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        # Identities of parameters and whatever a step left do not travel.
        return {**self.__dict__, "recording": None, "_paths": {}, "_places": None, "_ahead": [], "_trusted": set()}

    # ------------------------------------------------------------------------------------------ first pass

    @contextmanager
    def first_pass(self) -> Iterator[Recording]:
        """Record the block's forward pass, and let its backward pass end at the cut."""
        cut = self.cut
        if self._ahead and self._places:
            self._places = self._places._replace(before=self._ahead)
        self._ahead = []
        params = list(self.model.parameters())
        devices, trained = frozenset(p.device for p in params), tuple(p.requires_grad for p in params)
        recording = Recording(cut, devices, trained)
        recorder = Recorder(recording, self._look, self._needs_gradient)
        sync = self.wrapper.no_sync() if isinstance(self.wrapper, DistributedDataParallel) else nullcontext()
        with sync, self._intercepted(recorder):
            yield recording
        for hook in recording.hooks:
            hook.remove()
        self._learn(recording)
        recording.outputs.clear()
        self.recording = recording

    def parameters_before(self) -> frozenset[Tensor] | None:
        """Return the parameters that lie before the cut; None if the first pass was not seen to come to it."""
        before = self.recording.before if self.recording else None
        return None if before is None else before.parameters

    def skipped_modules(self) -> set[nn.Module]:
        """Return the modules that the second pass does not call."""
        recording = self.recording
        if recording is None or recording.open:
            return set()
        return self._inside({call.name for call in recording.calls}) - self._inside({recording.cut, *recording.suffix})

    def _inside(self, names: set[str]) -> set[nn.Module]:
        return {module for name in names for module in self.model.get_submodule(name).modules()}

    def _look(self, recording: Recording) -> Before:
        """Find out what lies before the cut that was just reached."""
        if recording.path in self._paths:
            return self._paths[recording.path].before
        assert recording.input is not None
        parameters = {leaf_of(node) for node in reachable_nodes(tensors_in(recording.input.value))}
        for call in recording.calls:  # of these nothing is in the graph, but it may be some day
            inside = self.model.get_submodule(call.name).parameters()
            parameters |= {p for p in inside if not p.requires_grad or not call.differentiable}
        before = frozenset(p for p in parameters if p is not None)
        return Before(before, any(p.requires_grad and p not in before for p in self.model.parameters()))

    def _needs_gradient(self, recording: Recording) -> bool:
        """Tell whether the detached input must still require a gradient: reentrant checkpointing asks for it.

        It costs the gradient of that input, so it is done once on every path, to see what follows the cut.
        """
        return recording.path not in self._paths or self._paths[recording.path].custom

    def _learn(self, recording: Recording) -> None:
        """Keep what the first pass on a new path showed."""
        if recording.before is None or recording.open or recording.path in self._paths:
            return
        if len(self._paths) >= MAX_PATHS:
            self._paths.clear()
        nodes = reachable_nodes(recording.outputs)
        own = EndOfGradient.__name__
        custom = any(isinstance(node, BackwardCFunction) and not node.name().startswith(own) for node in nodes)
        self._paths[recording.path] = _Path(recording.before, custom or not nodes)
        called = {call.name for call in recording.calls} | recording.suffix
        self._ahead = []
        assert self._places is not None
        for name, module in self._places.before:
            if name in called or recording.before.parameters.isdisjoint(module.parameters()):
                self._ahead.append((name, module))
            else:  # it lies before the cut and is not called: its parts are
                self._ahead += [(f"{name}.{child}", part) for child, part in module.named_children()]

    # ----------------------------------------------------------------------------------------- second pass

    @contextmanager
    def second_pass(self, perturbed: Iterable[Tensor], in_full: Callable[[], None]) -> Iterator[None]:
        """Let the block's forward pass start at the cut, as far as that gives what the whole pass would.

        Args:
            perturbed: The parameters that have changed since the first pass.
            in_full: Called before what lies before the cut is computed again, if it must be.
        """
        recording, self.recording = self.recording, None
        if recording is None:
            yield
            return
        reason = self._off or self._obstacle(recording, perturbed)
        if reason or recording.open:
            del recording  # and the graph that it holds
            in_full()
            self._warn(reason)
            yield
            return
        reuse = Reuse(recording, in_full, self._equal_copies)
        with self._intercepted(reuse):
            yield
        self._equal_copies = reuse.equal_copies
        self.check_placeholders = reuse.read_placeholder and recording.path not in self._trusted
        self._trusted.add(recording.path)
        if reuse.another_batch:
            self._off = reuse.stopped
        self._warn(reuse.stopped)

    def _obstacle(self, recording: Recording, perturbed: Iterable[Tensor]) -> str:
        """Say why the second pass cannot start at the cut."""
        cut = recording.cut
        if recording.obstacle or recording.open:
            return recording.obstacle
        if recording.input is None or recording.before is None:
            return (
                f"the first pass did not call {cut!r} where it can be seen (is the model compiled as a whole? compile "
                f"its blocks instead)"
            )
        if recording.forwards > 1:
            return f"the closure ran the model {recording.forwards} times, and only a single forward pass is replayed"
        if not recording.input.unchanged:
            return f"the input of {cut!r} is changed in place after the cut"
        for past, following in zip_longest(recording.calls, recording.calls[1:]):
            if past.output.unchanged or (following is not None and following.output.value is past.output.value):
                continue
            if not all(t.requires_grad for t in tensors_in(past.output.value)):
                return f"the output of {past.name!r}, which has no gradient, is changed in place after it"
        if recording.crossed:
            return f"what is computed before {cut!r} is used after it, and not through its input"
        if not recording.before.parameters.isdisjoint(perturbed):
            return f"the first pass took another path to {cut!r}, and a perturbed weight lies on it"
        return ""

    # --------------------------------------------------------------------------------------------- helpers

    def _intercepted(self, calls: Recorder | Reuse) -> AbstractContextManager[None]:
        places = self._places
        if places is None or self.model.get_submodule(self.cut) is not places.cut:
            places = self._places = places_of(self.model, self.cut)
        compiled = [name for name, module in [("", self.wrapper), *places.around] if is_compiled(module)]
        if compiled:
            what = repr(compiled[0]) if compiled[0] else "the model"
            self._off = f"{what} is compiled as a whole; compile its blocks instead"
        if self._off:
            return nullcontext()
        return intercepted(
            {
                self.model: calls.model,
                **{module: partial(calls.before, name) for name, module in places.before},
                places.cut: calls.at_cut,
            }
        )

    def _warn(self, reason: str | None) -> None:
        if reason and not self._warned:
            self._warned = True
            warn(f"the second pass is computed in full, exact but slower: {reason}")

    def give_up(self, reason: str) -> None:
        """Compute every second pass in full from now on."""
        self._off = reason
        self._warn(reason)

    def warn_two_step(self) -> None:
        """Say that only step(closure) saves time."""
        self._warn(
            "only step(closure) can start it at the cut, first_step() and perturbed() cannot (nor can they see which "
            "parameters follow the cut: the order in which modules were registered has to do)"
        )


class _Path(NamedTuple):
    """What is known of one path to the cut."""

    before: Before
    custom: bool  # whether the graph after the cut holds functions that torch does not know
