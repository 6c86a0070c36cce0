"""What the two passes of a step share: running statistics move once, random numbers are drawn once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsam.errors import warn
from sparsam.perturbation import restore, save
from sparsam.randomness import RandomState, random_numbers_apart, random_state, set_random_state
from sparsam.replay.calls import is_compiled

STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


class SecondPass:
    """Lets the second pass of a step through a model see what the first one saw.

    The second pass draws the random numbers of the first (dropout is the same function of the input in
    both), and afterwards torch's generators stand where the first pass left them. The running statistics of
    normalisation layers are those of the first pass alone.

    The first pass starts where :meth:`mark` was called last. Without a model nothing is kept or changed.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self._statistics: list[SavedBuffers] = []
        self._tracking: list[_BatchNorm] = []
        self._spared: Collection[nn.Module] = ()
        self._after_first: RandomState = {}
        self._warned = False
        self.mark()

    def mark(self) -> None:
        """Note that the first pass starts here."""
        self._before_first = self._random_state()

    def begin(self, spare: Collection[nn.Module] = ()) -> None:
        """Start the second pass: random numbers from where the first pass started.

        Args:
            spare: Modules that this pass is not going to call, so that there is nothing to keep of them.
        """
        self._spared = spare
        if self.model is not None:
            self._keep([module for module in self.model.modules() if module not in spare])
        self._after_first = self._random_state()
        set_random_state(self._before_first)

    def again(self) -> None:
        """Start the second pass once more, with all modules."""
        self.spare_nothing()
        set_random_state(self._before_first)

    def spare_nothing(self) -> None:
        """Keep the statistics of the spared modules too: they are going to be called after all."""
        spared, self._spared = self._spared, ()
        self._keep(list(spared))

    def _keep(self, modules: list[nn.Module]) -> None:
        compiled = {part for module in modules if is_compiled(module) for part in module.modules()}
        tracking = [module for module in modules if module not in compiled and _tracks(module)]
        self._tracking += tracking
        self._statistics.append(SavedBuffers([m for m in modules if m not in set(tracking)], STATISTICS))
        for module in tracking:
            module.track_running_stats = False  # cheaper than to save the statistics and put them back

    def end(self, *, complete: bool) -> None:
        """End the second pass, or give it up: statistics and random numbers as the first pass left them.

        A complete pass that drew another amount of random numbers than the first gives a warning, once.
        """
        now, before, after = self._random_state(), self._before_first, self._after_first
        for statistics in self._statistics:
            statistics.restore()
        for module in self._tracking:
            module.track_running_stats = True
        self._statistics, self._tracking, self._spared = [], [], ()
        set_random_state(after)
        self.mark()
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
                "have differed between them. In two-step use, call zero_grad() right before the first forward pass: "
                "from there on the second pass repeats torch's random numbers",
            )

    def _random_state(self) -> RandomState:
        return {} if self.model is None else random_state(p.device for p in self.model.parameters())


class SavedBuffers:
    """The buffers of modules, to be put back bit for bit, also where a module has replaced one.

    Args:
        modules: The modules.
        names: Only buffers with these names.
    """

    def __init__(self, modules: Iterable[nn.Module], names: Collection[str]) -> None:
        self._places = [place for place in _buffers(modules) if place[1] in names]
        self._saved = save(buffer for _, _, buffer in self._places)

    def restore(self) -> None:
        """Put the buffers back."""
        for module, name, buffer in self._places:
            module._buffers[name] = buffer
        restore(self._saved)


@contextmanager
def no_trace(model: nn.Module) -> Iterator[None]:
    """Let the block run a model without a trace in its buffers and torch's random numbers.

    The block works on copies of the buffers: a graph that has kept one of them does not find it changed.
    """
    places = _buffers(model.modules())
    copies = {buffer: buffer.clone() for _, _, buffer in places}
    with random_numbers_apart({p.device for p in model.parameters()}):
        try:
            for module, name, buffer in places:
                module._buffers[name] = copies[buffer]
            yield
        finally:
            for module, name, buffer in places:
                module._buffers[name] = buffer


@contextmanager
def looked_at(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode for the block, in which it may be run forward and backward; then it is as before."""
    modes = [(module, module.training) for module in model.modules()]
    with no_trace(model):
        try:
            model.eval()
            for module in model.modules():
                if isinstance(module, nn.RNNBase) and not module.dropout:
                    module.train()  # the same function, and cuDNN refuses its backward pass in eval mode
            yield
        finally:
            for module, training in modes:
                module.training = training


def _tracks(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Tell whether a module is one of torch's own that moves running statistics unless told not to track them."""
    return (
        isinstance(module, _BatchNorm)
        and module.training
        and module.track_running_stats
        and type(module).forward.__module__.startswith("torch.nn.modules.")
    )


def _buffers(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (module, name, buffer) for module in modules for name, buffer in module._buffers.items() if buffer is not None
    ]
