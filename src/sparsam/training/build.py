"""From a recipe to the objects that train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsam.data import Loader
from sparsam.masks import BudgetMask, DynamicMask, FisherMask, Mask, NormMask, RandomMask
from sparsam.randomness import random_generator
from sparsam.runs.recipe import Recipe
from sparsam.sam import SAM

BASES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def build_mask(recipe: Recipe, model: nn.Module, loader: Loader, kind: str = "") -> Mask | None:
    """Build the mask; its interval in epochs becomes one in steps.

    Args:
        recipe: What to build.
        model: The network.
        loader: The data, for masks that look at it.
        kind: Another kind than the recipe's.
    """
    settings = recipe.mask
    kind = kind or settings.kind
    if kind == "budget":
        return BudgetMask(
            model,
            budget=settings.budget,
            cut=settings.cut or None,
            full=settings.full,
            full_rho=settings.full_rho or None,
            total_steps=recipe.train.epochs * loader.steps if settings.late else None,
            late_share=settings.late_share or None,
            momentum_rho=settings.momentum_rho or None,
            norm=settings.norm,
            within=build_mask(recipe, model, loader, settings.within) if settings.within else None,
        )
    interval = settings.interval_epochs * loader.steps or None
    seed = random_generator(recipe.train.seed, settings.seed).initial_seed()  # runs with other seeds have other masks
    if kind == "random":
        return RandomMask(settings.sparsity, interval=interval, seed=seed)
    if kind == "dynamic":
        return DynamicMask(
            settings.sparsity,
            interval=interval,
            total_steps=recipe.train.epochs * loader.steps,
            drop=settings.drop,
            criterion=settings.criterion,
            seed=seed,
        )
    if kind == "fisher":
        return FisherMask(
            settings.sparsity,
            model,
            F.cross_entropy,  # not smoothed: the Fisher information is that of the labels' likelihood
            loader.samples(),
            samples=settings.samples,
            interval=interval,
            seed=seed,
        )
    return NormMask(model) if kind == "norm" else None


def build_base(recipe: Recipe, model: nn.Module, *, captured: bool) -> torch.optim.Optimizer:
    """Build the base optimizer.

    Args:
        recipe: What to build.
        model: The network.
        captured: Whether steps are to be captured in a CUDA graph: the learning rate is then a device tensor.
    """
    settings = recipe.optimizer
    options: dict[str, Any] = {"lr": _number(settings.lr, model, captured), "weight_decay": settings.weight_decay}
    if settings.name == "sgd":
        options["momentum"] = settings.momentum
    if captured:
        options["fused"] = True  # the variants that read a learning-rate tensor on the device
        if settings.name != "sgd":
            options["capturable"] = True
    return BASES[settings.name](model.parameters(), **options)


def build_optimizer(recipe: Recipe, model: nn.Module, loader: Loader, *, captured: bool) -> torch.optim.Optimizer:
    """Build the base optimizer, and SAM around it.

    Args:
        recipe: What to build.
        model: The network.
        loader: The data, for masks that look at it.
        captured: Whether steps are to be captured in a CUDA graph: the learning rate and rho are then device tensors.
    """
    base = build_base(recipe, model, captured=captured)
    if not recipe.sam.enabled:
        return base
    rho = _number(recipe.sam.rho, model, captured)
    mask = build_mask(recipe, model, loader)
    return SAM.wrap(base, rho=rho, mask=mask, adaptive=recipe.sam.adaptive, model=model)


def _number(value: float, model: nn.Module, captured: bool) -> float | Tensor:
    return torch.tensor(value, device=next(model.parameters()).device) if captured else value
