"""What a step from each cut takes."""

from __future__ import annotations

import pytest
import torch
from replay_models import BASE, CASES, closure_of, differences, snapshot

from sparsam.step_cost import Clock, cut_costs


class Script(Clock):
    """A clock by which what lies between two stamps takes one second, and pieces of work what is given."""

    def __init__(self, pieces: tuple[float, ...]) -> None:
        super().__init__(torch.device("cpu"))
        self.stamps, self.pieces, self.works = 0, pieces, 0

    def now(self) -> float:
        self.stamps += 1
        return float(self.stamps)

    def time(self, work) -> float:
        work()
        self.works += 1
        return self.pieces[(self.works - 1) % len(self.pieces)]


def test_costs_by_hand():
    """A pass takes 1 s, the optimizer's step 0.25 s, perturbing all weights 0.1 s; the clock stamps each event in turn."""
    model, batch = CASES["vgg"].model(), CASES["vgg"].batch()
    base = torch.optim.SGD(model.parameters(), **BASE)
    costs = cut_costs(model, closure_of(model, base.zero_grad, batch), base, clock=Script((1.0, 0.25, 0.1)))
    cuts, events = list(costs), len(costs)
    # In a pass: start, the calls of n modules, the arrivals of n - 1 gradients in the opposite order (the batch needs
    # none, so the first counts to the end), end. So of 2n seconds, 2 (n - i) - 1 follow cut i, and 2n - 1 the first.
    for i, cut in enumerate(cuts):
        step = (2 * (events - i) - 1) / (2 * events)
        assert cut.step == pytest.approx(step)
        expected = 1 + (step * 1.0 + cut.weights * 0.1) / 1.25
        assert costs[cut] == pytest.approx(expected, abs=0.005000001)


def test_measuring_leaves_weights_buffers_and_random_numbers():
    model, batch = CASES["vgg"].model(), CASES["vgg"].batch()
    base = torch.optim.SGD(model.parameters(), **BASE)
    closure = closure_of(model, base.zero_grad, batch)
    torch.manual_seed(4)
    before = snapshot(model)
    costs = cut_costs(model, closure, base)
    assert [key for key in differences(before, snapshot(model)) if "gradient" not in key] == []
    assert not base.state
    values = list(costs.values())
    assert values == sorted(values, reverse=True)
    assert all(cost >= 1 for cost in values)
