"""The learning rate and rho of each step. (The learning rate's cosine and warm-up: test_trainer.py, test_smoke.py.)"""

from __future__ import annotations

import math
import re

import pytest
import torch
from digits_runs import CPU, final_weights, recipe
from torch import nn
from torch.nn import functional as F

from cases import same
from sparsam import SAM, FriendlyAscent, LastSteps, SuffixMask
from sparsam.runs.build import build_loader, build_network
from sparsam.runs.directory import RunDirectory
from sparsam.training import RecipeError, Trainer, train
from sparsam.training.over_time import OverTime

RAMPS = {  # of 24 steps, 12 an epoch: a method with its rho of 0.1 or 0.2, and the rho of each step
    "the last third": (
        "thrifty",
        ["schedule.fraction=0.333", "sam.ramp_epochs=0.5"],
        [*[0] * 16, 0.2 / 6, 0.2 * 2 / 6, 0.1, 0.2 * 4 / 6, 0.2 * 5 / 6, 0.2, 0.2, 0.2],
    ),
    "every step": ("sam", ["sam.ramp_epochs=1"], [*(0.1 * i / 12 for i in range(1, 13)), *[0.1] * 12]),
    "every fifth step": (
        "sam",
        ["schedule=every-nth", "schedule.n=5", "sam.ramp_epochs=0.25"],
        [0.1 / 3, 0.1 * 2 / 3, *[0.1] * 22],
    ),
    "to the end of the run": (
        "thrifty",
        ["schedule.fraction=0.5", "sam.ramp_epochs=1"],
        [*[0] * 12, *(0.2 * i / 12 for i in range(1, 13))],
    ),
    "less than a step": ("sam", ["sam.ramp_epochs=0.01"], [0.1] * 24),
    "no ramp": ("thrifty", [], [0.2] * 24),
}


@pytest.mark.parametrize("name", RAMPS)
def test_rho_of_each_step(tmp_path, monkeypatch, name):
    """The metrics have that of each epoch's last step, if the epoch perturbs."""
    method, settings, expected = RAMPS[name]
    found = []

    def step(self, x, y):
        found.append(self.opt.param_groups[0]["rho"])
        self.opt.steps += 1
        return torch.zeros(())

    monkeypatch.setattr(Trainer, "_step", step)
    monkeypatch.setattr(Trainer, "evaluate", lambda self: (0.0, 0.0, 1))
    train(recipe(method, *settings), tmp_path / "run", device=CPU)
    assert found == pytest.approx(expected, abs=1e-15)
    epochs = RunDirectory(tmp_path / "run").metrics()
    late = method == "thrifty"
    assert [m["rho"] for m in epochs] == pytest.approx([None if late else expected[11], expected[23]], abs=1e-15)


TOO_LONG = {  # of 24 steps, 12 an epoch: settings, the steps of the ramp, those from the first to the last that perturb
    "the last fifth": ("thrifty", ["schedule.fraction=0.2", "sam.ramp_epochs=2"], 24, 5, "0.416"),
    "one step": ("thrifty", ["schedule.fraction=0.5", "sam.ramp_epochs=1.05"], 13, 12, "1"),
    "every step": ("sam", ["sam.ramp_epochs=2.5"], 30, 24, "2"),
    "the last one that perturbs is step 20": (
        "sam",
        ["schedule=every-nth", "schedule.n=20", "sam.ramp_epochs=1.84"],
        22,
        21,
        "1.75",
    ),
    "max_steps": ("sam", ["train.max_steps=5", "sam.ramp_epochs=0.5"], 6, 5, "0.416"),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_a_ramp_that_would_not_reach_rho_is_refused(tmp_path, name):
    """The error's own remedy is not refused."""
    method, settings, steps, room, most = TOO_LONG[name]
    given, rho = settings[-1].partition("=")[2], {"thrifty": "0.2", "sam": "0.1"}[method]
    message = (
        f"sam.ramp_epochs is {given}, which is {steps} steps, but the sharpness-aware part of the run has {room}: "
        f"rho would not reach {rho}; choose at most {most}, or train for longer"
    )
    with pytest.raises(RecipeError, match=f"^{re.escape(message)}$"):
        train(recipe(method, *settings), tmp_path / "run", device=CPU)
    assert not RunDirectory(tmp_path / "run").exists
    shorter = recipe(method, *settings[:-1], f"sam.ramp_epochs={most}")
    trainer = Trainer(shorter, RunDirectory(tmp_path / "run"), device=CPU)
    assert (trainer.over_time.ramp.steps, trainer.over_time.ramp.rho_0) == (room, [float(rho)])


def test_a_ramped_run_equals_a_plain_loop(tmp_path):
    """Half of the steps are those of F-SAM from layer3 on; rho rises in the first 9 of them."""
    r = recipe("thrifty", "schedule.fraction=0.5", "sam.ramp_epochs=0.75")
    train(r, tmp_path / "run", device=CPU)

    torch.manual_seed(0)
    loader = build_loader(r, CPU)
    model = build_network(r, loader.classes, loader.channels, CPU).train()
    policies = {"mask": SuffixMask(model, "layer3"), "ascent": FriendlyAscent(), "schedule": LastSteps(0.5, 24)}
    opt = SAM(model.parameters(), torch.optim.SGD, rho=7.0, **policies, lr=0.05, momentum=0.9, weight_decay=1e-3)
    for step, (x, y) in enumerate((x, y) for epoch in range(2) for x, y in loader.epoch(epoch)):
        x = x.contiguous(memory_format=torch.channels_last)

        def closure(x=x, y=y):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        opt.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / 24)) / 2
        if step >= 12:
            opt.param_groups[0]["rho"] = 0.2 * min(1, (step - 11) / 9)
        opt.step(closure)
    assert same(final_weights(tmp_path / "run"), list(model.state_dict().values()))


def ramped(rho):
    """The last 12 of 24 steps perturb, and rho rises over 4 of them."""
    group = {"params": [nn.Parameter(torch.ones(2))], "lr": torch.tensor(1.0)}
    opt = SAM([group], torch.optim.SGD, rho=rho, schedule=LastSteps(0.5, 24), lr=1.0)
    settings = ["schedule.fraction=0.5", "sam.ramp_epochs=0.334"]
    return opt, OverTime(recipe("thrifty", *settings), opt, epoch_steps=12, total_steps=24)


def test_tensors_are_written_in_place():
    """A captured CUDA graph goes on reading them."""
    opt, over_time = ramped(torch.tensor(0.2, dtype=torch.float64))
    lr, rho = opt.param_groups[0]["lr"], opt.param_groups[0]["rho"]
    for step, expected in ((0, 0.0), (12, 0.05), (14, 0.15), (23, 0.2)):
        opt.steps = step
        over_time.set(step)
        assert opt.param_groups[0]["lr"] is lr
        assert opt.param_groups[0]["rho"] is rho
        assert lr.item() == pytest.approx(0.05 * (1 + math.cos(math.pi * step / 24)) / 2)
        assert rho.item() == pytest.approx(expected, abs=1e-15)


def test_the_ramp_does_not_count_steps_that_a_gradient_scaler_skips():
    """SAM's schedule does not either. The learning rate does."""
    opt, over_time = ramped(0.2)
    opt.steps = 13
    over_time.set(16)
    assert opt.param_groups[0]["rho"] == pytest.approx(0.1)
    assert opt.param_groups[0]["lr"].item() == pytest.approx(0.05 * (1 + math.cos(math.pi * 16 / 24)) / 2)
