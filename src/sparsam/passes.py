"""What the two passes of a step share: running statistics move once, random numbers are drawn once."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from sparsam.perturbation import Saved, restore, save

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

RandomState = list[tuple[torch.device, Tensor]]


class SecondPass:
    """Lets the second pass of a step through a model see what the first one saw.

    The second pass draws the random numbers of the first (dropout is the same function of the input in
    both), and afterwards torch's generators stand where the first pass left them. The running statistics of
    normalisation layers are those of the first pass alone.

    The first pass starts where :meth:`mark` was called last. Without a model nothing is kept or changed.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self._statistics: list[Saved] = []
        self._after_first: RandomState = []
        self._warned = False
        self.mark()

    def mark(self) -> None:
        """Note that the first pass starts here."""
        self._before_first = random_state(self.model)

    def begin(self) -> None:
        """Start the second pass: random numbers from where the first pass started."""
        self._statistics = save(running_statistics(self.model))
        self._after_first = random_state(self.model)
        set_random_state(self._before_first)

    def end(self) -> None:
        """End the second pass, or give it up: statistics and random numbers as the first pass left them."""
        restore(self._statistics)
        set_random_state(self._after_first)
        self._statistics = []

    def check(self) -> None:
        """Warn, once, if the second pass drew another amount of random numbers than the first."""
        now = random_state(self.model)
        drew_nothing = same_random_state(now, self._before_first)
        if self._warned or drew_nothing or same_random_state(now, self._after_first):
            return
        self._warned = True
        warnings.warn(
            "the two passes of a SAM step drew different amounts of random numbers, so dropout and the like "
            "may have differed between them. In two-step use, call zero_grad() right before the first forward "
            "pass: from there on the second pass repeats torch's random numbers",
            stacklevel=2,
        )


def running_statistics(model: nn.Module | None) -> list[Tensor]:
    """Return the buffers that normalisation layers move in a forward pass in training mode."""
    if model is None:
        return []
    return [b for name, b in model.named_buffers() if name.rpartition(".")[2] in STATISTICS]


def random_state(model: nn.Module | None) -> RandomState:
    """Return the states of torch's generators for the CPU and for the devices that the model is on."""
    if model is None:
        return []
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    state = [(torch.device("cpu"), torch.get_rng_state())]
    for device in devices:
        # While a CUDA graph is captured its generator can be neither read nor set.
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            state.append((device, torch.get_device_module(device).get_rng_state(device)))
    return state


def set_random_state(states: RandomState) -> None:
    """Put torch's generators into the states that :func:`random_state` returned."""
    for device, state in states:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def same_random_state(one: RandomState, other: RandomState) -> bool:
    """Tell whether the generators that both name stand at the same point."""
    others = dict(other)
    return all(torch.equal(state, others.get(device, state)) for device, state in one)
