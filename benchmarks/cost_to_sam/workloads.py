"""The tasks: real data, a small network, a base optimizer. Each trains in about a minute and a half on one core."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from pathlib import Path
from pydoc_data.topics import topics
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsam.data import load_cifar
from sparsam.data.images import shuffled
from sparsam.models import build_model

Batch = tuple[Tensor, Tensor]


class Data(NamedTuple):
    """Inputs and targets to train on, to choose by, and to report."""

    train: Batch
    validation: Batch
    test: Batch

    def to(self, device: str) -> Data:
        """Return the data on a device."""
        return Data(*((x.to(device), y.to(device)) for x, y in self))


class Workload(ABC):
    """A task. Its numbers are the settings of the base optimizer, which all methods share."""

    name: ClassVar[str]
    needs: ClassVar[str]  # what --data must hold
    unit: ClassVar[str]  # of the metric
    lower_is_better: ClassVar[bool] = False
    base: ClassVar[type[torch.optim.Optimizer]]
    settings: ClassVar[dict[str, float]]
    epochs: ClassVar[int]
    minutes: ClassVar[float]  # of a training with the base optimizer on one core, roughly
    batch_size: ClassVar[int] = 100
    warmup_epochs: ClassVar[int] = 0

    @abstractmethod
    def load(self, root: Path) -> Data:
        """Read the data."""

    @abstractmethod
    def network(self) -> nn.Module:
        """Build the network from torch's random numbers."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss."""
        return F.cross_entropy(outputs, targets)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean metric: the accuracy in percent."""
        return 100 * (outputs.argmax(1) == targets).float().mean()


class Images(Workload):
    """5,000 images of CIFAR-10 without augmentation; accuracy on 5,000 test images."""

    needs = "cifar-10-batches-py"
    unit = "%"
    images = 5000
    wrong: ClassVar[float] = 0.0  # the share of the training labels that are wrong

    def load(self, root: Path) -> Data:
        data = load_cifar("cifar10", root)
        order = shuffled(len(data.train))
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (data.mean, data.std))

        def part(images, chosen):
            return ((images.x[chosen].float() / 255 - mean) / std).contiguous(
                memory_format=torch.channels_last
            ), images.y[chosen]

        x, y = part(data.train, order[: self.images])
        generator = torch.Generator().manual_seed(0)
        spoiled = torch.randperm(len(y), generator=generator)[: round(self.wrong * len(y))]
        y[spoiled] = (y[spoiled] + torch.randint(1, 10, (len(spoiled),), generator=generator)) % 10
        validation = part(data.train, order[self.images : self.images + 2000])
        return Data((x, y), validation, part(data.test, shuffled(len(data.test))[:5000]))


class SmallResNet(Images):
    """A small ResNet with SGD, which overfits."""

    name = "resnet"
    base = torch.optim.SGD
    settings: ClassVar = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
    epochs = 30
    minutes = 1.6

    def network(self) -> nn.Module:
        return build_model("resnet-small", 10).to(memory_format=torch.channels_last)


class SmallViT(Images):
    """A small ViT with AdamW, which overfits."""

    name = "vit"
    base = torch.optim.AdamW
    settings: ClassVar = {"lr": 1e-3, "weight_decay": 0.05}
    epochs = 60
    minutes = 1.7
    warmup_epochs = 3

    def network(self) -> nn.Module:
        return build_model("vit-small", 10)


class NoisyLabels(Images):
    """A plain CNN with SGD, and 40 % of its training labels wrong: it learns them by heart."""

    name = "noise"
    base = torch.optim.SGD
    settings: ClassVar = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
    epochs = 20
    minutes = 0.7
    images = 4000
    wrong = 0.4

    def network(self) -> nn.Module:
        def block(inputs: int, outputs: int) -> list[nn.Module]:
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

        widths, layers = (3, 24, 64, 128, 128, 128), []
        for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            layers += block(inputs, outputs) + ([nn.MaxPool2d(2)] if i < 3 else [])
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
        return nn.Sequential(*layers, *head).to(memory_format=torch.channels_last)


class Forecast(Workload):
    """96 hours of ETTh1 from 512 before them, by one attention layer with AdamW; mean squared error."""

    name = "forecast"
    needs = "ETTh1.csv"
    unit = "MSE"
    lower_is_better = True
    base = torch.optim.AdamW
    settings: ClassVar = {"lr": 1e-3, "weight_decay": 1.0}
    epochs = 10
    minutes = 0.3
    batch_size = 64
    window, horizon = 512, 96

    def load(self, root: Path) -> Data:
        values = np.loadtxt(root / self.needs, delimiter=",", skiprows=1, usecols=range(1, 8), dtype=np.float32)
        month = 30 * 24
        ends = [12 * month, 16 * month, 20 * month]
        train = values[: ends[0]]
        series = torch.from_numpy((values - train.mean(0)) / train.std(0))
        starts = [0, ends[0] - self.window, ends[1] - self.window]
        return Data(*(self._windows(series[start:end]) for start, end in zip(starts, ends, strict=True)))

    def _windows(self, series: Tensor) -> Batch:
        windows = series.unfold(0, self.window + self.horizon, 1)  # (windows, channels, hours)
        return windows[..., : self.window], windows[..., self.window :]

    def network(self) -> nn.Module:
        return ChannelAttention(7, self.window, self.horizon)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets)

    score = loss


class ChannelAttention(nn.Module):
    """Attention between channels, with the mean and deviation of each window taken out and put back."""

    def __init__(self, channels: int, window: int, horizon: int, width: int = 16) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(channels, 1)), nn.Parameter(torch.zeros(channels, 1))
        self.queries, self.keys = nn.Linear(window, width), nn.Linear(window, width)
        self.values, self.head = nn.Linear(window, window), nn.Linear(window, horizon)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, channels, horizon)."""
        mean, deviation = x.mean(-1, keepdim=True), x.std(-1, keepdim=True) + 1e-5
        z = (x - mean) / deviation * self.scale + self.shift
        z = z + F.scaled_dot_product_attention(self.queries(z), self.keys(z), self.values(z))
        return (self.head(z) - self.shift) / self.scale * deviation + mean


class Text(Workload):
    """The next letter of Python's own help pages, by a small transformer with AdamW; bits a letter."""

    name = "text"
    needs = ""
    unit = "bits"
    lower_is_better = True
    base = torch.optim.AdamW
    settings: ClassVar = {"lr": 2e-3, "weight_decay": 0.1}
    epochs = 8
    minutes = 0.9
    batch_size = 32
    warmup_epochs = 1
    context = 96

    def __init__(self) -> None:
        self.text = "\n".join(topics[name] for name in sorted(topics))
        self.letters = sorted(set(self.text))

    def load(self, root: Path) -> Data:
        codes = torch.tensor([self.letters.index(letter) for letter in self.text])
        windows = codes.unfold(0, self.context + 1, self.context)
        place = torch.arange(len(windows)) // 20 % 10  # every tenth passage is held out, and the one before it
        parts = (windows[mask] for mask in (place < 8, place == 8, place == 9))
        return Data(*((part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts))

    def network(self) -> nn.Module:
        return SmallGPT(len(self.letters), self.context)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets) / math.log(2)


class SmallGPT(nn.Module):
    """A transformer that sees the letters so far: pre-norm blocks, learned positions."""

    def __init__(self, letters: int, context: int, width: int = 64, heads: int = 4, blocks: int = 3) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(letters, width), nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(CausalBlock(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, letters so far, next letter)."""
        return self.head(self.norm(self.blocks(self.embedding(x) + self.position)))


class CausalBlock(nn.Module):
    """Attention to earlier letters and a hidden layer, each behind a LayerNorm and with a way past it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.inputs, self.outputs = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return h + mlp(norm(h)) with h = x + attention(norm(x))."""
        q, k, v = self.inputs(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = x + self.outputs(attended)
        return h + self.mlp(self.norm2(h))


WORKLOADS: dict[str, Workload] = {
    workload.name: workload for workload in (SmallResNet(), SmallViT(), NoisyLabels(), Forecast(), Text())
}
