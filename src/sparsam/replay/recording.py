"""What calls of modules go through in the first pass of a replayed step: everything runs, and is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from sparsam.randomness import RngState, get_rng_state
from sparsam.replay.autograd_graph import leaf_of, node_of, tensors_in
from sparsam.replay.calls import Call


class Kept(NamedTuple):
    """A value of the first pass, and the versions of its tensors when it was made."""

    value: Any
    versions: list[int]

    @property
    def unchanged(self) -> bool:
        """Whether no tensor has been changed in place since."""
        return [t._version for t in tensors_in(self.value)] == self.versions


def keep(value: Any) -> Kept:
    """Keep a value with its versions."""
    return Kept(value, [t._version for t in tensors_in(value)])


class PastCall(NamedTuple):
    """A module that was called before the cut: what it returned, and the random state that it left."""

    name: str
    output: Kept
    random: RngState
    differentiable: bool  # whether gradients were on, so that its parameters are in the graph


class Before(NamedTuple):
    """The prefix, on one path to the cut."""

    parameters: frozenset[Tensor]
    trained_after: bool  # whether any other parameter of the model is trained


@dataclass
class Recording:
    """What a first pass leaves for the second."""

    cut: str
    devices: frozenset[torch.device]
    trained: tuple[bool, ...]  # which parameters of the model are
    open: bool = False  # whether the gradient goes past the cut: the second pass cannot start there
    obstacle: str = ""  # why it is open, or why the second pass cannot start at the cut
    arguments: Kept | None = None  # of the outermost call: the batch
    forwards: int = 0
    calls: list[PastCall] = field(default_factory=list)
    suffix: set[str] = field(default_factory=set)  # modules beside the cut that were called after it
    input: Kept | None = None  # args and kwargs of the module at the cut
    before: Before | None = None
    random: RngState = field(default_factory=dict)  # at the cut
    crossed: list[bool] = field(default_factory=list)  # not empty if a gradient arrived before the cut
    outputs: list[Tensor] = field(default_factory=list)  # of the model
    hooks: list[RemovableHandle] = field(default_factory=list)  # that notice such a gradient

    @property
    def path(self) -> tuple[Any, ...]:
        """The cut, the modules that were called before it, and what is trained."""
        return (self.cut, *(call.name for call in self.calls), self.trained)

    def stay_open(self, obstacle: str) -> None:
        """Let the gradient go past the cut, and say why."""
        self.open, self.obstacle = True, self.obstacle or obstacle


class Recorder:
    """The first pass: notes what is called before the cut, and detaches the cut's input.

    Args:
        recording: Where to.
        look: Tells what lies before the cut that was just reached.
        needs_gradient: Tells whether the suffix must see an input that requires a gradient.
    """

    def __init__(
        self, recording: Recording, look: Callable[[Recording], Before], needs_gradient: Callable[[Recording], bool]
    ) -> None:
        self.recording, self.look, self.needs_gradient = recording, look, needs_gradient
        self._detach: Callable[[Tensor], Tensor] = Tensor.detach
        self._watched: set[Node] = set()

    def model(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the whole model."""
        self.recording.forwards += 1
        self._enter(args, kwargs)
        output = call(*args, **kwargs)
        self.recording.outputs += tensors_in(output)
        return output

    def before(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module that may lie before the cut."""
        recording = self.recording
        if recording.input is not None:
            recording.suffix.add(name)
            return call(*args, **kwargs)
        self._enter(args, kwargs)
        output = call(*args, **kwargs)
        if recording.input is None:  # a module that holds the cut in a second place is not before it
            self._watch(tensors_in(output))
            random, differentiable = get_rng_state(recording.devices), torch.is_grad_enabled()
            recording.calls.append(PastCall(name, keep(output), random, differentiable))
        return output

    def at_cut(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module at the cut."""
        recording, again = self.recording, in_backward()
        self._enter(args, kwargs)
        if recording.input is None:
            recording.input, recording.random = keep((args, kwargs)), get_rng_state(recording.devices)
            self._reach()
        elif not same_tensors(recording.input.value, (args, kwargs)):
            if not again:
                return call(*args, **kwargs)  # the module's second turn
            recording.stay_open(f"{recording.cut!r} lies inside a part that is checkpointed; cut at that part's input")
            args, kwargs = tree_map_only(Tensor, self._detach, (args, kwargs))  # as when it was called first
        if not recording.open:
            args, kwargs = tree_map_only(Tensor, self._detach, (args, kwargs))
        return call(*args, **kwargs)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the batch."""
        if self.recording.arguments is None:
            self.recording.arguments = keep((args, kwargs))
            if any(t.requires_grad and t.is_leaf for t in tensors_in(args, kwargs)):
                self.recording.stay_open("the batch requires a gradient, which has to go all the way")

    def _reach(self) -> None:
        recording = self.recording
        assert recording.input is not None
        inputs = tensors_in(recording.input.value)
        if not inputs:
            recording.stay_open(f"the input of {recording.cut!r} holds no tensor that can be found")
            return
        recording.before = self.look(recording)
        if not torch.is_grad_enabled():
            recording.stay_open(
                f"gradients were off where {recording.cut!r} was called (checkpointing? pass use_reentrant=False)"
            )
        if not recording.before.trained_after:
            recording.stay_open(f"nothing after {recording.cut!r} is trained")
        if self.needs_gradient(recording):
            self._detach = end_of_gradient
        self._watch(inputs, deep=True)

    def _watch(self, tensors: list[Tensor], *, deep: bool = False) -> None:
        """Notice gradients that arrive before the cut; deep: also at what code between the modules has made."""
        if self.recording.open:
            return
        crossed = self.recording.crossed  # not the recording: a node that held it would never be freed
        todo = [node_of(t) for t in tensors]
        while todo:
            node = todo.pop()
            if node is None or node in self._watched or leaf_of(node) is not None:
                continue
            self._watched.add(node)
            self.recording.hooks.append(node.register_prehook(lambda _: crossed.append(True)))
            if deep:
                todo += [target for target, _ in node.next_functions]


class EndOfGradient(torch.autograd.Function):
    """Passes a tensor on, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        """Return the values."""
        return t.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        """Return nothing."""


def end_of_gradient(t: Tensor) -> Tensor:
    """Detach a tensor, but let what is computed of it see an input that requires a gradient."""
    detached = t.detach()
    return EndOfGradient.apply(detached.requires_grad_()) if t.requires_grad else detached  # type: ignore[no-untyped-call]


def in_backward() -> bool:
    """Tell whether autograd is at work: a module that is called then is computed again, by checkpointing."""
    return torch._C._current_graph_task_id() != -1


def same_tensors(one: Any, other: Any) -> bool:
    """Tell whether two values hold the same tensors, by where they lie."""
    a, b = tensors_in(one), tensors_in(other)
    return len(a) == len(b) and all(
        s is t or (s.data_ptr() == t.data_ptr() and s.shape == t.shape) for s, t in zip(a, b, strict=True)
    )
