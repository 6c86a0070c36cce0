"""How the two passes of a step are run: buffers move once, random numbers are drawn once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsam.distributed.shards import any_dtensor, computes_on, fsdp_modules
from sparsam.errors import UserValueError, warn
from sparsam.inventory import Inventory, modules_of
from sparsam.perturbation import Saved, restore, save
from sparsam.randomness import RngState, fork_rng, get_rng_state, set_rng_state

SMALL = 2**16  # buffers of so many numbers are always kept: they could move unseen, through .data
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # which batch_norm moves unseen

Closure = Callable[[], Any]


class Passes:
    """Runs both passes of a step in full; :class:`sparsam.replay.ReplayedPasses` leaves out what it can.

    The second pass draws the random numbers of the first, so that dropout is the same function of the input in both.
    Afterwards torch's generators stand where the first pass left them. Buffers (running statistics, spectral norm's
    vectors, means of one's own) are those of the first pass alone. Without a model nothing is kept or changed.

    Args:
        model: Whose buffers and devices.
        around_first: Makes what the first pass runs in.
    """

    def __init__(
        self, model: nn.Module | None, around_first: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self.model, self.around_first = model, around_first
        self._inventory = Inventory(model)
        self._changes = -1  # of the inventory, when it was last looked at here
        self._normalising: list[_BatchNorm] = []  # modules that can be told to track no statistics
        self._buffers: list[SavedBuffers] = []
        self._stopped: list[_BatchNorm] = []  # which track no statistics in the second pass
        self._after_first: RngState = {}
        self._warned = False
        self._moved: set[tuple[nn.Module, str]] = set()  # buffers that the latest first pass has moved
        self._moving: set[tuple[nn.Module, str]] = set()  # buffers that any pass was seen to move
        self._watched: set[tuple[nn.Module, str]] = set()  # large buffers that a second pass was seen to leave, or move
        self._look()
        self.start()

    # ---------------------------------------------------------------------------- what replay does otherwise

    def first(self, closure: Closure) -> Any:
        """Run the first pass, at w."""
        with self.around_first():
            return closure()

    def second(self, closure: Closure, params: Sequence[Tensor], perturbed: Sequence[Saved], radius: float) -> None:
        """Run the second pass, at w + eps.

        Args:
            closure: The pass.
            params: All parameters of the optimizer.
            perturbed: The parameters that eps was added to, and copies of w.
            radius: The largest rho of the step, as far as the host knows it.
        """
        closure()

    def find_scope(self, params: Sequence[Tensor]) -> None:
        """Find out, after the first pass, which parameters can be perturbed."""

    def in_scope(self, params: Sequence[Tensor]) -> list[bool]:
        """Return for each parameter whether it can be perturbed, as far as that is known."""
        return [True] * len(params)

    def base_step_without_closure(self, params: Sequence[Tensor]) -> None:
        """Note that a base step has no closure, as further steps will have none."""

    def forget(self) -> None:
        """Let go of what the first pass left for the second."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain values."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` returned."""

    # --------------------------------------------------------------------------- buffers and random numbers

    def start(self) -> None:
        """Note that the first pass starts here."""
        self._start_from(self._rng_state())

    def _start_from(self, random: RngState) -> None:
        self._before_first = random
        self._versions = [(place, version_of(place.buffer)) for place in self._places]

    def begin_second(self) -> None:
        """Start the second pass: random numbers from where the first pass started."""
        self._moved = {(place.module, place.name) for place, version in self._versions if place.moved(version)}
        self._moving |= self._moved
        self._look()
        self._keep_buffers(self._inventory.modules)
        self._after_first = self._rng_state()
        self._rewind()

    def drop_copies(self) -> None:
        """Let go of copies of the weights as they were: casts of autocast, and what FSDP has gathered.

        A copy of w would otherwise be taken for one of w + eps.
        """
        torch.clear_autocast_cache()
        for module in fsdp_modules(self._inventory.modules):  # asked anew: a model may be sharded late
            module.reshard()

    def _rewind(self) -> None:
        set_rng_state(self._before_first)

    def _keep_buffers(self, modules: Iterable[nn.Module]) -> None:
        modules = set(modules)
        self._buffers.append(
            SavedBuffers(
                place
                for place in self._places
                if place.module in modules
                and (
                    place.buffer.numel() <= SMALL
                    or place.name in STATISTICS
                    or (place.module, place.name) in self._moving
                    or (place.module, place.name) not in self._watched
                )
            )
        )
        for module in self._tracking:
            if module in modules:
                self._stopped.append(module)
                _track(module, False)  # cheaper than to save the statistics and put them back

    def end_second(self, *, complete: bool) -> None:
        """End the second pass, or give it up: buffers and random numbers as the first pass left them.

        A complete pass that drew another amount of random numbers than the first gives a warning, once.
        """
        now, before, after = self._rng_state(), self._before_first, self._after_first
        try:
            if complete:
                self._watch()
        finally:
            for buffers in self._buffers:
                buffers.restore()
            for module in self._stopped:
                _track(module, True)
            self._buffers, self._stopped = [], []
        set_rng_state(after)
        self._start_from(after)
        differs = any(
            device in after
            and not torch.equal(state, after[device])
            and not torch.equal(state, before.get(device, state))
            for device, state in now.items()
        )
        if complete and differs and not self._warned:
            self._warned = True
            warn(
                "the two passes of a SAM step drew different amounts of random numbers, so dropout and the like may "
                "have differed between them. The second pass repeats torch's random numbers, from zero_grad() or the "
                "closure's start on, but not those of NumPy or Python: draw such numbers before the step. In two-step "
                "use, call zero_grad() right before the first forward pass",
            )

    def _watch(self) -> None:
        """Find out, in the first step with a large buffer, whether passes move it: `.data` leaves no version."""
        if is_capturing():  # which must not wait for values
            return
        for buffers in self._buffers:
            large = [place for place in buffers.places if place.buffer.numel() > SMALL]
            new = [place for place in large if (place.module, place.name) not in self._watched]
            self._moving |= buffers.moved(new)
            self._watched |= {(place.module, place.name) for place in new}

    def _rng_state(self) -> RngState:
        return {} if self.model is None else get_rng_state(self._devices)

    def _look(self) -> None:
        """Find the model's modules, devices and buffers, once a step."""
        inventory = self._inventory
        inventory.look()
        if inventory.changes != self._changes:
            self._changes = inventory.changes
            self._normalising = [module for module in inventory.modules if _normalises(module)]
        params = inventory.parameters
        self._devices = set(map(computes_on, params)) if any_dtensor(params) else {p.device for p in params}
        # A compiled module would be compiled again where it is told not to track.
        compiled = {part for module in inventory.compiled for part in modules_of(module)}
        self._tracking = [
            module
            for module in self._normalising
            if module.training and module.track_running_stats and module not in compiled
        ]
        tracking = set(self._tracking)
        self._places = _places(module for module in inventory.with_buffers if module not in tracking)


class Place(NamedTuple):
    """Where a module has a buffer, and the buffer that was there."""

    module: nn.Module
    name: str
    buffer: Tensor

    def moved(self, version: int) -> bool:
        """Tell whether the buffer was replaced, or changed in place since it had a version."""
        return self.replaced or version_of(self.buffer) != version

    @property
    def replaced(self) -> bool:
        """Whether the module has another buffer there by now, or none."""
        buffers = self.module._buffers  # of a scripted module it is no dict, and has no get()
        return self.name not in buffers or buffers[self.name] is not self.buffer


class SavedBuffers:
    """Buffers of modules, to be put back bit for bit, also where a module has replaced one."""

    @torch.no_grad()  # a buffer may require a gradient
    def __init__(self, places: Iterable[Place]) -> None:
        self.places = list(places)
        buffers = [place.buffer for place in self.places if _can_change(place.buffer)]
        self._saved = save(b for b in buffers if not _is_lazy(b))
        self._lazy = [Saved([b], [b.clone()]) for b in buffers if _is_lazy(b)]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers back."""
        for module, name, buffer in self.places:
            module._buffers[name] = buffer
        restore(self._saved)
        for (buffer,), (copy,) in self._lazy:
            buffer.copy_(copy)

    def moved(self, places: Iterable[Place]) -> set[tuple[nn.Module, str]]:
        """Return which of these buffers were replaced, or hold other bits than they did. Waits for the device."""
        saved = [*self._saved, *self._lazy]
        copies = {t: copy for part in saved for t, copy in zip(part.tensors, part.copies, strict=True)}
        return {
            (place.module, place.name)
            for place in places
            if place.replaced or not _same_bits(place.buffer, copies.get(place.buffer, place.buffer))
        }


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Let the block run a model; afterwards its buffers and torch's random numbers are what they were.

    The block works on copies of the buffers: a graph that has kept one of them does not find it changed.
    """
    places = _places(model.modules())
    empty = [(module, name) for module in model.modules() for name, b in module._buffers.items() if b is None]
    copies = {buffer: buffer.clone() for _, _, buffer in places}
    with fork_rng({p.device for p in model.parameters()}):
        try:
            for module, name, buffer in places:
                module._buffers[name] = copies[buffer]
            yield
        finally:
            for module, name in empty:
                module._buffers[name] = None
            for module, name, buffer in places:
                module._buffers[name] = buffer


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode for the block, in which it may be run forward and backward; then it is as before."""
    modes = [(module, module.training) for module in model.modules()]
    with preserve_state(model):
        try:
            model.eval()
            for module in model.modules():
                if isinstance(module, nn.RNNBase) and not module.dropout:
                    module.train()  # the same function, and cuDNN refuses its backward pass in eval mode
            yield
        finally:
            for module, training in modes:
                module.training = training


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Return `model(inputs)`; `model(*inputs)` for a tuple or a list, `model(**inputs)` for a dict."""
    args, kwargs = model_arguments(inputs)
    return model(*args, **kwargs)


def model_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the named arguments that inputs stand for."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


@contextmanager
def naming_inputs(rule: str, inputs: Any) -> Iterator[None]:
    """Let what a model raises in the block say which argument its inputs come from, and how they can be given.

    Args:
        rule: What the message begins with: which argument must be what.
        inputs: What the model is called with.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError, RuntimeError) as error:
        if type(error).__module__ != "builtins":  # it has a name for what happened, such as out of memory
            raise
        kind = "dict" if isinstance(inputs, Mapping) else "tuple" if isinstance(inputs, (tuple, list)) else ""
        if kind == "dict":
            call = f"model(**inputs) with the keys {', '.join(map(repr, inputs))}"
        elif kind == "tuple":
            call = f"model(*inputs) with {len(inputs)} inputs"
        else:
            what = f"shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else f"type {type(inputs).__name__}"
            call = f"model(inputs) with inputs of {what}"
        remedy = ""
        if kind:
            forms = f"({kind},) as inputs, (({kind},), y) as a batch or item"
            remedy = f"; a model that takes the {kind} itself gets it in a tuple: {forms}"
        elif isinstance(error, TypeError):  # an argument may be missing
            remedy = "; several inputs are a tuple: (a, b) as inputs, ((a, b), y) as a batch or item"
        reason = str(error).partition("\n")[0]
        raise UserValueError(f"{rule}, but {call} raised {type(error).__name__}: {reason}{remedy}") from error


def _normalises(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Tell whether a module is one of torch's own that moves running statistics unless told not to track them."""
    return isinstance(module, _BatchNorm) and type(module).forward.__module__.startswith("torch.nn.modules.")


def _track(module: _BatchNorm, whether: bool) -> None:
    module.__dict__["track_running_stats"] = whether  # a module's own way to set it takes twenty times as long


def _places(modules: Iterable[nn.Module]) -> list[Place]:
    return [
        Place(module, name, buffer)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def _can_change(t: Tensor) -> bool:
    """Tell whether torch can write into a tensor: not if it is of inference mode, or expanded."""
    if t.is_inference():
        return False
    return not _is_strided(t) or all(step or size < 2 for step, size in zip(t.stride(), t.shape, strict=True))


def _is_lazy(t: Tensor) -> bool:
    """Tell whether a tensor is the conjugate or the negative of what its memory holds: foreach cannot write into it."""
    return t.is_conj() or t.is_neg()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are the same, where that can be told: of sparse ones only versions show changes."""
    if not _is_strided(a):
        return True
    a, b = (t.resolve_conj().resolve_neg().contiguous() for t in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _is_strided(t: Tensor) -> bool:
    return t.layout == torch.strided and not t.is_nested and not t.is_quantized


def is_capturing() -> bool:
    """Tell whether a CUDA graph is being captured."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # is_available() takes longer
    return started and torch.cuda.is_current_stream_capturing()


def version_of(t: Tensor) -> int:
    """Return how often a tensor was changed in place; -1 for one of inference mode, which cannot be outside of it."""
    return -1 if t.is_inference() else t._version
