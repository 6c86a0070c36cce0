"""SSAM-D: a mask that learns which weights to perturb by dropping and growing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsam.checks import check_choice, check_share, check_whole
from sparsam.distributed.shards import aligned, true_on_all_ranks
from sparsam.masks.sparsity import SparseMask
from sparsam.selection import flatten, largest, perturbed_count, random_scores
from sparsam.settings import Setting

CRITERIA = ("flattest", "sharpest", "random")
START, DROP, GROW = range(3)  # what random numbers are drawn for
KEPT, DROPPED = 2.0, -1.0  # a random score lies between


class DynamicMask(SparseMask):
    r"""SSAM-D: starts at random; each update drops the flattest perturbed weights and grows others at random.

    .. math::  N_{drop} = \frac{\alpha}{2}\Big(1 + \cos\frac{\pi t}{T}\Big)\,(1-s)\,|w|
               \quad (0 \text{ for } t \ge T), \qquad N_{growth} = N_{drop}

    at most as many as can grow, :math:`s\,|w|`. Dropped are the perturbed weights with the smallest
    :math:`|\nabla f(w)|` of the step's first pass (no gradient counts as 0). Growth is uniform over the weights
    that were not perturbed before the update. The number of perturbed weights never changes. A first
    pass with a gradient that is not finite leaves the mask as it is.

    Args:
        sparsity: The share s of the weights that is not perturbed, in [0, 1].
        interval: Update every `interval` steps; None: once, in the first step.
        total_steps: T, the number of steps over which the drop ratio decays to 0.
        drop: :math:`\alpha`, the share of the perturbed weights that the first update drops, in [0, 1].
        criterion: What is dropped: "flattest" (the paper's), or its ablations "sharpest" and "random".
        seed: Where the mask's own random numbers start.
    """

    def __init__(
        self,
        sparsity: float,
        *,
        interval: int | None,
        total_steps: int,
        drop: float = 0.5,
        criterion: str = "flattest",
        seed: int = 0,
    ) -> None:
        check_whole("total_steps", total_steps)
        check_share("drop", drop)
        check_choice("criterion", criterion, CRITERIA)
        super().__init__(sparsity, interval, seed)
        self.total_steps, self.drop, self.criterion = int(total_steps), float(drop), criterion

    def settings(self) -> dict[str, Setting]:
        """Return what a resumed run must have in common with the saved one."""
        return {**super().settings(), "total_steps": self.total_steps, "drop": self.drop, "criterion": self.criterion}

    def drop_count(self, total: int, step: int) -> int:
        """Return how many of `total` weights an update before this step drops, and grows."""
        if step >= self.total_steps:
            return 0
        decay = self.drop / 2 * (1 + math.cos(math.pi * step / self.total_steps))
        k = perturbed_count(total, self.sparsity)
        return min(round(decay * (1 - self.sparsity) * total), k, total - k)

    def flat_scores(self, params: Sequence[Tensor], step: int, previous: Tensor | None) -> Tensor:
        """Rank what is kept before what grows, by chance, before what is dropped."""
        total = sum(p.numel() for p in params)

        def chance(purpose: int) -> Tensor:
            return random_scores(params, self.seed, step, purpose)

        if previous is None:
            previous = largest(chance(START), perturbed_count(total, self.sparsity), params)
        g = flatten(aligned(p.grad, p) if p.grad is not None else torch.zeros_like(p) for p in params).abs()
        order = {"flattest": -g, "sharpest": g}.get(self.criterion)
        if order is None:
            order = chance(DROP)
        drop = largest(order.where(previous, -torch.inf), self.drop_count(total, step), params)
        drop &= true_on_all_ranks(torch.isfinite(g).all(), params)
        return chance(GROW).where(~previous, KEPT).where(~drop, DROPPED)
