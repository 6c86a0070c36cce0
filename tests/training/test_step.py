"""Steps with a gradient scaler: as many passes as with a closure, and the same result."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from digits_runs import CPU, recipe

from sparsam.runs.build import build_loader, build_network
from sparsam.training.build import Context, build_optimizer
from sparsam.training.step import AUTOCAST, TrainingStep

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


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_scaler_changes_nothing(case, monkeypatch):
    """Without autocast, so that nothing is rounded: the scale is a power of two."""
    monkeypatch.delitem(AUTOCAST, "fp16")
    scaled, exact = take_steps(case, "fp16"), take_steps(case, "fp32")
    assert scaled[2] == exact[2] == CASES[case][2]
    assert scaled[0] == pytest.approx(exact[0], rel=1e-6)
    for one, other in zip(scaled[1], exact[1], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
