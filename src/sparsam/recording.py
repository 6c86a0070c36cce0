"""What calls of modules go through in the two passes of a replayed step: recording, and reuse."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sparsam.autograd_graph import tensors_in
from sparsam.interception import Call
from sparsam.randomness import RandomState, random_state, set_random_state


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
    random: RandomState


@dataclass
class Recording:
    """What a first pass leaves for the second."""

    cut: str
    devices: frozenset[torch.device]
    whole_gradient: bool
    arguments: Kept | None = None  # of the outermost call: the batch
    forwards: int = 0
    calls: list[PastCall] = field(default_factory=list)
    input: Kept | None = None  # args and kwargs of the module at the cut
    random: RandomState = field(default_factory=dict)  # at the cut
    differentiable: bool = True  # whether gradients were on at the cut
    outputs: list[Tensor] = field(default_factory=list)  # of the model and of the closure

    @property
    def path(self) -> tuple[str, ...]:
        """The cut and the modules that were called before it."""
        return (self.cut, *(call.name for call in self.calls))


class Recorder:
    """The first pass: everything runs; what is called before the cut is noted, and the cut's input detached."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def model(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the whole model."""
        recording = self.recording
        recording.forwards += 1
        self._enter(args, kwargs)
        output = call(*args, **kwargs)
        recording.outputs += tensors_in(output)
        return output

    def before(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module that may lie before the cut."""
        recording = self.recording
        if recording.input is not None:
            return call(*args, **kwargs)
        self._enter(args, kwargs)
        output = call(*args, **kwargs)
        if recording.input is None:  # a module that holds the cut in a second place is not before it
            recording.calls.append(PastCall(name, keep(output), random_state(recording.devices)))
        return output

    def at_cut(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module at the cut."""
        recording, first = self.recording, self.recording.input is None
        self._enter(args, kwargs)
        if recording.input is None:
            recording.input, recording.random = keep((args, kwargs)), random_state(recording.devices)
            recording.differentiable = torch.is_grad_enabled()
        # A second call with the same input is checkpointing, which must see what the first call saw.
        again = first or _same(recording.input.value, (args, kwargs))
        if again and recording.differentiable and not recording.whole_gradient:
            args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        return call(*args, **kwargs)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.recording.arguments is None:
            self.recording.arguments = keep((args, kwargs))


class Reuse:
    """The second pass: hands out what was recorded, as long as it goes the way of the first."""

    def __init__(self, recording: Recording, equal_copies: bool) -> None:
        self.recording = recording
        self.equal_copies = equal_copies
        self.another_batch = False
        self.stopped: str | None = None  # why the rest is computed in full
        self._entered = False
        self._next = 0  # of the recorded calls
        self._given: Any = None  # what the module at the cut was called with
        self._blanks: list[weakref.ref[Tensor]] = []

    def model(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the whole model."""
        self._enter(args, kwargs)
        return call(*args, **kwargs)

    def before(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module that may lie before the cut."""
        self._enter(args, kwargs)
        if self._given is None and not self.stopped:
            past = self.recording.calls[self._next] if self._next < len(self.recording.calls) else None
            if past is not None and past.name == name:
                self._next += 1
                set_random_state(past.random)
                return past.output.value if past.output.unchanged else self._blank(past.output.value)
            self._stop(f"it calls {name!r} where the first pass did not")
        return call(*args, **kwargs)

    def at_cut(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module at the cut."""
        self._enter(args, kwargs)
        if self._given is None and not self.stopped:
            if self._next < len(self.recording.calls):
                self._stop(f"it does not call {self.recording.calls[self._next].name!r} where the first pass did")
            else:
                self._given = (args, kwargs)
                set_random_state(self.recording.random)
        if self._given is not None and _same((args, kwargs), self._given):
            assert self.recording.input is not None
            args, kwargs = self.recording.input.value
        return call(*args, **kwargs)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the batch with that of the first pass, once."""
        if self._entered:
            return
        self._entered = True
        kept = self.recording.arguments
        assert kept is not None
        pairs = list(zip_longest(tensors_in(args, kwargs), tensors_in(kept.value)))
        if kept.unchanged and all(a is b for a, b in pairs):
            return
        if kept.unchanged and all(_alike(a, b) for a, b in pairs):
            # Made anew in each call: whether with the same values is looked at once, because that takes waiting.
            self.equal_copies = self.equal_copies or all(torch.equal(a, b) for a, b in pairs)
            if self.equal_copies:
                return
        self.another_batch = True
        self._stop("the closure gave the model another batch in its second call")

    def _blank(self, value: Any) -> Any:
        blank = tree_map_only(Tensor, _not_a_number, value)
        self._blanks += [weakref.ref(t) for t in tensors_in(blank)]
        return blank

    def _stop(self, reason: str) -> None:
        """Compute the rest in full; what was handed out so far is what the second pass would have computed."""
        if any(blank() is not None for blank in self._blanks):
            raise RuntimeError(
                f"the second pass cannot be completed: {reason}, right after a tensor that the first pass had changed "
                f"in place. Use a mask without a cut, or avoid the in-place operation"
            )
        self.stopped = reason


def _not_a_number(t: Tensor) -> Tensor:
    return torch.full_like(t, torch.nan if t.is_floating_point() else 0, requires_grad=False)


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _same(one: Any, other: Any) -> bool:
    """Tell whether two values hold the same tensors, by where they lie."""
    a, b = tensors_in(one), tensors_in(other)
    return len(a) == len(b) and all(
        s is t or (s.data_ptr() == t.data_ptr() and s.shape == t.shape) for s, t in zip(a, b, strict=True)
    )
