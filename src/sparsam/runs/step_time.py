"""The time of a step of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median


def step_time(epochs: Iterable[tuple[float, float | None]]) -> float:
    """Return the mean time of a step.

    Epochs that perturb the same share of the weights count at their median. So one slow epoch does not count, such as
    the first, but sharpness-aware steps at the end do.

    Args:
        epochs: For each epoch, the time of a step and the share of the weights that is perturbed.

    >>> step_time([(9.0, 0.0), (1.0, 0.0), (1.0, 0.0), (2.0, 1.0)])
    1.25
    """
    alike: defaultdict[object, list[float]] = defaultdict(list)
    for time, perturbed in epochs:
        # A step that perturbs anything at all takes a second pass.
        alike[None if perturbed is None else (perturbed > 0, round(perturbed, 2))].append(time)
    return sum(len(times) * median(times) for times in alike.values()) / sum(map(len, alike.values()))
