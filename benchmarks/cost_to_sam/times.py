"""What a method costs in time: its steps and the base optimizer's in turn, round after round."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from in_turn import machine, write
from torch import Tensor

from sparsam import SAM
from sparsam.step_cost import Clock, StepRatio, times_in_turn

from .methods import METHODS, Stepper, Task
from .workloads import WORKLOADS, Data, Workload

WARM_UP, STEPS = 4, 2  # steps before the first turn, which also prove a cut, and steps of a turn


def measure(options: Any) -> int:
    """Time the methods on each workload and write a file."""
    torch.set_num_threads(1)
    device = torch.device(options.device)
    result: dict[str, Any] = {**machine(device), "rounds": options.rounds, "steps": STEPS, "costs": {}}
    methods = [*dict.fromkeys(["base", *options.methods])]
    for workload in options.workloads:
        task = WORKLOADS[workload]
        result["costs"][workload] = costs(task, task.load(options.data).to(options.device), methods, options.rounds)
        write(result, options.output)
    return 0


def costs(task: Workload, data: Data, methods: list[str], rounds: int) -> dict[str, Any]:
    """Return what each method costs on a workload, in base steps, and what that follows from."""
    batch = tuple(t[: task.batch_size] for t in data.train)
    steps = [taking(build(name, task, data, every_step=True), *batch) for name in methods]
    for step in steps:
        for _ in range(WARM_UP):
            step()
    clock = Clock(batch[0].device, process_time=True)
    times = dict(zip(methods, times_in_turn(steps, rounds=rounds, clock=clock, count=STEPS), strict=True))
    found = {}
    for name in methods:
        method, q = METHODS[name], fraction(build(name, task, data), steps_of(task, data))
        ratio = StepRatio.of_times(times[name], times["base"])
        cost = method.epochs * (1 + q * (ratio.median - 1))
        found[name] = {"cost": cost, "fraction": q, "step": ratio.to_dict(), "milliseconds": 1000 * median(times[name])}
        print(f"{task.name}, {method.title}: {cost:.2f} base steps; a step of its own {ratio}", flush=True)
    return found


def build(name: str, task: Workload, data: Data, every_step: bool = False) -> Stepper:
    """Return a method's steps for a new network."""
    model = task.network().to(data.train[0].device)
    return METHODS[name].build(Task(task, data, model, steps_of(task, data), METHODS[name].rho, every_step))


def steps_of(task: Workload, data: Data) -> int:
    """Return how many steps the base optimizer takes."""
    return task.epochs * (len(data.train[0]) // task.batch_size)


def taking(stepper: Stepper, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Return a function that takes a step."""
    return lambda: stepper.step(x, y)


def fraction(stepper: Stepper, steps: int) -> float:
    """Return which part of a training's steps are the method's own, and not the base optimizer's."""
    opt = stepper.opt
    if not isinstance(opt, SAM):
        return 1.0
    own = [opt.schedule.ascent(step, opt.ascent) is not None for step in range(steps)]
    return sum(own) / steps
