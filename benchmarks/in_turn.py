"""Timing several methods in turn, round after round: whatever else a machine does meets all of them."""

import json
import platform
import statistics

import torch

import sparsam
from sparsam.step_cost import Clock, StepRatio, times_in_turn
from sparsam.training.environment import git_commit, processor


def milliseconds(steps, *, rounds, count, device):
    """Return the milliseconds of a step in each round, by name.

    Args:
        steps: Functions that take a step each, by name.
        rounds: How many.
        count: How many steps each takes in its turn.
        device: Where.
    """
    times = times_in_turn([*steps.values()], rounds=rounds, clock=Clock(device), count=count)
    return {name: [1000 * seconds for seconds in found] for name, found in zip(steps, times, strict=True)}


def summary(times, base):
    """Return what a table says of a method's milliseconds, and of their ratio to the base optimizer's by round."""
    ratio = StepRatio.of_times(times, base)
    return {
        "ms": statistics.median(times),
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "rounds_ms": times,
    }


def machine(device):
    """Return what a result was measured with: hardware, versions, and the commit, with a + if there are changes."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "sparsam": sparsam.__version__,
        "git": git_commit(),
    }


def write(result, path):
    """Write a result as JSON, if there is a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
