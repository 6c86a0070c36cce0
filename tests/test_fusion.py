"""Fused kernels: the same losses in float64, with the weights that the model has now; and what is left as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cases import same, weights
from sparsam.analysis.fusion import Fused, FusedObjective, fastest, fused
from sparsam.analysis.landscape import loss_landscape
from sparsam.analysis.objective import Objective
from sparsam.models import build_model
from sparsam.passes import looked_at


def conv(inputs=4, outputs=4, **options):
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


class Odd(nn.Module):
    """What people write: a bias, methods in place of functions, additions in place, sums of unequal shape, groups."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = conv(3), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = conv(groups=2), nn.BatchNorm2d(4, affine=False)
        self.conv3, self.bn3 = nn.Conv2d(4, 5, 1, stride=(2, 1), bias=True), nn.BatchNorm2d(5)
        self.scale = nn.Parameter(torch.ones(1, 4, 1, 1))

    def forward(self, x):
        h = self.bn1(self.conv1(x)).relu()
        h2 = self.bn2(self.conv2(h))
        h2 += self.scale
        h = F.relu(h2, inplace=True) + h
        return self.bn3(self.conv3(h)).flatten(2).mean(2)


class Twice(nn.Module):
    """A convolution whose output is used twice, one with a padding of its own, and a norm that is added to itself."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = conv(3), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = conv(padding_mode="reflect"), nn.BatchNorm2d(4)
        self.conv3, self.bn3 = nn.Conv2d(4, 4, 3, padding="same"), nn.BatchNorm2d(4)
        self.conv4, self.bn4 = conv(), nn.BatchNorm2d(4)

    def forward(self, x):
        h = self.conv1(x)
        h = F.relu(self.bn1(h)) + h
        h = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(h)))))
        h = self.bn4(self.conv4(h))
        return F.relu(h + h).flatten(2).mean(2)


class Branches(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = conv(3), nn.BatchNorm2d(4)

    def forward(self, x):
        h = F.relu(self.bn(self.conv(x)))
        return (h if h.sum() > 0 else -h).flatten(2).mean(2)


def networks(name):
    own = {"odd": Odd, "twice": Twice, "branches": Branches}
    model = own[name]() if name in own else build_model(name, 10)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # as after training, not as if they did nothing
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 2)
                nn.init.normal_(module.bias)
    return model.double()


def objective_of(model):
    x = torch.randn(6, 3, 32, 32, dtype=torch.float64)
    return Objective(model, F.cross_entropy, (x, torch.randint(0, 4, (6,))), batch_size=4)


# How many convolutions lie right before a BatchNorm that only they feed, counted by hand.
COUNTS = {"resnet-small": 9, "resnet50": 53, "vgg11-bn": 8, "wrn-10-2": 4, "odd": 3, "twice": 1, "branches": 0}


@pytest.mark.parametrize("name", COUNTS)
def test_fused_losses_are_the_losses_wherever_the_weights_go(name):
    model = networks(name)
    plain = objective_of(model)
    fast = FusedObjective(plain, torch.float64)
    assert len(fast.fused) == COUNTS[name]
    before = weights(model)
    for _ in range(2):
        torch.testing.assert_close(fast.loss(), plain.loss(), rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
    torch.testing.assert_close(fast.loss(), plain.loss(), rtol=1e-12, atol=1e-12)
    assert not same(weights(model), before)
    assert model.training


def test_whole_landscapes_agree():
    model = networks("resnet-small")
    objective = objective_of(model)

    def evaluate(_, plane, points, losses, done):
        fast = FusedObjective(objective, torch.float64)
        for i, point in enumerate(points):
            plane.move_to(point)
            losses[i].copy_(fast.loss())
            done()

    plain = loss_landscape(model, F.cross_entropy, objective.batches, points=4)
    found = loss_landscape(model, F.cross_entropy, objective.batches, points=4, evaluate=evaluate)
    assert abs(found.losses / plain.losses - 1).max() < 1e-12


@pytest.mark.parametrize("break_it", ["hook", "training", "no statistics"])
def test_what_cannot_be_fused_stays(break_it):
    model = networks("resnet-small").eval()
    if break_it == "hook":
        model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and break_it != "hook":
            module.train(break_it == "training")
            module.track_running_stats = break_it != "no statistics"
    assert fused(model, torch.float64) is None


def test_a_model_that_is_not_fused_is_run_as_it_is():
    model = networks("resnet-small")
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    plain = objective_of(model)
    assert FusedObjective(plain, torch.float64).loss() == plain.loss()


def test_nothing_is_fused_on_a_cpu():
    objective = objective_of(networks("resnet-small"))
    assert fastest(objective) is objective


def test_it_has_no_weights_of_its_own():
    model = networks("resnet-small")
    with looked_at(model):
        module = fused(model, torch.float64)
    assert {id(p) for p in module.parameters()} <= {id(p) for p in model.parameters()}
    assert any(isinstance(part, Fused) for part in module.modules())
    assert not any(isinstance(part, Fused) for part in model.modules())
