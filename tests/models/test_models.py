"""The paper's networks: how many parameters they have, what shapes pass through them, and that they are chains."""

from __future__ import annotations

import math
import re
import sys
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsam.models import NAMES, STEMS, build_model
from sparsam.models.resnet import BasicBlock, Bottleneck, ResNet
from sparsam.models.vit import ViT
from sparsam.models.wide_resnet import WideBlock, WideResNet


def empty(name: str, classes: int = 10, **options) -> nn.Module:
    """A network without memory for its weights: only shapes and counts."""
    with torch.device("meta"):
        return build_model(name, classes, **options)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# Parameters


@pytest.mark.parametrize(
    ("name", "stem", "classes", "parameters"),
    [
        ("resnet18", "cifar", 10, 11_173_962),
        ("resnet18", "cifar", 100, 11_220_132),
        ("resnet34", "cifar", 10, 21_282_122),
        ("resnet50", "cifar", 10, 23_520_842),
        ("wrn-28-10", "cifar", 10, 36_479_194),
        ("wrn-28-10", "cifar", 100, 36_536_884),
        ("wrn-16-8", "cifar", 10, 10_961_370),
        ("wrn-40-2", "cifar", 10, 2_243_546),
        ("vgg11-bn", "cifar", 10, 28_149_514),
        ("vit-cifar", "cifar", 100, 6_373_220),
        ("vit-small", "cifar", 10, 214_090),
        ("resnet18", "imagenet", 1000, 11_689_512),
        ("resnet34", "imagenet", 1000, 21_797_672),
        ("resnet50", "imagenet", 1000, 25_557_032),
    ],
)
def test_known_counts(name, stem, classes, parameters):
    assert count(empty(name, classes, stem=stem)) == parameters


def basic(inputs: int, width: int, stride: int) -> int:
    shortcut = inputs * width + 2 * width if inputs != width or stride != 1 else 0
    return 9 * inputs * width + 9 * width * width + 4 * width + shortcut


def bottleneck(inputs: int, width: int, stride: int) -> int:
    shortcut = 4 * inputs * width + 8 * width if inputs != 4 * width or stride != 1 else 0
    return inputs * width + 9 * width * width + 4 * width * width + 12 * width + shortcut


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("stem", "side"), [("cifar", 3), ("imagenet", 7)])
@pytest.mark.parametrize(
    ("name", "block", "expansion", "depths", "width"),
    [
        ("resnet18", basic, 1, (2, 2, 2, 2), 64),
        ("resnet34", basic, 1, (3, 4, 6, 3), 64),
        ("resnet50", bottleneck, 4, (3, 4, 6, 3), 64),
        ("resnet-small", basic, 1, (1, 1, 1), 16),
    ],
)
def test_resnet_counts_by_the_formula(name, block, expansion, depths, width, stem, side, channels):
    wanted = side * side * channels * width + 2 * width
    inputs = width
    for i, depth in enumerate(depths):
        for k in range(depth):
            wanted += block(inputs, width * 2**i, 2 if i and not k else 1)
            inputs = width * 2**i * expansion
    assert count(empty(name, 7, stem=stem, channels=channels)) == wanted + (inputs + 1) * 7


@pytest.mark.parametrize(("depth", "widen"), [(10, 1), (16, 4), (28, 10), (40, 2)])
def test_wide_resnet_counts_by_the_formula(depth, widen):
    wanted, inputs = 9 * 3 * 16, 16
    for width in (16 * widen, 32 * widen, 64 * widen):
        first = 9 * inputs * width + 2 * inputs + (inputs * width if inputs != width else 0)
        further = 9 * width * width + 2 * width
        wanted += first + 9 * width * width + 2 * width + ((depth - 4) // 6 - 1) * 2 * further
        inputs = width
    assert count(empty(f"wrn-{depth}-{widen}", 7)) == wanted + 2 * inputs + (inputs + 1) * 7


def test_vgg_count_by_the_formula():
    widths = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    convolutions = sum(9 * i * o + o + 2 * o for i, o in pairwise(widths))
    head = 513 * 4096 + 4097 * 4096 + 4097 * 7
    assert count(empty("vgg11-bn", 7)) == convolutions + head


# Shapes


@pytest.mark.parametrize(
    ("name", "stem", "size", "stages"),
    [
        (
            "resnet18",
            "cifar",
            32,
            {"stem": (64, 32), "layer1": (64, 32), "layer2": (128, 16), "layer3": (256, 8), "layer4": (512, 4)},
        ),
        (
            "resnet34",
            "imagenet",
            224,
            {"stem": (64, 56), "layer1": (64, 56), "layer2": (128, 28), "layer3": (256, 14), "layer4": (512, 7)},
        ),
        (
            "resnet50",
            "imagenet",
            224,
            {"stem": (64, 56), "layer1": (256, 56), "layer2": (512, 28), "layer3": (1024, 14), "layer4": (2048, 7)},
        ),
        ("resnet-small", "cifar", 8, {"stem": (16, 8), "layer1": (16, 8), "layer2": (32, 4), "layer3": (64, 2)}),
        ("wrn-28-10", "cifar", 32, {"stem": (16, 32), "layer1": (160, 32), "layer2": (320, 16), "layer3": (640, 8)}),
        (
            "vgg11-bn",
            "cifar",
            32,
            {"layer1": (64, 16), "layer2": (128, 8), "layer3": (256, 4), "layer4": (512, 2), "layer5": (512, 1)},
        ),
    ],
)
def test_what_the_stages_put_out(name, stem, size, stages):
    model = empty(name, 11, stem=stem)
    assert [child for child, _ in model.named_children()] == [*stages, "head"]
    x = torch.empty(2, 3, size, size, device="meta")
    assert model(x).shape == (2, 11)
    for child, stage in model.named_children():
        x = stage(x)
        if child in stages:
            channels, side = stages[child]
            assert x.shape == (2, channels, side, side), child
    assert x.shape == (2, 11)


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50", "resnet-small", "wrn-10-2", "vgg11-bn", "vit-cifar", "vit-small"]
)
@pytest.mark.parametrize("channels", [1, 3])
def test_channels(name, channels):
    x = torch.empty(2, channels, 32, 32, device="meta")
    assert empty(name, 10, channels=channels)(x).shape == (2, 10)


# Arithmetic


@pytest.mark.parametrize("name", ["resnet-small", "resnet18", "wrn-10-1", "vgg11-bn", "vit-cifar"])
def test_stages_form_a_chain(name):
    model = build_model(name, 10).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        h = x
        for stage in model.children():
            h = stage(h)
        assert model(x).equal(h)


@pytest.mark.parametrize("name", ["resnet-small", "wrn-10-1", "vit-cifar"])
def test_every_parameter_is_used(name):
    model = build_model(name, 10)
    F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def normal(x: torch.Tensor) -> torch.Tensor:
    """BatchNorm with weight 1 and bias 0, in training."""
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
    return (x - mean) / (variance + 1e-5).sqrt()


def conv(x: torch.Tensor, layer: nn.Conv2d, stride: int = 1) -> torch.Tensor:
    return F.conv2d(x, layer.weight, stride=stride, padding=layer.weight.shape[-1] // 2)


@pytest.mark.parametrize(("inputs", "stride"), [(8, 1), (8, 2), (6, 1)])
def test_basic_block(inputs, stride):
    block = BasicBlock(inputs, 8, stride).double()
    x = torch.randn(3, inputs, 10, 10, dtype=torch.float64)
    h = normal(conv(normal(conv(x, block.conv1, stride)).relu(), block.conv2))
    short = x if inputs == 8 and stride == 1 else normal(conv(x, block.shortcut[0], stride))
    torch.testing.assert_close(block(x), (h + short).relu())


@pytest.mark.parametrize(("inputs", "stride"), [(32, 1), (32, 2), (6, 1)])
def test_bottleneck(inputs, stride):
    block = Bottleneck(inputs, 8, stride).double()
    x = torch.randn(3, inputs, 10, 10, dtype=torch.float64)
    h = normal(conv(normal(conv(x, block.conv1)).relu(), block.conv2, stride)).relu()
    h = normal(conv(h, block.conv3))
    short = x if inputs == 32 and stride == 1 else normal(conv(x, block.shortcut[0], stride))
    torch.testing.assert_close(block(x), (h + short).relu())


@pytest.mark.parametrize(("inputs", "stride"), [(8, 1), (8, 2), (6, 1)])
def test_wide_block(inputs, stride):
    block = WideBlock(inputs, 8, stride, dropout=0.0).double()
    x = torch.randn(3, inputs, 10, 10, dtype=torch.float64)
    active = normal(x).relu()
    h = conv(normal(conv(active, block.conv1, stride)).relu(), block.conv2)
    short = x if inputs == 8 and stride == 1 else conv(active, block.shortcut, stride)
    torch.testing.assert_close(block(x), h + short)


def test_vit_by_hand():
    """Patches row by row, then for each block softmax(q kᵀ / √d) v by heads and a hidden layer, both pre-norm."""
    model = ViT(5, channels=2, image_size=8, patch_size=4, width=6, depth=2, heads=3).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    x = torch.randn(3, 2, 8, 8, dtype=torch.float64)
    patches = [x[:, :, i : i + 4, k : k + 4].reshape(3, -1) for i in (0, 4) for k in (0, 4)]
    h = F.linear(torch.stack(patches, 1), model.stem.projection.weight.reshape(6, -1), model.stem.projection.bias)
    h = h + model.stem.position
    for block in model.blocks:
        q, k, v = F.linear(block.norm1(h), block.attention.inputs.weight, block.attention.inputs.bias).split(6, -1)
        heads = []
        for i in range(0, 6, 2):
            scores = q[..., i : i + 2] @ k[..., i : i + 2].transpose(1, 2) / math.sqrt(2)
            heads.append(scores.softmax(-1) @ v[..., i : i + 2])
        h = h + block.attention.outputs(torch.cat(heads, -1))
        h = h + block.mlp[2](F.gelu(block.mlp[0](block.norm2(h))))
    torch.testing.assert_close(model(x), model.head[2](model.head[0](h).mean(1)))


def test_vit_starts_small():
    model = build_model("vit-cifar", 10)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.1)
            assert not module.bias.any()
    assert model.stem.position.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("name", ["resnet18", "wrn-16-4", "vgg11-bn"])
def test_convolutions_start_as_he_et_al_say(name):
    """A normal distribution with a variance of 2 / (outputs · height · width of the kernel)."""
    for module in build_model(name, 10).modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight.double()
            outputs, _, height, width = weight.shape
            deviation, n = math.sqrt(2 / (outputs * height * width)), weight.numel()
            assert abs(weight.mean()) < 5 * deviation / math.sqrt(n)
            assert abs(weight.std() / deviation - 1) < 5 / math.sqrt(2 * n)
            assert module.bias is None or not module.bias.any()


def test_the_weights_follow_torchs_seed():
    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([p.detach().flatten() for p in build_model("resnet-small", 10).parameters()])

    assert drawn(1).equal(drawn(1))
    assert not drawn(1).equal(drawn(2))


def test_dropout():
    assert [m.p for m in empty("vgg11-bn").modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]
    assert not any(isinstance(m, nn.Dropout) for m in empty("wrn-28-10").modules())
    model = WideResNet(16, 1, 10, dropout=0.3)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.3] * 6


# Errors


@pytest.mark.parametrize(
    "name", ["resnet19", "ResNet18", "", "wrn-28", "wrn-28-10-2", "wrn-a-b", "vgg11", "tim:resnet18"]
)
def test_an_unknown_name(name):
    message = f"model must be one of {', '.join(NAMES)}, but is {name!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build_model(name, 10)


@pytest.mark.parametrize("depth", [4, 9, 27, 29, 0])
def test_a_wrong_depth(depth):
    message = f"depth must be 6n + 4 with n >= 1 (10, 16, 22, 28, ...), but is {depth}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build_model(f"wrn-{depth}-2", 10)


def test_a_wrong_width():
    with pytest.raises(ValueError, match=r"^widen must be a whole number >= 1, but is 0$"):
        build_model("wrn-28-0", 10)


def test_images_of_another_size():
    with pytest.raises(ValueError, match=r"^images must be 32×32 for this network, but are 16×8$"):
        empty("vit-cifar")(torch.empty(2, 3, 16, 8, device="meta"))


@pytest.mark.parametrize("name", ["wrn-28-10", "vgg11-bn", "vit-cifar"])
def test_a_stem_for_large_images_where_there_is_none(name):
    message = f"model {name!r} is for small images; where the stem is 'imagenet', take a ResNet"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build_model(name, 10, stem="imagenet")


@pytest.mark.parametrize(
    "build", [lambda: build_model("resnet18", 10, stem="large"), lambda: ResNet(BasicBlock, (1,), 10, stem="large")]
)
def test_an_unknown_stem(build):
    message = f"stem must be one of {', '.join(map(repr, STEMS))}, but is 'large'"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build()


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_a_package_that_is_not_installed(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"^{package} models need the package {package}: pip install {package}$"):
        build_model(f"{package}:resnet18", 10)
