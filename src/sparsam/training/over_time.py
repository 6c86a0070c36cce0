"""What changes from step to step of a run: the learning rate and rho."""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer

from sparsam.rho import RampRho
from sparsam.runs.recipe import Recipe
from sparsam.sam import SAM
from sparsam.training.build import base_steps


class OverTime:
    """Sets the learning rate and rho for each step. Both depend on the step alone: no checkpoint need hold them.

    Args:
        recipe: What is trained.
        opt: The optimizer, with the recipe's rho.
        epoch_steps: The steps of an epoch.
        total_steps: The steps of the run.
    """

    def __init__(self, recipe: Recipe, opt: Optimizer, *, epoch_steps: int, total_steps: int) -> None:
        self.opt, self.total_steps = opt, total_steps
        self.peak, self.warm_up = recipe.optimizer.lr, recipe.optimizer.warmup_epochs * epoch_steps
        self.sam = opt if isinstance(opt, SAM) else None
        self.ramp: RampRho | None = None
        if self.sam and recipe.sam.ramp_epochs:
            start = base_steps(self.sam.schedule, self.sam.ascent, total_steps)
            self.ramp = RampRho(self.sam, max(1, round(recipe.sam.ramp_epochs * epoch_steps)), start)

    def lr(self, step: int) -> float:
        """Return the learning rate of a step: a line up, then a cosine to 0 at the end of the run."""
        if step < self.warm_up:
            return self.peak * (step + 1) / self.warm_up
        return self.peak * (1 + math.cos(math.pi * (step - self.warm_up) / (self.total_steps - self.warm_up))) / 2

    def set(self, step: int) -> None:
        """Prepare the optimizer for a step of the run."""
        for group in self.opt.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.lr(step))
            else:
                group["lr"] = self.lr(step)
        if self.sam and self.ramp:
            self.ramp.go_to(self.sam.steps + 1)  # as SAM's schedule counts: without those that a gradient scaler skips
