"""What runs would take, from a measured step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsam.ascents import Ascent
from sparsam.masks import SuffixMask
from sparsam.runs.build import build_network, usual_images
from sparsam.runs.recipe import Recipe
from sparsam.schedules import EveryStep
from sparsam.step_cost import Clock
from sparsam.training.build import build_base, build_sam, count_ascents
from sparsam.training.planned import PlannedRun, usual_epoch_steps
from sparsam.training.step import TrainingStep, is_captured
from sparsam.training.trainer import prepare_torch, total_steps

WARM_UP, STEPS = 5, 10
CPU_WARM_UP, CPU_STEPS = 1, 3
AGREE = 1.1  # how far apart the two shortest times may be; else further steps are measured, up to STEPS
CPU_IMAGES = 16  # a CPU measures small batches and counts them as often as one batch has them


@dataclass(frozen=True)
class Estimate:
    """What a run takes: steps, and seconds of each, in the mean."""

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
    """Measure each sort of step of each network on random images, and count how often it comes in each run.

    The schedule says how many steps are base steps, have one pass or have two. A mask that is no suffix counts as none:
    it saves nothing, and making it takes little.
    """
    seconds: dict[object, float] = {}
    found = []
    for run in planned:
        recipe, total = run.recipe, 0.0
        steps = total_steps(recipe, usual_epoch_steps(recipe))
        for ascent, count in count_ascents(recipe, steps).items():
            sort = _sort(recipe, ascent, device)
            if sort not in seconds:
                seconds[sort] = step_seconds(recipe, ascent, device)
            total += count * seconds[sort]
        found.append(Estimate(run, steps, total / steps))
    return found


def _sort(recipe: Recipe, ascent: Ascent | None, device: torch.device) -> tuple[object, ...]:
    """Return the settings that say how long a step takes. Numbers such as the learning rate and rho do not."""
    train = recipe.train
    batch = recipe.model, usual_images(recipe), recipe.data.batch_size
    how = train.precision, train.channels_last, train.threads, train.compile, train.deterministic
    update = recipe.optimizer.name, is_captured(recipe, device)
    adaptive = ascent is not None and recipe.sam.adaptive
    return *batch, *how, *update, type(ascent), adaptive, _cut(recipe, ascent)


def _cut(recipe: Recipe, ascent: Ascent | None) -> str | None:
    """Return where steps with an ascent are cut: those with one pass are not."""
    return recipe.mask.cut if ascent is not None and ascent.passes == 2 else None


def step_seconds(recipe: Recipe, ascent: Ascent | None, device: torch.device) -> float:
    """Return the seconds of a step on random images.

    Of several steps the shortest counts, since what else a machine does only adds to them.

    Args:
        recipe: What is trained.
        ascent: Of the steps; None: they are the base optimizer's.
        device: Where.
    """
    images, batch = usual_images(recipe), recipe.data.batch_size
    used = min(batch, CPU_IMAGES) if device.type == "cpu" else batch
    prepare_torch(recipe, device)
    model = build_network(recipe, images.classes, images.channels, device).train()
    captured = is_captured(recipe, device)
    if ascent is None:
        opt = build_base(recipe, model, captured=captured)
    else:
        cut = _cut(recipe, ascent)
        mask = SuffixMask(model, cut) if cut is not None else None
        opt = build_sam(recipe, model, mask=mask, ascent=ascent, schedule=EveryStep(), captured=captured)
    step, clock = TrainingStep(recipe, model, opt, device), Clock(device)
    x = torch.randn(used, images.channels, images.size, images.size, device=device)
    y = torch.randint(images.classes, (used,), device=device)
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
