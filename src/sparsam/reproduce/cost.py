"""What runs would take, from a measured step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sparsam.data.shapes import SHAPES
from sparsam.replay.clock import Clock
from sparsam.runs.build import build_network
from sparsam.runs.config import MaskConfig
from sparsam.runs.recipe import Recipe
from sparsam.schedules import EveryStep
from sparsam.training.build import build_ascent, build_base, build_sam
from sparsam.training.planned import PlannedRun, usual_epoch_steps
from sparsam.training.step import TrainingStep, is_captured
from sparsam.training.trainer import prepare_torch, total_steps

WARM_UP, STEPS = 5, 10
CPU_WARM_UP, CPU_STEPS = 1, 3
AGREE = 1.1  # how far apart the two shortest times may be; else further steps are measured, up to STEPS
CPU_IMAGES = 16  # a CPU measures small batches and counts them as often as one batch has them


@dataclass(frozen=True)
class Estimate:
    """What a run takes: steps, and seconds of each."""

    run: PlannedRun
    steps: int
    seconds: float

    @property
    def total(self) -> float:
        """Seconds of training."""
        return self.steps * self.seconds


def roughly(seconds: float) -> str:
    """Return a time with about two digits, which is what an estimate has.

    >>> [roughly(s) for s in (8.04, 99.6, 192, 4320, 7200, 404723)]
    ['8 s', '2 min', '3 min', '72 min', '2.0 h', '112 h']
    """
    if round(seconds) < 100:
        return f"{seconds:.0f} s"
    if round(seconds / 60) < 100:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 10 else f"{hours:,.0f} h"


def estimate(planned: Sequence[PlannedRun], device: torch.device) -> list[Estimate]:
    """Measure a step of each network on random images, and count the steps of each run.

    A mask that is no suffix counts as none: it saves nothing, and making it takes little. A schedule counts as every
    step, so that a run that perturbs in its last steps only takes less.
    """
    seconds: dict[object, float] = {}
    found = []
    for run in planned:
        recipe = run.recipe
        key = (recipe.model, recipe.data.name, recipe.data.batch_size, recipe.train.precision, recipe.sam.enabled)
        if key not in seconds:
            seconds[key] = step_seconds(recipe, device)
        found.append(Estimate(run, total_steps(recipe, usual_epoch_steps(recipe)), seconds[key]))
    return found


def step_seconds(recipe: Recipe, device: torch.device) -> float:
    """Return the seconds of a step on random images: of SAM if the recipe has it, else of the base optimizer.

    Of several steps the shortest counts, since what else a machine does only adds to them.
    """
    images, batch = SHAPES[recipe.data.name], recipe.data.batch_size
    used = min(batch, CPU_IMAGES) if device.type == "cpu" else batch
    prepare_torch(recipe, device)
    plain = replace(recipe, mask=MaskConfig())  # so that nothing asks for data
    model = build_network(plain, images.classes, images.channels, device).train()
    captured = is_captured(plain, device)
    if plain.sam.enabled:
        opt: torch.optim.Optimizer = build_sam(
            plain, model, mask=None, ascent=build_ascent(plain.ascent), schedule=EveryStep(), captured=captured
        )
    else:
        opt = build_base(plain, model, captured=captured)
    step, clock = TrainingStep(plain, model, opt, device), Clock(device)
    x = torch.randn(used, images.channels, images.size, images.size, device=device)
    y = torch.randint(images.classes, (used,), device=device)
    if plain.train.channels_last:
        x = x.to(memory_format=torch.channels_last)
    warm_up, steps = (CPU_WARM_UP, CPU_STEPS) if device.type == "cpu" else (WARM_UP, STEPS)
    for _ in range(warm_up):
        step(x, y)
    times: list[float] = []
    while len(times) < steps or (len(times) < STEPS and not _agree(times)):
        times.append(clock.time(lambda: step(x, y)))
    return min(times) * batch / used


def _agree(times: Sequence[float]) -> bool:
    """Tell whether the two shortest times are about the same: both were hardly disturbed."""
    shortest, second = sorted(times)[:2]
    return second <= AGREE * shortest
