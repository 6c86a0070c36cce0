"""What a step of each method takes, in steps of the base optimizer.

All methods are set up first. Then each takes a step in turn, round after round, so that whatever else a machine does
meets all of them. What counts is the ratio to the base optimizer's step in the same round. The result is the median of
all rounds. On a CPU with one thread, the time is that of the process: while another job has the CPU, it stands still.

A method's steps may differ: base steps before the last ones, a new mask once an epoch. Each sort is timed by itself and
counts as often as it comes in a run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from sparsam.ascents import Ascent, GradientAscent
from sparsam.data import Batch, Loader
from sparsam.runs.build import build_loader, build_network
from sparsam.runs.config import MaskConfig
from sparsam.runs.recipe import Recipe
from sparsam.schedules import EveryNth, EveryStep
from sparsam.step_cost import Clock, StepRatio, times_in_turn
from sparsam.training.build import Context, build_base, build_mask, build_sam, count_ascents
from sparsam.training.step import TrainingStep, is_captured
from sparsam.training.trainer import prepare_torch, total_steps

WARM_UP = 5  # steps of each sort before the first round; a CUDA graph is captured in them
CAPTURED_STEPS = 10  # in each turn, where one is too short to be timed
NEVER = 2**62  # steps


class Part(NamedTuple):
    """Steps of one sort."""

    fraction: float  # of a run's steps
    take: Callable[[], object]


def step_ratios(
    recipes: Sequence[Recipe],
    *,
    device: torch.device,
    rounds: int,
    clock: Clock | None = None,
) -> list[StepRatio]:
    """Time the steps of several recipes in turn; return what each takes, in base steps.

    Args:
        recipes: Those with the same network, data, precision and ways to compute share a batch and the base
            optimizer's times. A recipe without SAM takes 1.
        device: Where.
        rounds: How many; none has more than the shortest run has steps.
        clock: What to take the time with; None: the device's, and on a CPU with one thread the process's.
    """
    groups: dict[object, list[int]] = {}
    for i, recipe in enumerate(recipes):
        groups.setdefault(_workload(recipe), []).append(i)
    ratios: dict[int, StepRatio] = {}
    threads = torch.get_num_threads()
    for indices in groups.values():
        torch.set_num_threads(threads)  # where a recipe does not say how many
        ratios.update(zip(indices, _time_group([recipes[i] for i in indices], device, rounds, clock), strict=True))
    return [ratios[i] for i in range(len(recipes))]


def _workload(recipe: Recipe) -> object:
    """Return what two recipes must share for their steps to be compared."""
    keys = ("precision", "channels_last", "compile", "cuda_graph", "threads", "deterministic")
    return recipe.model, recipe.data, recipe.optimizer.name, *(getattr(recipe.train, key) for key in keys)


def _time_group(recipes: Sequence[Recipe], device: torch.device, rounds: int, clock: Clock | None) -> list[StepRatio]:
    prepare_torch(recipes[0], device)
    loader = build_loader(recipes[0], device)
    batch = next(iter(loader.epoch(0)))
    base = _part(1.0, recipes[0], loader, batch)
    methods = [_parts(recipe, loader, batch) if recipe.sam.enabled else [base] for recipe in recipes]
    parts = list(dict.fromkeys([base, *itertools.chain(*methods)]))
    for part in parts:
        for _ in range(WARM_UP):
            part.take()
    clock = clock or Clock(device, process_time=device.type == "cpu" and torch.get_num_threads() == 1)
    steps = CAPTURED_STEPS if is_captured(recipes[0], device) else 1
    rounds = min(rounds, *(total_steps(recipe, loader.steps) for recipe in recipes))
    found = times_in_turn([part.take for part in parts], rounds=rounds, clock=clock, count=steps)
    times = dict(zip(parts, found, strict=True))
    means = [[sum(part.fraction * times[part][k] for part in method) for k in range(rounds)] for method in methods]
    return [StepRatio.of_times(mean, times[base]) for mean in means]


def _parts(recipe: Recipe, loader: Loader, batch: Batch) -> list[Part]:
    """Return the sorts of steps that a run of a recipe takes."""
    steps = total_steps(recipe, loader.steps)
    return [
        _part(fraction * count / steps, recipe, loader, batch, ascent, mask)
        for ascent, count in count_ascents(recipe, steps).items()
        for fraction, mask in _masks(recipe.mask, ascent, loader.steps)
    ]


def _part(
    fraction: float,
    recipe: Recipe,
    loader: Loader,
    batch: Batch,
    ascent: Ascent | None = None,
    mask: MaskConfig | None = None,
) -> Part:
    """Set up steps of one sort, with a network of their own.

    Args:
        fraction: Of a run's steps.
        recipe: What to train.
        loader: The data.
        batch: What to step on.
        ascent: Of all these steps; None: they are base steps.
        mask: An interval of an epoch is one of a step here. None: there is no SAM at all.
    """
    device = batch[0].device
    captured = is_captured(recipe, device)
    model = build_network(recipe, loader.classes, loader.channels, device).train()
    if mask is None:
        opt = build_base(recipe, model, captured=captured)
    else:
        run = Context(model, loader, epoch_steps=1, total_steps=total_steps(recipe, loader.steps), seed=0)
        opt = build_sam(
            recipe,
            model,
            mask=build_mask(mask, run),
            ascent=ascent or GradientAscent(),
            schedule=EveryNth(NEVER) if ascent is None else EveryStep(),  # step 0, which is no base step, warms up
            captured=captured,
        )
    step = TrainingStep(recipe, model, opt, device)
    return Part(fraction, lambda: step(*batch))


def _masks(config: MaskConfig, ascent: Ascent | None, epoch_steps: int) -> list[tuple[float, MaskConfig]]:
    """Return the masks that steps read, and how often: one that stays, and one that is made anew."""
    if ascent is None or ascent.passes == 1:
        return [(1.0, MaskConfig())]
    interval = (config.inner or config).interval_epochs
    if interval is None:
        return [(1.0, config)]
    made = 1 / (interval * epoch_steps)
    return [(1 - made, _with_interval(config, None)), (made, _with_interval(config, 1))]


def _with_interval(config: MaskConfig, epochs: int | None) -> MaskConfig:
    if config.inner is not None:
        return replace(config, inner=_with_interval(config.inner, epochs))
    return replace(config, interval_epochs=epochs)
