"""The ways to train. Each is one setting for all workloads, apart from rho where a search is asked for.

To add a way, add an entry to METHODS: a function that gets a :class:`Task` and returns a :class:`Stepper`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from sparsam import (
    SAM,
    DynamicMask,
    EveryNth,
    FisherMask,
    FriendlyAscent,
    GradientAscent,
    LastSteps,
    MomentumAscent,
    SuffixMask,
)
from sparsam.replay.counting import PERTURBING, count_costs
from sparsam.thrifty import FRIENDLY, choose

from .workloads import Data, Workload

AVERAGED = 0.995  # how much of the mean of the weights stays in a step


@dataclass
class Task:
    """What a method trains.

    Args:
        workload: The task.
        data: Its data.
        model: Its network, new.
        steps: The steps of the training.
        rho: The radius; None where nothing is perturbed.
        every_step: Whether every step is sharpness-aware, whatever the method's schedule is, as to time it.
    """

    workload: Workload
    data: Data
    model: nn.Module
    steps: int
    rho: float | None
    every_step: bool = False

    def base(self, decay: float = 1.0) -> Optimizer:
        """Build the base optimizer, with a multiple of its weight decay."""
        settings = {**self.workload.settings, "weight_decay": decay * self.workload.settings["weight_decay"]}
        return self.workload.base(self.model.parameters(), **settings)

    def sam(self, **options: Any) -> SAM:
        """Build a SAM around it."""
        if self.every_step:
            options.pop("schedule", None)
        return SAM.wrap(self.base(), rho=self.rho, model=self.model, **options)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        return self.workload.loss(self.model(x), y)


@dataclass
class Stepper:
    """How a method takes steps.

    Args:
        opt: The optimizer.
        step: Takes a step on a batch and returns the loss.
        cost: The mean cost of a step, counted in passes of the base optimizer.
        average: If given, the mean of the weights, which is evaluated instead of the weights.
    """

    opt: Optimizer
    step: Callable[[Tensor, Tensor], Tensor]
    cost: float
    average: AveragedModel | None = None


def plain(task: Task, *, decay: float = 1.0) -> Stepper:
    """Train with the base optimizer, with a multiple of its weight decay."""
    opt = task.base(decay)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = task.loss(x, y)
        loss.backward()
        opt.step()
        return loss

    return Stepper(opt, step, 1.0)


def averaged(task: Task) -> Stepper:
    """Train with the base optimizer, and evaluate an exponential mean of its weights."""
    stepper = plain(task)
    mean = AveragedModel(task.model, multi_avg_fn=get_ema_multi_avg_fn(AVERAGED), use_buffers=True)
    inner = stepper.step

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = inner(x, y)
        mean.update_parameters(task.model)
        return loss

    return Stepper(stepper.opt, step, stepper.cost, mean)


def by_closure(task: Task, opt: SAM, cost: float) -> Stepper:
    """Take steps with a closure."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        def closure(rows: Callable[[Tensor], Tensor] = lambda t: t) -> Tensor:
            opt.zero_grad()
            loss = task.loss(rows(x), rows(y))
            loss.backward()
            return loss

        return opt.step(closure)

    return Stepper(opt, step, cost)


def sam(task: Task, *, adaptive: bool = False) -> Stepper:
    """Train with SAM in every step, or with ASAM."""
    return by_closure(task, task.sam(adaptive=adaptive), 2.0)


def every_seventh(task: Task) -> Stepper:
    """Train with SAM in every seventh step."""
    return by_closure(task, task.sam(schedule=EveryNth(7)), 1 + 1 / 7)


def momentum(task: Task) -> Stepper:
    """Train with Momentum-SAM, whose steps take one pass."""
    return by_closure(task, task.sam(ascent=MomentumAscent()), 1.0)


def sparse(task: Task, *, kind: str) -> Stepper:
    """Train with the paper's sparse SAM: half of the weights, a new mask each epoch."""
    epoch = len(task.data.train[0]) // task.workload.batch_size
    if kind == "fisher":
        dataset = TensorDataset(*task.data.train)
        samples = min(128, len(dataset))
        mask: Any = FisherMask(0.5, task.model, task.workload.loss, dataset, samples=samples, interval=epoch)
    else:
        mask = DynamicMask(0.5, interval=epoch, total_steps=task.steps)
    return by_closure(task, task.sam(mask=mask), 2.0)


def thrifty(task: Task, *, budget: float, friendly: bool) -> Stepper:
    """Train as `sparsam.thrifty` does, along F-SAM's direction or along the gradient of the batch."""
    x = task.data.train[0][: task.workload.batch_size]
    counts = count_costs(task.model, x)
    choice = choose(counts, total_steps=task.steps, budget=budget, perturbing=FRIENDLY if friendly else PERTURBING)
    opt = task.sam(
        mask=SuffixMask(task.model, choice.cut),
        ascent=FriendlyAscent() if friendly else GradientAscent(),
        schedule=LastSteps(choice.fraction, task.steps),
    )
    return by_closure(task, opt, choice.cost)


def share(task: Task, *, share: float, last: float = 1.0) -> Stepper:
    """Train with SAM on a share of the batch, in every step or in the last ones."""
    batch = task.workload.batch_size
    part = max(1, round(share * batch)) / batch
    schedule = None if last == 1 else LastSteps(last, task.steps)
    return by_closure(task, task.sam(share=share, schedule=schedule), 1 + last * part)


def along_the_batch(task: Task, *, share: float) -> Stepper:
    """Perturb the share along the gradient of the whole batch, which takes the place of the rest's at w."""
    opt, batch = task.sam(), task.workload.batch_size
    rows = max(1, round(share * batch))
    params = [p for p in task.model.parameters() if p.requires_grad]

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = task.loss(x, y)
        loss.backward()
        at_w = [(1 - rows / batch) * p.grad for p in params]
        with opt.perturbed():
            opt.zero_grad()
            (rows / batch * task.loss(x[:rows], y[:rows])).backward()
        torch._foreach_add_([p.grad for p in params], at_w)
        opt.step()
        return loss

    return Stepper(opt, step, 1 + rows / batch)


def small_groups(task: Task, *, groups: int) -> Stepper:
    """Perturb each part of the batch along its own gradient (m-sharpness), with the base step's gradient their mean."""
    opt = task.sam()
    params = [p for p in task.model.parameters() if p.requires_grad]

    def step(x: Tensor, y: Tensor) -> Tensor:
        total: list[Tensor] = [torch.zeros_like(p) for p in params]
        losses = []
        for part_x, part_y in zip(x.chunk(groups), y.chunk(groups), strict=True):
            opt.zero_grad()
            losses.append(task.loss(part_x, part_y))
            losses[-1].backward()
            with opt.perturbed():
                opt.zero_grad()
                (len(part_x) / len(x) * task.loss(part_x, part_y)).backward()
            torch._foreach_add_(total, [p.grad for p in params])
        for p, grad in zip(params, total, strict=True):
            p.grad = grad
        opt.step()
        return torch.stack([loss.detach() for loss in losses]).mean()

    return Stepper(opt, step, 2.0)


RHOS = (0.1, 0.2, 0.4, 0.8, 1.6)  # what a search tries
ADAPTIVE_RHOS = (0.5, 1.0, 2.0, 4.0, 8.0)  # ASAM's


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Args:
        title: What it is called.
        build: Makes its steps.
        rho: The radius for all workloads; None where nothing is perturbed.
        search: The radii among which the best on validation data is searched, for a row that stands apart.
        epochs: How long it trains, as a multiple of the base optimizer's epochs.
        passes: Roughly what an epoch costs, as a multiple of the base optimizer's.
    """

    title: str
    build: Callable[[Task], Stepper]
    rho: float | None = None
    search: tuple[float, ...] = ()
    epochs: float = 1.0
    passes: float = 1.0


def thrifty_row(budget: float, *, friendly: bool, search: tuple[float, ...] = ()) -> Method:
    """Return the row of a budget."""
    title = f"thrifty SAM, {budget}" + ("" if friendly else ", along the gradient")
    return Method(title, partial(thrifty, budget=budget, friendly=friendly), 0.2, search, passes=budget)


METHODS: dict[str, Method] = {
    "base": Method("base optimizer", plain),
    "base-1.15": Method("base optimizer, 1.15 times the epochs", plain, epochs=1.15),
    "base-2": Method("base optimizer, twice the epochs", plain, epochs=2.0),
    "average": Method("base optimizer, mean of its weights", averaged),
    "decay-3": Method("base optimizer, 3 times the weight decay", partial(plain, decay=3.0)),
    "decay-10": Method("base optimizer, 10 times the weight decay", partial(plain, decay=10.0)),
    "momentum": Method("Momentum-SAM", momentum, 0.4),
    "thrifty-1.15": thrifty_row(1.15, friendly=True, search=RHOS),
    "thrifty-1.35": thrifty_row(1.35, friendly=True),
    "gradient-1.15": thrifty_row(1.15, friendly=False, search=RHOS),
    "gradient-1.35": thrifty_row(1.35, friendly=False),
    "share-16": Method("SAM on 1/16 of the batch", partial(share, share=1 / 16), 0.4, passes=1.1),
    "share-8": Method("SAM on 1/8 of the batch", partial(share, share=1 / 8), 0.4, RHOS, passes=1.2),
    "share-4": Method("SAM on 1/4 of the batch", partial(share, share=1 / 4), 0.4, RHOS, passes=1.3),
    "share-4-late": Method(
        "SAM on 1/4 of the batch, the last 60 %", partial(share, share=1 / 4, last=0.6), 0.4, passes=1.2
    ),
    "share-8-batch": Method(
        "SAM on 1/8 of the batch, along the batch's gradient", partial(along_the_batch, share=1 / 8), 0.4, passes=1.2
    ),
    "groups-8": Method("SAM by eighths of the batch", partial(small_groups, groups=8), 0.1, passes=2.2),
    "seventh": Method("SAM, every seventh step", every_seventh, 0.4, passes=1.2),
    "sam": Method("SAM", sam, 0.1, RHOS, passes=2.0),
    "asam": Method("ASAM", partial(sam, adaptive=True), 1.0, ADAPTIVE_RHOS, passes=2.1),
    "ssam-f": Method("SSAM-F, half of the weights", partial(sparse, kind="fisher"), 0.1, passes=2.1),
    "ssam-d": Method("SSAM-D, half of the weights", partial(sparse, kind="dynamic"), 0.1, passes=2.1),
}
