"""Short runs on the digits, and what two runs are compared by."""

from __future__ import annotations

from pathlib import Path

import torch

from cases import same
from sparsam.runs.checkpoint import load_checkpoint
from sparsam.training import load_recipe

CPU = torch.device("cpu")
SHORT = ("train.epochs=2", "train.deterministic=true")
TIMES = {"seconds", "elapsed", "step_ms"}

# Every way to step: no SAM, a dense and two sparse masks, a share of the batch, base steps before replayed ones, rho
# rising in these, one pass before them.
METHODS = {
    "sgd": ("digits-sgd", []),
    "sam": ("digits-sam", []),
    "share": ("digits-sam", ["sam.share=0.25"]),
    "ssam-f": ("digits-ssam-f", []),
    "ssam-d": ("digits-ssam-d", []),
    "ssam-c": ("digits-ssam-c", []),
    "thrifty": ("digits-thrifty", []),
    "ramp": ("digits-thrifty", ["schedule.fraction=0.8", "sam.ramp_epochs=1.5"]),
    "momentum": ("digits-ssam-c", ["ascent=gradient", "schedule.before=momentum", "schedule.before.rho=0.5"]),
}


def recipe(method="sam", *settings):
    """Return a recipe of two epochs, each of 12 steps."""
    name, own = METHODS[method]
    return load_recipe(name, [*SHORT, *own, *settings])


def numbers(metrics):
    """All but the times."""
    return [{key: value for key, value in m.items() if key not in TIMES} for m in metrics]


def last_checkpoint(path):
    return load_checkpoint(Path(path) / "checkpoints" / "last.pt", CPU)


def final_weights(path):
    return list(last_checkpoint(path)["model"].values())


def equal(one, other):
    """Return whether two nested states are the same, bit for bit."""
    if isinstance(one, torch.Tensor):
        return same([one], [other])
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other
