"""Replay: what lies before the first perturbed layer is not computed twice.

Let every perturbed weight lie behind a *cut*, the input of one module. Everything before the cut then has the same
weights, inputs and random numbers in both passes of a SAM step, so its activations and its graph can be kept:

====== ============================== =====================================================
pass   forward                        backward
====== ============================== =====================================================
first  everything                     only behind the cut, whose input is detached
second only behind the cut, from the  behind the cut through the new graph, and on through
       input that the first recorded  the graph that the first pass left before the cut
====== ============================== =====================================================

The gradient is that of the plain masked step, bit for bit; the cost is 1 + f, f being the share of the step that lies
behind the cut. All this happens inside an ordinary closure: in both passes calls of the modules along the way go
through this file (:mod:`sparsam.interception`), and between steps the model carries no trace of it.

In the second pass a module before the cut returns what it returned in the first, unless that has been changed in
place since (an in-place ReLU after a normalisation): then a tensor of NaN, for nobody may need its values. The module
at the cut is called with the recorded input.

Whatever does not fit is computed in full in the second pass: exact all the same, and one warning says why.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsam.autograd_graph import leaf_of, nodes_behind, tensors_in
from sparsam.interception import intercepted, is_compiled
from sparsam.recording import Recorder, Recording, Reuse


class Replay:
    """Takes the two passes of a step through a model, the second from a cut.

    Args:
        model: Any module whose parts are called by Python code. Of a DistributedDataParallel, its inside.
    """

    def __init__(self, model: nn.Module) -> None:
        self.wrapper, self.model = model, bare(model)
        self.recording: Recording | None = None
        self._seen: dict[tuple[str, ...], _Before] = {}  # by path
        self._places: dict[str, _Places] = {}  # by cut
        self._equal_copies = False  # whether the closure makes its batch anew in each call, with the same values
        self._off: str | None = None  # why replay is not even tried
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        # Identities of parameters and whatever a step left do not travel.
        return {**self.__dict__, "recording": None, "_seen": {}, "_places": {}}

    # ------------------------------------------------------------------------------------------ first pass

    @contextmanager
    def first_pass(self, cut: str, *, whole_gradient: bool = False) -> Iterator[Recording]:
        """Record the block's forward pass, and let its backward pass end at the cut.

        Args:
            cut: The name of the module whose input is the cut.
            whole_gradient: Let the gradient pass the cut: the second pass will have to be run in full.
        """
        recording = Recording(cut, frozenset(p.device for p in self.model.parameters()), whole_gradient)
        self.recording = recording
        recorder = Recorder(recording)
        sync = self.wrapper.no_sync() if isinstance(self.wrapper, DistributedDataParallel) else nullcontext()
        with sync, self._intercepted(cut, recorder):
            yield recording

    def parameters_before(self) -> frozenset[Tensor] | None:
        """Return the parameters that the cut's input depends on; None if the first pass did not come to the cut."""
        before = self._before()
        return None if before is None else before.parameters

    def _before(self) -> _Before | None:
        recording = self.recording
        if recording is None or recording.input is None:
            return None
        if recording.path in self._seen:
            return self._seen[recording.path]
        nodes = nodes_behind(tensors_in(recording.input.value))
        parameters = frozenset(p for p in map(leaf_of, nodes) if p is not None)
        if recording.whole_gradient:  # with the cut open, everything touches
            return _Before(parameters, crossed=True)
        crossed = any(leaf_of(node) is None for node in nodes & nodes_behind(recording.outputs))
        return self._seen.setdefault(recording.path, _Before(parameters, crossed))

    # ----------------------------------------------------------------------------------------- second pass

    @contextmanager
    def second_pass(self, perturbed: Iterable[Tensor]) -> Iterator[None]:
        """Let the block's forward pass start at the cut, as far as that gives what the whole pass would.

        Args:
            perturbed: The parameters that have changed since the first pass.
        """
        recording = self.recording
        reason = self._off or self._obstacle(perturbed)
        self.recording = None
        if recording is None or reason is not None:
            del recording  # and the graph that it holds
            self._warn(reason)
            yield
            return
        reuse = Reuse(recording, self._equal_copies)
        with self._intercepted(recording.cut, reuse):
            yield
        self._equal_copies = reuse.equal_copies
        if reuse.another_batch:
            self._off = reuse.stopped
        self._warn(reuse.stopped)

    def _obstacle(self, perturbed: Iterable[Tensor]) -> str | None:
        """Say why the second pass cannot start at the cut; "" if that is as it should be."""
        recording, before = self.recording, self._before()
        if recording is None or recording.whole_gradient:
            return ""
        cut = recording.cut
        if recording.input is None or before is None:
            return (
                f"the first pass did not call {cut!r} where it can be seen (is the model compiled as a whole? compile "
                f"its blocks instead)"
            )
        if recording.forwards > 1:
            return f"the closure ran the model {recording.forwards} times; give it one batch a step"
        if not recording.differentiable:
            return f"gradients were off where {cut!r} was called (checkpointing? pass use_reentrant=False)"
        if not recording.input.unchanged:
            return f"the input of {cut!r} is changed in place behind the cut"
        if before.crossed:
            return f"what is computed before {cut!r} is used behind it by another way than its input"
        if not before.parameters.isdisjoint(perturbed):
            return f"the first pass took another way to {cut!r}, and a perturbed weight lies on it"
        return None

    # --------------------------------------------------------------------------------------------- helpers

    def _intercepted(self, cut: str, calls: Recorder | Reuse) -> AbstractContextManager[None]:
        places = self._places.get(cut)
        if places is None or self.model.get_submodule(cut) is not places.cut:
            places = self._places[cut] = _places(self.model, cut)
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
            warnings.warn(f"the second pass is computed in full, exact but slower: {reason}", stacklevel=6)

    def warn_two_step(self) -> None:
        """Say that only step(closure) saves time."""
        self._warn("only step(closure) can start it at the cut, first_step() and perturbed() cannot")


class _Before(NamedTuple):
    """What lies before a cut."""

    parameters: frozenset[Tensor]
    crossed: bool  # whether the rest of the graph touches it elsewhere than at the cut


# ------------------------------------------------------------------------------------------------------ modules


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside a DistributedDataParallel, or a compiled one's original."""
    for inside in ("module", "_orig_mod"):
        if inside in model._modules and (inside == "_orig_mod" or isinstance(model, DistributedDataParallel)):
            return bare(model.get_submodule(inside))
    return model


def get_module(model: nn.Module, name: str) -> nn.Module:
    """Return a module by its dotted name; an unknown name gives an error with the closest ones."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name not in modules:
        close = difflib.get_close_matches(name, modules, 3) or [n for n in modules if n][:8]
        raise ValueError(f"cut must be the name of a module, such as {', '.join(map(repr, close))}, but is {name!r}")
    return modules[name]


def parameters_before_by_order(model: nn.Module, cut: str) -> frozenset[Tensor]:
    """Return the parameters that are registered before a module and not in it: a guess that needs no forward pass."""
    inside = set(get_module(model, cut).parameters())
    before = []
    for p in model.parameters():
        if p in inside:
            break
        before.append(p)
    return frozenset(before)


class _Places(NamedTuple):
    """Where a cut lies in a model: modules, with their names."""

    around: list[tuple[str, nn.Module]]
    before: list[tuple[str, nn.Module]]  # the outermost ones that code around the cut can call, also behind it
    cut: nn.Module


def _places(model: nn.Module, cut: str) -> _Places:
    places = _Places([], [], get_module(model, cut))
    todo = [("", model)]
    while todo:
        name, module = todo.pop()
        places.around.append((name, module))
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            if child is places.cut:
                continue
            if f"{cut}.".startswith(f"{full}.") or type(child) in (nn.ModuleList, nn.ModuleDict):
                todo.append((full, child))
            else:
                places.before.append((full, child))
    return places
