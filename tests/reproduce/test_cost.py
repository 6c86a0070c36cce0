"""What runs would take, from a measured step."""

from __future__ import annotations

import pytest
import torch

from sparsam.reproduce.cost import CPU_IMAGES, step_seconds
from sparsam.runs.recipe import load_recipe


@pytest.mark.parametrize(
    ("seconds", "shortest", "measured"),
    [
        ((0.50, 0.51, 0.52), 0.50, 3),
        ((9.0, 0.50, 0.54), 0.50, 3),
        ((6.4, 7.3, 1.4, 0.62, 8.0, 0.63), 0.62, 6),  # another job comes and goes
        ((6.4, 7.1, 1.4, 0.62), 0.62, 10),  # and then every step takes ten times as long as the one before
    ],
)
def test_steps_that_were_disturbed_do_not_count(monkeypatch, seconds, shortest, measured):
    times = [*seconds, *(10.0**i for i in range(1, 7))]
    found = iter(times)
    monkeypatch.setattr("sparsam.replay.clock.Clock.time", lambda clock, work: (work(), next(found))[1])
    recipe = load_recipe("digits-sam")
    cost = step_seconds(recipe, torch.device("cpu"))
    assert cost == pytest.approx(shortest * recipe.data.batch_size / CPU_IMAGES)
    assert list(found) == times[measured:]
