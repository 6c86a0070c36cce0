"""The contract that every mask keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from sparsam.checks import check_interval, check_whole
from sparsam.selection import Selection

Setting = int | float | str | None | dict[str, "Setting"]


class StepKind(NamedTuple):
    """What a step does beside perturbing the weights that the mask selected."""

    cut: str | None = None
    """Only what lies behind the input of this module is perturbed, and what lies before it is not computed twice."""
    everything: bool = False
    """Everything is perturbed, whatever the mask selected."""
    rho: float | None = None
    """In place of the groups' rho."""
    one_pass: bool = False
    """The step is the base optimizer's, with the gradient of one pass: the closure is called once."""
    momentum_rho: float | None = None
    """That pass is at weights that are perturbed along the momentum, by so much."""


class Mask(ABC):
    """Says which weights a step perturbs.

    A mask holds settings, no state: what it selected last is kept by the optimizer and handed back as
    `previous`, and its random numbers depend on `seed` and the step alone. So the same settings give the
    same masks in every process, and after a resume.

    Args:
        interval: The mask is made anew every `interval` optimizer steps; None: made once, before the first.
        seed: Where the mask's own random numbers start; saved and restored with the optimizer's state.
    """

    differs_by_rank: ClassVar[bool] = True
    """Whether processes that train one model together could select different weights."""

    model: nn.Module | None = None
    """The model the mask looks at, if any; the default for the optimizer's `model`."""

    cut: str | None = None
    """The module whose input is the first that any step is cut at, if the mask cuts: only what lies behind is its."""

    momentum_rho: float | None = None
    """How far steps of one pass perturb along the momentum, which the base optimizer must have."""

    length: int | None = None
    """How many steps training has, where it matters that there are no more."""

    norm: str = "whole"
    """Whose norm a perturbation is divided by: the "whole" gradient's, or that of the part that is "perturbed"."""

    def __init__(self, interval: int | None = None, seed: int = 0) -> None:
        check_interval(interval)
        check_whole("seed", seed, least=0)
        self.interval = None if interval is None else int(interval)
        self.seed = int(seed)

    @abstractmethod
    def select(self, params: Sequence[Tensor], step: int, previous: Selection | None) -> Selection:
        """Return which weights are perturbed from this step on.

        Args:
            params: The parameters that require a gradient, in the optimizer's order. Their `.grad` is the
                gradient of the first pass, at w (None where there is none).
            step: How many optimizer steps were taken before this one.
            previous: What was selected before; None at the first time.
        """

    def kind(self, step: int) -> StepKind:
        """Return what kind of step the one with this number is. Most masks know only one kind."""
        return StepKind()

    def settings(self) -> dict[str, Setting]:
        """Return what a resumed run must have in common with the saved one; a subclass adds its own."""
        return {"kind": type(self).__name__, "interval": self.interval}

    def __repr__(self) -> str:
        kind, *rest = self.settings().items()
        return f"{kind[1]}({', '.join(f'{name}={value!r}' for name, value in rest)})"
