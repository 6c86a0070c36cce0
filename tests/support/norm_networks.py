"""Networks of convolutions and BatchNorm, as people write them, for tests of folding and fusing."""

import torch
from torch import nn
from torch.nn import functional as F

from sparsam.models import build_model


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
    return as_trained(own[name]() if name in own else build_model(name, 10))


def as_trained(model):
    """In float64, and BatchNorm not as if it did nothing."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 2)
                nn.init.normal_(module.bias)
    return model.double()


class Block(nn.Module):
    """A convolution and a BatchNorm, and what a test does with them."""

    def __init__(self, forward):
        super().__init__()
        self.conv, self.bn, self.relu = conv(3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
        self.rule = forward

    def forward(self, x):
        return self.rule(self, x.clone()).flatten(2).mean(2)


def hooked(model):
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)


class Remembers(nn.Module):
    """Arguments with defaults, and values that the model keeps of its last run."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.features = conv(3), nn.BatchNorm2d(4), None
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x, scale=None, size=(1, 1)):
        self.features = F.relu(self.bn(self.conv(x)))
        self.last = self.features.mean()
        h = self.features if scale is None else scale * self.features
        return h.flatten(2).mean(2)
