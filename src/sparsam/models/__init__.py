"""The paper's networks, and small ViTs, by name: chains of stages, for 32×32 and for ImageNet images."""

from __future__ import annotations

import re

from torch import nn

from sparsam.errors import UserValueError, need
from sparsam.models.resnet import STEMS, BasicBlock, Bottleneck, ResNet
from sparsam.models.vgg import VGG11BN
from sparsam.models.vit import ViT
from sparsam.models.wide_resnet import WideResNet

WIDE = re.compile(r"wrn-(\d+)-(\d+)")

RESNETS: dict[str, tuple[type[BasicBlock | Bottleneck], tuple[int, ...], int]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2), 64),
    "resnet34": (BasicBlock, (3, 4, 6, 3), 64),
    "resnet50": (Bottleneck, (3, 4, 6, 3), 64),
    "resnet-small": (BasicBlock, (1, 1, 1), 16),
}

VITS = {"vit-cifar": {}, "vit-small": {"patch_size": 8, "width": 64, "depth": 4}}

NAMES = (*RESNETS, "wrn-DEPTH-WIDTH (wrn-28-10, ...)", "vgg11-bn", *VITS, "timm:NAME", "torchvision:NAME")


def build_model(name: str, classes: int, *, channels: int = 3, stem: str = "cifar") -> nn.Module:
    """Build an untrained network.

    Args:
        name: One of `resnet18`, `resnet34`, `resnet50`, `resnet-small`, `wrn-28-10` (any depth and width), `vgg11-bn`,
            `vit-cifar`, `vit-small`, or `timm:NAME` and `torchvision:NAME` where those packages are installed.
        classes: The number of outputs.
        channels: Channels of the images.
        stem: "cifar" for small images, "imagenet" for large ones. Only ResNets have the second.
    """
    if name.startswith(("timm:", "torchvision:")):
        return _external(name, classes, channels)
    if name in RESNETS:
        block, depths, width = RESNETS[name]
        return ResNet(block, depths, classes, stem=stem, width=width, channels=channels)
    wide = WIDE.fullmatch(name)
    if not wide and name not in ("vgg11-bn", *VITS):
        raise UserValueError(f"model must be one of {', '.join(NAMES)}, but is {name!r}")
    if stem != "cifar":
        raise UserValueError(f"model {name!r} is for small images; where the stem is {stem!r}, take a ResNet")
    if wide:
        return WideResNet(int(wide[1]), int(wide[2]), classes, channels=channels)
    return VGG11BN(classes, channels=channels) if name == "vgg11-bn" else ViT(classes, channels=channels, **VITS[name])


def _external(name: str, classes: int, channels: int) -> nn.Module:
    package, _, model = name.partition(":")
    if package == "timm":
        timm = need("timm", "timm models", install="pip install timm")
        return timm.create_model(model, num_classes=classes, in_chans=channels)  # type: ignore[no-any-return]
    if channels != 3:
        raise UserValueError(f"model {name!r} takes images with 3 channels, but these have {channels}")
    torchvision = need("torchvision", "torchvision models", install="pip install torchvision")
    return torchvision.models.get_model(model, num_classes=classes)  # type: ignore[no-any-return]


__all__ = ["NAMES", "STEMS", "VGG11BN", "ResNet", "ViT", "WideResNet", "build_model"]
