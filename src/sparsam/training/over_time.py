"""What changes from step to step of a run: the learning rate and rho."""

from __future__ import annotations

import math
from decimal import ROUND_DOWN, Context, Decimal

from torch import Tensor
from torch.optim import Optimizer

from sparsam.ascents import Ascent
from sparsam.rho import RampRho
from sparsam.runs.recipe import Recipe
from sparsam.runs.schema import RecipeError
from sparsam.sam import SAM
from sparsam.schedules import Schedule
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
        if self.sam:
            policies = self.sam.schedule, self.sam.ascent
            ramp = ramp_of(recipe, *policies, epoch_steps=epoch_steps, total_steps=total_steps)
            self.ramp = RampRho(self.sam, *ramp) if ramp else None

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


def ramp_of(
    recipe: Recipe, schedule: Schedule, ascent: Ascent, *, epoch_steps: int, total_steps: int
) -> tuple[int, int] | None:
    """Return the steps of a recipe's ramp and those before it; None if rho does not change.

    Args:
        recipe: What is trained.
        schedule: Which steps perturb.
        ascent: The optimizer's.
        epoch_steps: The steps of an epoch.
        total_steps: The steps of the run.

    Raises:
        RecipeError: The last step that perturbs comes before the end of the ramp.
    """
    epochs = recipe.sam.ramp_epochs
    if not epochs:
        return None
    start, steps = base_steps(schedule, ascent, total_steps), max(1, round(epochs * epoch_steps))
    perturbs = (step for step in reversed(range(total_steps)) if schedule.ascent(step, ascent) is not None)
    room = next(perturbs, start - 1) + 1 - start
    if steps > room:
        most = Context(prec=3, rounding=ROUND_DOWN).divide(Decimal(room), Decimal(epoch_steps))
        raise RecipeError(
            f"sam.ramp_epochs is {epochs:g}, which is {steps} steps, but the sharpness-aware part of the run has "
            f"{room}: rho would not reach {recipe.sam.rho:g}; choose at most {most.normalize():f}, or train for longer"
        )
    return steps, start
