"""What calls of modules go through in the first pass of a replayed step: everything runs, and is recorded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from sparsam.passes import version_of
from sparsam.randomness import RngState, get_rng_state, same_rng_state
from sparsam.replay.autograd_graph import (
    leaf_of,
    leaves_in,
    map_tensors,
    node_of,
    parameters_of,
    reachable_nodes,
    tensors_in,
)
from sparsam.replay.calls import Call

PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class Kept(NamedTuple):
    """A value of the first pass, and the versions of its tensors when it was made."""

    value: Any
    versions: list[int]

    @property
    def unchanged(self) -> bool:
        """Whether no tensor has been changed in place since."""
        return _versions(tensors_in(self.value)) == self.versions


def keep(value: Any) -> Kept:
    """Keep a value with its versions."""
    return Kept(value, _versions(tensors_in(value)))


def _versions(tensors: list[Tensor]) -> list[int]:
    return [version_of(t) for t in tensors]


class PastCall(NamedTuple):
    """A module that was called before the cut: with what, what it returned, and the random state that it left.

    Of a model that draws no random numbers before the cut no states are kept.
    """

    name: str
    arguments: tuple[Any, ...]
    output: Kept
    random: RngState


class Before(NamedTuple):
    """The prefix, on one path to the cut."""

    parameters: frozenset[Tensor]
    trained_after: bool  # whether any other parameter of the model is trained


@dataclass
class Path:
    """What is known of one path to the cut."""

    before: Before
    custom: bool = False  # whether the graph after the cut holds functions that torch does not know
    moved: set[Any] = field(default_factory=set)  # buffers that first passes on it have moved
    uncleared: set[Tensor] = field(default_factory=set)  # parameters that had gradients where the model was called
    radius: float = 0.0  # the largest rho at which it was proven
    proven: int = 0  # 1: that the first pass may end at the cut; 2: that the second may start there


@dataclass
class Recording:
    """What a first pass leaves for the second."""

    cut: str
    devices: frozenset[torch.device]
    model: Hashable  # which parameters are trained, which modules are in training mode, and how often these changed
    start: RngState  # of random numbers, where the step started
    open: bool = False  # whether the gradient goes past the cut: the second pass cannot start there
    obstacle: str = ""  # why it is open, or why the second pass cannot start at the cut
    arguments: Kept | None = None  # of the outermost call: the batch
    forwards: int = 0
    calls: list[PastCall] = field(default_factory=list)
    suffix: set[str] = field(default_factory=set)  # modules beside the cut that were called after it
    input: Kept | None = None  # args and kwargs of the module at the cut
    before: Before | None = None
    between: set[Tensor] = field(default_factory=set)  # parameters that code between the modules has used
    path: Path | None = None  # that was taken to the cut
    random: RngState = field(default_factory=dict)  # at the cut
    draws: bool = False  # whether random numbers were drawn since the start
    autocast: tuple[tuple[str, torch.dtype], ...] = ()  # at the cut: devices that cast, and to what
    sums: list[Tensor] = field(default_factory=list)  # of the cut's input, to see whether its values stay
    crossed: list[bool] = field(default_factory=list)  # not empty if a gradient arrived before the cut
    outputs: list[Tensor] = field(default_factory=list)  # of the model
    hooks: list[RemovableHandle] = field(default_factory=list)  # that notice such a gradient

    def stay_open(self, obstacle: str) -> None:
        """Let the gradient go past the cut, and say why."""
        self.open, self.obstacle = True, self.obstacle or obstacle


class Recorder:
    """The first pass: notes what is called before the cut, and detaches the cut's input.

    Args:
        recording: Where to.
        reach: Called where the cut is reached, with what tells the path there from others, and with the parameters
            whose gradients it has set. It fills in `path`, `before` and `sums`, and may leave the recording open.
        parameters: Of the model.
        keeps_random: Whether to keep the random states that modules leave.
    """

    def __init__(
        self,
        recording: Recording,
        reach: Callable[[Recording, tuple[Any, ...], list[Tensor]], None],
        parameters: Sequence[Tensor],
        keeps_random: bool,
    ) -> None:
        self.recording, self.reach, self.parameters, self.keeps_random = recording, reach, parameters, keeps_random
        self._detach: Callable[[Tensor], Tensor] = Tensor.detach
        self._grads: list[Tensor | None] = []  # of the parameters, where the model was called, ...
        self._versions: list[int] = []  # ... and their versions
        self._known: set[Node] = set()  # nodes that modules have returned
        self._turns: list[list[weakref.ref[Tensor]]] = []  # what the module at the cut got in further calls
        self._without_graph = False  # whether gradients were off when it was called first

    def model(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the whole model."""
        self.recording.forwards += 1
        self._enter(args, kwargs)
        output = call(*args, **kwargs)
        if (path := self.recording.path) is not None and not path.proven:
            self.recording.outputs += tensors_in(output)
        return output

    def before(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module that may lie before the cut."""
        recording = self.recording
        if recording.input is not None:
            recording.suffix.add(name)
            return call(*args, **kwargs)
        self._enter(args, kwargs)
        inputs, arguments, containers = taken_apart(args, kwargs)
        self._note_between(inputs)
        output = call(*args, **kwargs)
        if containers and containers != contents(args, kwargs):
            recording.obstacle = recording.obstacle or f"{name!r} changes a list or dict that it is given"
        if recording.input is None:  # a module that holds the cut in a second place is not before it
            tensors = tensors_in(output)
            for t in tensors:
                if (node := node_of(t)) is not None:
                    self._known.add(node)
            random = get_rng_state(recording.devices) if self.keeps_random and not recording.open else {}
            kept = Kept(None, []) if recording.open else Kept(output, _versions(tensors))
            recording.calls.append(PastCall(name, arguments, kept, random))
        return output

    def at_cut(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module at the cut."""
        recording = self.recording
        self._enter(args, kwargs)
        if recording.input is None:
            inputs = tensors_in(args, kwargs)
            self._note_between(inputs)
            recording.input = Kept((args, kwargs), _versions(inputs))
            recording.random = get_rng_state(recording.devices)
            self._reach(inputs)
        detach = not recording.open  # also below, where it is opened: as when the module was called first
        if not same_tensors(recording.input.value, (args, kwargs)):
            tensors = tensors_in(args, kwargs)
            self._look_before(tensors)
            if not in_backward():
                self._turns.append(list(map(weakref.ref, tensors)))
                return call(*args, **kwargs)
            if any(same_tensors([t() for t in turn], tensors) for turn in self._turns):
                return call(*args, **kwargs)  # checkpointing computes that turn again
            recording.stay_open(f"{recording.cut!r} lies inside a part that is checkpointed; cut at that part's input")
        if detach:
            args, kwargs = map_tensors(self._detach, args), map_tensors(self._detach, kwargs)
        return call(*args, **kwargs)

    def _look_before(self, tensors: list[Tensor]) -> None:
        """Find the parameters that code before the cut uses, in the first call of its module that has a graph."""
        recording = self.recording
        if self._without_graph and recording.before is not None and torch.is_grad_enabled():
            self._without_graph = False
            used = recording.before.parameters | parameters_of(reachable_nodes(tensors))
            recording.before = recording.before._replace(parameters=used)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the batch, and what else the pass starts from, once."""
        recording = self.recording
        if recording.arguments is None:
            recording.arguments = keep((args, kwargs))
            self._grads, self._versions = _gradients(self.parameters)
            if any(t.requires_grad and t.is_leaf for t in tensors_in(args, kwargs)):
                recording.stay_open("the batch requires a gradient, which has to go all the way")

    def _note_between(self, tensors: Sequence[Tensor]) -> None:
        """Note the parameters that code between the modules has used on the way to these tensors."""
        new = [t for t in tensors if t.grad_fn not in self._known]
        if new:
            self.recording.between |= parameters_of(reachable_nodes(new, stop=self._known))

    def _reach(self, inputs: list[Tensor]) -> None:
        recording = self.recording
        assert recording.input is not None and recording.arguments is not None
        args, kwargs = recording.input.value
        recording.draws = not same_rng_state(recording.start, recording.random)
        recording.autocast = tuple(
            (kind, torch.get_autocast_dtype(kind))
            for kind in sorted({device.type for device in recording.devices})
            if torch.is_autocast_enabled(kind)
        )
        key = (
            plain_arguments(*recording.arguments.value),
            tuple((call.name, call.arguments) for call in recording.calls),
            plain_arguments(args, kwargs),
            frozenset(map(id, recording.between)),
            recording.model,
            recording.autocast,
        )
        if not inputs:
            recording.stay_open(f"the input of {recording.cut!r} holds no tensor that can be found")
            return
        if any(isinstance(value, (list, dict)) and tensors_in(value) for value in (*args, *kwargs.values())):
            recording.stay_open(f"the input of {recording.cut!r} is a list or dict, which the module may change")
        if not torch.is_grad_enabled():
            self._without_graph = True
            recording.stay_open(
                f"gradients were off where {recording.cut!r} was called (checkpointing? pass use_reentrant=False)"
            )
        if not self.keeps_random and recording.draws:
            recording.stay_open(f"random numbers are drawn before {recording.cut!r}, and were not in earlier steps")
        self.reach(recording, key, self._with_new_gradients())
        if recording.path is not None and recording.path.proven < 2:
            rows = zip(self.parameters, self._grads, strict=True)
            recording.path.uncleared.update(p for p, grad in rows if grad is not None)
        if recording.before is not None and not recording.before.trained_after:
            recording.stay_open(f"nothing after {recording.cut!r} is trained")
        if recording.path is not None and recording.path.custom:  # reentrant checkpointing asks for a gradient
            self._detach = end_of_gradient
        if not recording.open:
            self._watch(inputs)

    def _with_new_gradients(self) -> list[Tensor]:
        """Return the parameters whose gradients were set, or changed in place, since the model was called."""
        grads, versions = _gradients(self.parameters)
        if versions == self._versions and all(map(is_, grads, self._grads)):
            return []
        rows = zip(self.parameters, grads, self._grads, versions, self._versions, strict=True)
        return [p for p, grad, old, version, old_version in rows if grad is not old or version != old_version]

    def _watch(self, inputs: list[Tensor]) -> None:
        """Notice gradients that arrive before the cut: at what modules returned, or code between them has made."""
        crossed = self.recording.crossed  # not the recording: a node that held it would never be freed
        for node in self._known | reachable_nodes(inputs, stop=self._known):
            if leaf_of(node) is None:
                self.recording.hooks.append(node.register_prehook(lambda _: crossed.append(True)))


def _gradients(params: Sequence[Tensor]) -> tuple[list[Tensor | None], list[int]]:
    """Return the gradients of parameters, and their versions."""
    grads = [p.grad for p in params]
    return grads, [-1 if grad is None else version_of(grad) for grad in grads]


def taken_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Tensor], tuple[Any, ...], list[Any]]:
    """Return the tensors among arguments, and what :func:`plain_arguments` and :func:`contents` return."""
    if _only_tensors(args, kwargs):
        return args, (), []
    return tensors_in(args, kwargs), plain_arguments(args, kwargs), contents(args, kwargs)


def _only_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether arguments are plain tensors and nothing else, as in most calls: the rest takes time."""
    return not kwargs and {*map(type, args)} == {Tensor}


def plain_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells one call from another: arguments that are no tensors, by value or, failing that, by type."""
    if _only_tensors(args, kwargs):
        return ()
    values = [*enumerate(args), *sorted(kwargs.items())]
    return tuple(
        (key, leaf if isinstance(leaf, PLAIN) else type(leaf).__name__)
        for key, value in values
        if not isinstance(value, Tensor)
        for leaf in leaves_in(value)
        if not isinstance(leaf, Tensor)
    )


def sums_of(tensors: list[Tensor]) -> list[Tensor]:
    """Return a number for each dense tensor that shows whether its values stay: `.data` changes leave no version."""
    return [t.detach().sum() for t in tensors if t.layout == torch.strided and not t.is_nested and _has_sum(t)]


def _has_sum(t: Tensor) -> bool:
    return t.dtype.itemsize > 1 or not t.is_floating_point()  # torch adds no float8


def contents(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return what the lists and dicts among arguments hold, by identity, to see whether a call changes them."""
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, dict))]
    return [[id(item) for item in (v if isinstance(v, list) else (*v, *v.values()))] for v in values]


def runs_distributed() -> bool:
    """Tell whether a DistributedDataParallel is calling its model."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None) is not None


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
        s is t or (s.layout == t.layout == torch.strided and _place(s) == _place(t)) for s, t in zip(a, b, strict=True)
    )


def _place(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype
