"""One run: a workload, a method, a radius, a seed. From top to bottom."""

from __future__ import annotations

import copy
import math
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from sparsam.randomness import random_generator

from .methods import METHODS, Task
from .workloads import WORKLOADS, Batch, Data, Workload

LOOKS = 10  # at the validation data, roughly
BITS = (8, 4, 3)  # of the rounded weights


def train(
    workload: str, method: str, rho: float | None, seed: int, data_root: Path, device: str = "cpu"
) -> dict[str, Any]:
    """Train, and return the curve, the cost and the metrics."""
    task, way = WORKLOADS[workload], METHODS[method]
    data = loaded(workload, data_root, device)
    torch.manual_seed(seed)
    model = task.network().to(device)
    (x, y), size = data.train, task.batch_size
    epochs, epoch_steps = round(way.epochs * task.epochs), len(x) // size
    stepper = way.build(Task(task, data, model, epochs * epoch_steps, rho))
    schedule = LambdaLR(stepper.opt, cosine(epochs * epoch_steps, task.warmup_epochs * epoch_steps))
    evaluated = stepper.average or model
    curve, best, seconds = [], None, 0.0
    for epoch in range(epochs):
        model.train()
        order = torch.randperm(len(x), generator=random_generator(seed, epoch)).to(device)
        losses, start = [], time.process_time()
        for i in range(epoch_steps):
            chosen = order[i * size : (i + 1) * size]
            losses.append(stepper.step(x[chosen], y[chosen]).detach())
            schedule.step()
        seconds += time.process_time() - start
        curve.append({"epoch": epoch + 1, "train_loss": torch.stack(losses).mean().item()})
        if (epochs - epoch - 1) % max(1, epochs // LOOKS) == 0:
            score = curve[-1]["validation"] = evaluate(task, evaluated, data.validation)
            if best is None or is_better(task, score, best["validation"]):
                best = {"validation": score, "epoch": epoch + 1, "state": copy.deepcopy(evaluated.state_dict())}
        print(curve[-1], flush=True)
    result = {
        "rho": stepper.opt.param_groups[0].get("rho"),
        "epochs": epochs,
        "steps": epochs * epoch_steps,
        "unit": task.unit,
        "recipe": {
            "base": task.base.__name__,
            "batch_size": size,
            "warmup_epochs": task.warmup_epochs,
            **task.settings,
        },
        "optimizer": repr(stepper.opt),
        "cost": {"counted": way.epochs * stepper.cost, "cpu_seconds": seconds},
        "validation": {"last": curve[-1]["validation"], "best": best["validation"], "best_epoch": best["epoch"]},
        "test": {"last": evaluate(task, evaluated, data.test)},
        "rounded": {str(bits): evaluate(task, rounded(evaluated, bits), data.test) for bits in BITS},
        "curve": curve,
    }
    evaluated.load_state_dict(best["state"])
    result["test"]["best"] = evaluate(task, evaluated, data.test)
    return finite(result)


@cache
def loaded(workload: str, root: Path, device: str) -> Data:
    """Return the data of a workload, which a process reads once."""
    return WORKLOADS[workload].load(root).to(device)


def cosine(steps: int, warmup: int) -> Any:
    """Return a learning rate's factor over the steps: a linear rise, then a cosine to 0."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2

    return factor


@torch.no_grad()
def evaluate(task: Workload, model: nn.Module, batch: Batch) -> float:
    """Return the metric in eval mode."""
    training = model.training
    model.eval()
    total, parts = 0.0, zip(*(t.split(500) for t in batch), strict=True)
    for x, y in parts:
        total += len(x) * task.score(model(x), y).item()
    model.train(training)
    return total / len(batch[0])


def is_better(task: Workload, score: float, best: float) -> bool:
    """Return whether a score is better than the best so far."""
    return score < best if task.lower_is_better else score > best


def rounded(model: nn.Module, bits: int) -> nn.Module:
    """Return a copy whose matrices are rounded to a number of bits, with a scale for each output."""
    copied, levels = copy.deepcopy(model), 2 ** (bits - 1) - 1
    with torch.no_grad():
        for p in copied.parameters():
            if p.dim() > 1:
                rows = p.flatten(1)
                scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-12) / levels
                p.copy_((rows / scale).round().mul(scale).view_as(p))
    return copied


def finite(value: Any) -> Any:
    """Return plain values in which numbers that are not finite are None, as JSON has no others."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    if isinstance(value, Tensor):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
