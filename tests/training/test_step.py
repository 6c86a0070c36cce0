"""Steps with a gradient scaler: as many passes as with a closure, and the same result."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from digits_runs import CPU, recipe

from sparsam.runs.build import build_loader, build_network
from sparsam.training.build import Context, build_optimizer
from sparsam.training.step import TrainingStep

LATE = ["schedule=last-steps", "schedule.fraction=0.5"]

# Of six steps: how many forward passes each takes.
CASES = {
    "sgd": ("sgd", [], [1] * 6),
    "sam": ("sam", [], [2] * 6),
    "dynamic": ("ssam-d", [], [2] * 6),
    "base steps, then friendly ones": ("sam", [*LATE, "ascent=friendly"], [1, 1, 1, 2, 2, 2]),
    "one pass, then two": ("sam", [*LATE, "schedule.before=momentum", "schedule.before.rho=0.5"], [1, 1, 1, 2, 2, 2]),
}


def take_steps(case, precision):
    """Return the losses, the weights and the passes of six steps."""
    torch.manual_seed(0)
    method, settings, _ = CASES[case]
    r = recipe(method, f"train.precision={precision}", *settings)
    loader = build_loader(r, CPU)
    model = build_network(r, loader.classes, loader.channels, CPU)
    opt = build_optimizer(r, Context(model, loader, loader.steps, total_steps=6, seed=0), captured=False)
    step = TrainingStep(r, model, opt, CPU)
    losses, passes = [], []
    model.register_forward_hook(lambda *_: passes.append(len(losses)))
    for x, y in islice(loader.epoch(0), 6):
        losses.append(step(x, y).item())
    return losses, [p.detach() for p in model.parameters()], [passes.count(i) for i in range(6)]


def distance(one, other):
    return torch.stack([(a - b).square().sum() for a, b in zip(one, other, strict=True)]).sum().sqrt().item()


@pytest.fixture(scope="module")
def sgd():
    return take_steps("sgd", "fp32")


@pytest.mark.parametrize("case", CASES)
def test_fp16_steps_with_a_scaler_are_fp32_steps_but_for_rounding(case, sgd):
    scaled, exact = take_steps(case, "fp16"), take_steps(case, "fp32")
    assert scaled[2] == exact[2] == CASES[case][2]
    assert scaled[0] == pytest.approx(exact[0], rel=2e-3)
    if case != "sgd":
        assert distance(scaled[1], exact[1]) < 0.1 * distance(exact[1], sgd[1])  # far closer than steps of SGD
