"""VGG (Simonyan and Zisserman, 2015) with BatchNorm, for 32×32 images."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from sparsam.models.initialisation import initialise

VGG11 = ((64,), (128,), (256, 256), (512, 512), (512, 512))


class VGG11BN(nn.Sequential):
    """A chain of layer1 … layer5, each ending in a max pooling, and a head with two 4096-wide layers and dropout.

    Args:
        classes: The number of outputs.
        channels: Channels of the images.
    """

    def __init__(self, classes: int, *, channels: int = 3) -> None:
        stages: OrderedDict[str, nn.Module] = OrderedDict()
        inputs = channels
        for i, widths in enumerate(VGG11):
            layers: list[nn.Module] = []
            for width in widths:
                layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                inputs = width
            stages[f"layer{i + 1}"] = nn.Sequential(*layers, nn.MaxPool2d(2))
        stages["head"] = nn.Sequential(
            nn.Flatten(),
            nn.Linear(inputs, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, classes),
        )
        super().__init__(stages)
        initialise(self)
