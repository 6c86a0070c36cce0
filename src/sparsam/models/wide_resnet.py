"""Wide ResNets (Zagoruyko and Komodakis, 2016): pre-activation blocks, any depth 6n + 4 and any width."""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from sparsam.checks import check_whole
from sparsam.errors import UserValueError
from sparsam.models.initialisation import initialise


class WideBlock(nn.Module):
    """BatchNorm, ReLU and a 3×3 convolution, twice. If shapes differ, the shortcut projects the first activation."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs or stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Return residual(x) + shortcut(x)."""
        h = F.relu(self.bn1(x))
        short = x if self.shortcut is None else self.shortcut(h)
        h = self.conv1(h)
        h = self.conv2(self.dropout(F.relu(self.bn2(h))))
        return h + short  # type: ignore[no-any-return]


class WideResNet(nn.Sequential):
    """A chain of stem, layer1, layer2, layer3 and head.

    Args:
        depth: 6n + 4 for n blocks in each of the three stages: 16, 22, 28, 40, ...
        widen: The width relative to a ResNet: 1, 2, 8, 10, ...
        classes: The number of outputs.
        channels: Channels of the images.
        dropout: Between the convolutions of a block.
    """

    def __init__(self, depth: int, widen: int, classes: int, *, channels: int = 3, dropout: float = 0.0) -> None:
        check_whole("widen", widen)
        if depth < 10 or (depth - 4) % 6:
            raise UserValueError(f"depth must be 6n + 4 with n >= 1 (10, 16, 22, 28, ...), but is {depth}")
        stages: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Conv2d(channels, 16, 3, padding=1, bias=False))
        inputs = 16
        for i, outputs in enumerate((16 * widen, 32 * widen, 64 * widen)):
            blocks = []
            for k in range((depth - 4) // 6):
                blocks.append(WideBlock(inputs, outputs, 2 if i > 0 and k == 0 else 1, dropout))
                inputs = outputs
            stages[f"layer{i + 1}"] = nn.Sequential(*blocks)
        stages["head"] = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)
        )
        super().__init__(stages)
        initialise(self)
