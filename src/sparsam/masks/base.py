"""The contract that every mask keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from sparsam.checks import check_interval, check_whole
from sparsam.selection import Selection
from sparsam.settings import Policy, Setting


class Scope(NamedTuple):
    """What a mask reads: a model, and the module whose input cuts it; or neither."""

    model: nn.Module | None = None
    cut: str | None = None
    """The name of a module. Only parameters that are not used before its input can be perturbed."""


class Mask(Policy, ABC):
    """Says which weights a step perturbs.

    A mask holds settings, no state. The optimizer keeps what it selected last and hands it back as `previous`. Random
    numbers of a mask depend on its `seed` and the step alone. So the same settings give the same masks in every
    process, and after a resume.

    Args:
        interval: The mask is made in the first two-pass step at or after each multiple of `interval` optimizer steps;
            None: made once.
        seed: Where the mask's own random numbers start; saved and restored with the optimizer's state.
    """

    scope: Scope = Scope()
    same_on_all_ranks: bool = False
    """Whether the model alone decides, so that ranks of a distributed training have nothing to agree on."""

    def __init__(self, interval: int | None = None, seed: int = 0) -> None:
        check_interval(interval)
        check_whole("seed", seed, least=0)
        self.interval = None if interval is None else int(interval)
        self.seed = int(seed)

    @abstractmethod
    def select(self, params: Sequence[Tensor], step: int, previous: Selection | None) -> Selection:
        """Return which weights are perturbed from this step on.

        Args:
            params: The parameters in the mask's scope that require a gradient, in the optimizer's order. Their `.grad`
                is the gradient of the first pass, at w (None where there is none). Sharded parameters are DTensors.
            step: How many optimizer steps were taken before this one.
            previous: What was selected before; None the first time.

        Returns:
            For each parameter a bool tensor of its shape, or True or False for all of it. That of a DTensor may be a
            DTensor, or whole and the same in every process.
        """

    def settings(self) -> dict[str, Setting]:
        """Return what a resumed run must have in common with the saved one; a subclass adds its own."""
        return {**super().settings(), "interval": self.interval}
