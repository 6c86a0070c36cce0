"""From a recipe to the optimizer: base, mask, ascent and schedule. One line registers each policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsam.ascents import Ascent, FriendlyAscent, GradientAscent, MomentumAscent
from sparsam.data import Loader
from sparsam.errors import UserError
from sparsam.masks import DynamicMask, FisherMask, Mask, NormMask, RandomMask, SuffixMask
from sparsam.randomness import random_generator
from sparsam.runs.recipe import Recipe
from sparsam.runs.schema import RecipeError
from sparsam.sam import SAM
from sparsam.schedules import EveryNth, EveryStep, LastSteps, Schedule

BASES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True)
class Context:
    """What masks need to know of a run."""

    model: nn.Module
    loader: Loader
    epoch_steps: int
    total_steps: int
    seed: int


# Each builder gets the table of its name; what has a meaning for that name is not None.
MASKS: dict[str, Callable[[Any, Context], Mask | None]] = {
    "dense": lambda config, run: None,
    "random": lambda config, run: RandomMask(config.sparsity, **_updates(config, run)),
    "fisher": lambda config, run: FisherMask(
        config.sparsity,
        run.model,
        F.cross_entropy,  # not smoothed: the Fisher information is that of the labels' likelihood
        run.loader.samples(),
        samples=config.samples,
        **_updates(config, run),
    ),
    "dynamic": lambda config, run: DynamicMask(
        config.sparsity,
        total_steps=run.total_steps,
        drop=config.drop,
        criterion=config.criterion,
        **_updates(config, run),
    ),
    "norm": lambda config, run: NormMask(run.model),
    "suffix": lambda config, run: SuffixMask(
        run.model, config.cut, inner=build_mask(config.inner, run, "mask.inner") if config.inner else None
    ),
}
ASCENTS: dict[str, Callable[[Any], Ascent]] = {
    "gradient": lambda config: GradientAscent(),
    "friendly": lambda config: FriendlyAscent(config.sigma, config.decay),
    "momentum": lambda config: MomentumAscent(config.rho),
}
SCHEDULES: dict[str, Callable[[Any, int], Schedule]] = {
    "every-step": lambda config, total_steps: EveryStep(),
    "every-nth": lambda config, total_steps: EveryNth(config.n),
    "last-steps": lambda config, total_steps: LastSteps(
        config.fraction, total_steps, build_ascent(config.before, "schedule.before") if config.before else None
    ),
}


def build_mask(config: Any, run: Context, key: str = "mask") -> Mask | None:
    """Build a mask from its table; None: all weights."""
    with _naming(key, config):
        return MASKS[config.name](config, run)


def build_ascent(config: Any, key: str = "ascent") -> Ascent:
    """Build an ascent from its table."""
    with _naming(key, config):
        return ASCENTS[config.name](config)


def build_schedule(config: Any, total_steps: int) -> Schedule:
    """Build a schedule from its table."""
    with _naming("schedule", config):
        return SCHEDULES[config.name](config, total_steps)


def count_ascents(recipe: Recipe, total_steps: int) -> Counter[Ascent | None]:
    """Return how many of a run's steps each ascent takes; None: steps of the base optimizer.

    Args:
        recipe: What is trained.
        total_steps: The steps of the run.
    """
    if not recipe.sam.enabled:
        return Counter({None: total_steps})
    main, schedule = build_ascent(recipe.ascent), build_schedule(recipe.schedule, total_steps)
    return Counter(schedule.ascent(step, main) for step in range(total_steps))


def base_steps(schedule: Schedule, ascent: Ascent, total_steps: int) -> int:
    """Return how many base steps a run takes before all others.

    Args:
        schedule: Which steps perturb.
        ascent: The optimizer's.
        total_steps: The steps of the run.
    """
    perturbs = (step for step in range(total_steps) if schedule.ascent(step, ascent) is not None)
    return next(perturbs, total_steps)


def build_base(recipe: Recipe, model: nn.Module, *, captured: bool) -> torch.optim.Optimizer:
    """Build the base optimizer.

    Args:
        recipe: What to build.
        model: The network.
        captured: Whether steps are captured in a CUDA graph: the learning rate is then a device tensor.
    """
    settings = recipe.optimizer
    options: dict[str, Any] = {"lr": _number(settings.lr, model, captured), "weight_decay": settings.weight_decay}
    if settings.momentum is not None:
        options["momentum"] = settings.momentum
    if captured:
        options["fused"] = True  # the variants that read a learning-rate tensor on the device
        if settings.name != "sgd":
            options["capturable"] = True
    return BASES[settings.name](model.parameters(), **options)


def build_optimizer(recipe: Recipe, run: Context, *, captured: bool) -> torch.optim.Optimizer:
    """Build the base optimizer, and SAM around it.

    Args:
        recipe: What to build.
        run: The network, the data and the length of the run.
        captured: Whether steps are captured in a CUDA graph: the learning rate and rho are then device tensors.
    """
    if not recipe.sam.enabled:
        return build_base(recipe, run.model, captured=captured)
    mask, ascent = build_mask(recipe.mask, run), build_ascent(recipe.ascent)
    schedule = build_schedule(recipe.schedule, run.total_steps)
    return build_sam(recipe, run.model, mask=mask, ascent=ascent, schedule=schedule, captured=captured)


def build_sam(
    recipe: Recipe,
    model: nn.Module,
    *,
    mask: Mask | None,
    ascent: Ascent,
    schedule: Schedule,
    captured: bool,
) -> SAM:
    """Build SAM around a recipe's base optimizer, with the given policies."""
    base = build_base(recipe, model, captured=captured)
    return SAM.wrap(
        base,
        rho=_number(recipe.sam.rho, model, captured),
        mask=mask,
        ascent=ascent,
        schedule=schedule,
        adaptive=recipe.sam.adaptive,
        model=model,
        share=recipe.sam.share,
    )


def _updates(config: Any, run: Context) -> dict[str, Any]:
    """Return the interval in steps, and a seed that depends on that of the run."""
    interval = None if config.interval_epochs is None else config.interval_epochs * run.epoch_steps
    return {"interval": interval, "seed": random_generator(run.seed, config.seed).initial_seed()}


@contextmanager
def _naming(key: str, config: Any) -> Iterator[None]:
    """Show errors of constructors with the key in the recipe."""
    try:
        yield
    except RecipeError:
        raise  # of an inner table, which has named itself
    except UserError as error:
        text = str(error)
        named = text.partition(" ")[0] in {f.name for f in fields(config)}
        raise RecipeError(f"{key}.{text}" if named else f"{key}: {text}") from error


def _number(value: float, model: nn.Module, captured: bool) -> float | Tensor:
    return torch.tensor(value, device=next(model.parameters()).device) if captured else value
