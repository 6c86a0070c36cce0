"""What calls of modules go through in the second pass of a replayed step: what was recorded is handed out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from sparsam.randomness import set_rng_state
from sparsam.replay.autograd_graph import leaves_in, map_tensors, tensors_in
from sparsam.replay.calls import Call
from sparsam.replay.recording import Recording, plain_arguments, same_tensors, sums_of


class OtherValuesError(Exception):
    """Code before the cut has computed something else than in the first pass: nothing of it can be used."""


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

    def model(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the whole model."""
        self._enter(args, kwargs)
        return call(*args, **kwargs)

    def before(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module that may lie before the cut."""
        self._enter(args, kwargs)
        if self._given is None and not self.stopped:
            past = self.recording.calls[self._next] if self._next < len(self.recording.calls) else None
            if past is not None and past.name == name and past.arguments == plain_arguments(args, kwargs):
                self._next += 1
                set_rng_state(past.random)
                return past.output.value
            self._stop(f"it calls {name!r} where the first pass did not, or with other arguments")
        return call(*args, **kwargs)

    def at_cut(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module at the cut."""
        self._enter(args, kwargs)
        if self._given is None and not self.stopped:
            self._reach(args, kwargs)
        if self._given is not None and same_tensors((args, kwargs), self._given) and self._leads_back(args, kwargs):
            assert self.recording.input is not None
            recorded = iter(tensors_in(self.recording.input.value))
            # Other arguments are those of this call: a cache, say, that the first pass has filled already.
            args, kwargs = map_tensors(lambda _: next(recorded), (args, kwargs))
        return call(*args, **kwargs)

    def _leads_back(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a gradient goes back from the arguments where it did from those that the cut was given.

        A second call may get the same values without a gradient, or with one where the first had none.
        """
        return all(
            a.requires_grad == b.requires_grad
            for a, b in zip(tensors_in(args, kwargs), tensors_in(self._given), strict=True)
        )

    def _reach(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recording = self.recording
        assert recording.input is not None
        here, there = tensors_in(args, kwargs), tensors_in(recording.input.value)
        if self._next < len(recording.calls):
            self._stop(f"it does not call {recording.calls[self._next].name!r} where the first pass did")
        elif plain_arguments(args, kwargs) != plain_arguments(*recording.input.value) or not _alike(here, there):
            self._stop(f"it calls {recording.cut!r} with other arguments than the first pass")
        elif recording.sums and not all(map(_equal_values, sums_of(there), recording.sums)):
            raise OtherValuesError(f"the input of {recording.cut!r} was changed after the first pass, as by .data")
        elif not all(a is b or b.device.type != "cpu" or _equal_values(a, b) for a, b in zip(here, there, strict=True)):
            raise OtherValuesError(f"what comes to {recording.cut!r} has other values than in the first pass")
        else:
            self._given = (args, kwargs)
            set_rng_state(recording.random)

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
        ours, theirs = tensors_in(here), tensors_in(there)
        if len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True)):
            return True
        if not _alike(ours, theirs):
            return False
        # Made anew in each call: on a GPU, which would have to be waited for, the values are compared only once.
        if not self.equal_copies or all(a.device.type == "cpu" for a in ours):
            self.equal_copies = all(_equal_values(a, b) for a, b in zip(ours, theirs, strict=True))
        return self.equal_copies

    def _stop(self, reason: str) -> None:
        """Compute the rest in full; what was handed out so far is what the second pass would have computed."""
        self.stopped = reason
        self.in_full()


def _plain(value: Any) -> list[Any]:
    return [leaf for leaf in leaves_in(value) if not isinstance(leaf, Tensor)]


def _equal(one: list[Any], other: list[Any]) -> bool:
    try:
        return bool(one == other)
    except Exception:  # arrays and the like, which do not say whether they are equal
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _alike(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(a is not None and b is not None and _form(a) == _form(b) for a, b in zip_longest(some, others))


def _form(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.device, t.layout


def _equal_values(a: Tensor, b: Tensor) -> bool:
    if a.is_nested:
        return all(torch.equal(s, t) for s, t in zip(a.unbind(), b.unbind(), strict=True))
    if a.layout != torch.strided:  # torch.equal knows no sparse tensors
        a, b = a.to_dense(), b.to_dense()
    if torch.equal(a, b):
        return True
    nan = a.isnan() if a.is_floating_point() else None  # which is not equal to itself
    return nan is not None and nan.equal(b.isnan()) and a.nan_to_num().equal(b.nan_to_num())
