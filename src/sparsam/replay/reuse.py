"""What calls of modules go through in the second pass of a replayed step: what was recorded is handed out."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from sparsam.errors import UserRuntimeError
from sparsam.randomness import set_rng_state
from sparsam.replay.autograd_graph import tensors_in
from sparsam.replay.calls import Call
from sparsam.replay.recording import PastCall, Recording, same_tensors


class Reuse:
    """The second pass: hands out what was recorded, as long as it takes the path of the first.

    Args:
        recording: What the first pass left.
        in_full: Called before anything that lies before the cut is computed again.
        equal_copies: Whether the closure is known to make its batch anew in each call, with the same values.
    """

    def __init__(self, recording: Recording, in_full: Callable[[], None], equal_copies: bool) -> None:
        self.recording, self.in_full, self.equal_copies = recording, in_full, equal_copies
        self.another_batch = False
        self.stopped: str | None = None  # why the rest is computed in full
        self._entered = False
        self._next = 0  # of the recorded calls
        self._given: Any = None  # what the module at the cut was called with
        self._placeholders: list[weakref.ref[Tensor]] = []
        self.read_placeholder = False  # whether something may have been computed of one

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
                set_rng_state(past.random)
                return past.output.value if past.output.unchanged else self._placeholder(past)
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
                set_rng_state(self.recording.random)
        if self._given is not None and same_tensors((args, kwargs), self._given):
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
        if not _equal(_plain((args, kwargs)), _plain(kept.value)):
            self._stop("the closure gave the model other arguments in its second call")
        elif not kept.unchanged or not self._is_same_batch((args, kwargs), kept.value):
            self.another_batch = True
            self._stop("the closure gave the model another batch in its second call (is that meant?)")

    def _is_same_batch(self, here: Any, there: Any) -> bool:
        pairs = list(zip_longest(tensors_in(here), tensors_in(there)))
        if all(a is b for a, b in pairs):
            return True
        if not all(_alike(a, b) for a, b in pairs):
            return False
        # Made anew in each call: on a GPU, which would have to be waited for, the values are compared only once.
        if not self.equal_copies or all(a.device.type == "cpu" for a, _ in pairs):
            self.equal_copies = all(torch.equal(a, b) for a, b in pairs)
        return self.equal_copies

    def _placeholder(self, past: PastCall) -> Any:
        """Return tensors without values in place of an output that was changed in place by what came after it."""
        placeholder = tree_map_only(Tensor, _not_a_number, past.output.value)
        self._placeholders += [weakref.ref(t) for t in tensors_in(placeholder)]
        # The next module, if it is the one that worked in place, returns the values again.
        following = self.recording.calls[self._next : self._next + 1]
        returned_again = any(call.output.value is past.output.value for call in following)
        self.read_placeholder = self.read_placeholder or not returned_again
        return placeholder

    def _stop(self, reason: str) -> None:
        """Compute the rest in full; what was handed out so far is what the second pass would have computed."""
        if self.read_placeholder or any(placeholder() is not None for placeholder in self._placeholders):
            raise UserRuntimeError(
                f"the second pass cannot be completed: {reason}, right after a tensor that the first pass had changed "
                f"in place. Use a mask without a cut, or avoid the in-place operation"
            )
        self.stopped = reason
        self.in_full()


def _not_a_number(t: Tensor) -> Tensor:
    return torch.full_like(t, torch.nan if t.is_floating_point() else 0, requires_grad=False)


def _plain(value: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(value) if not isinstance(leaf, Tensor)]


def _equal(one: list[Any], other: list[Any]) -> bool:
    try:
        return bool(one == other)
    except Exception:  # arrays and the like, which do not say whether they are equal
        return False


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
