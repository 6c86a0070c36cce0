"""ResNets (He et al., 2016) for CIFAR and ImageNet: a chain of stem, layer1 … layer4 and head."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from sparsam.checks import check_choice
from sparsam.models.initialisation import initialise

STEMS = ("cifar", "imagenet")


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(residual(x) + shortcut(x))."""
        h = F.relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        return F.relu(h + self.shortcut(x))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions and a shortcut. The 3×3 convolution has the stride."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(residual(x) + shortcut(x))."""
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        return F.relu(h + self.shortcut(x))


class ResNet(nn.Sequential):
    """A chain of stages, so that it can be cut between any two of them.

    Args:
        block: :class:`BasicBlock` or :class:`Bottleneck`.
        depths: The number of blocks in each stage.
        classes: The number of outputs.
        stem: "cifar" (3×3, stride 1, no pooling) or "imagenet" (7×7, stride 2, max pooling).
        width: Channels of the first stage; each further stage has twice as many.
        channels: Channels of the images.
    """

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        depths: Sequence[int],
        classes: int,
        *,
        stem: str = "cifar",
        width: int = 64,
        channels: int = 3,
    ) -> None:
        stages: OrderedDict[str, nn.Module] = OrderedDict(stem=_stem(stem, channels, width))
        inputs = width
        for i, depth in enumerate(depths):
            blocks = []
            for k in range(depth):
                blocks.append(block(inputs, width * 2**i, stride=2 if i > 0 and k == 0 else 1))
                inputs = width * 2**i * block.expansion
            stages[f"layer{i + 1}"] = nn.Sequential(*blocks)
        stages["head"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
        super().__init__(stages)
        initialise(self)


def _stem(name: str, channels: int, width: int) -> nn.Sequential:
    check_choice("stem", name, STEMS)
    if name == "cifar":
        return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    return nn.Sequential(
        nn.Conv2d(channels, width, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    )


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
