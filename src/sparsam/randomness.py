"""Random numbers: the states of torch's generators, and generators of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

RngState = dict[torch.device, Tensor]

CPU = torch.device("cpu")


def get_rng_state(devices: Iterable[torch.device]) -> RngState:
    """Return the states of the generators of the CPU and of the given devices."""
    states = {CPU: torch.get_rng_state()}
    for device in set(devices):
        # While a CUDA graph is captured its generator can be neither read nor set.
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            continue
        if device.type not in ("cpu", "meta"):
            states[device] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_rng_state(states: RngState) -> None:
    """Put generators into the states that :func:`get_rng_state` returned."""
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def same_rng_state(one: RngState, other: RngState) -> bool:
    """Tell whether generators stand where they stood."""
    return one.keys() == other.keys() and all(torch.equal(state, other[device]) for device, state in one.items())


@contextmanager
def fork_rng(devices: Iterable[torch.device], seed: int | None = None) -> Iterator[None]:
    """Let the block draw what it wants: afterwards the generators stand where they stood.

    Args:
        devices: Whose generators, beside the CPU's.
        seed: Where the CPU's generator starts inside the block; None: where it stands.
    """
    states = get_rng_state(devices)
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield
    finally:
        set_rng_state(states)


def random_generator(*seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator that depends on the given numbers alone (a seed, a step, a purpose)."""
    mixed = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(mixed[0] >> np.uint64(1)))
