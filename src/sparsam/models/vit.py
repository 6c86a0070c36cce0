"""A small vision transformer (Dosovitskiy et al., 2021) for 32×32 images: pre-norm blocks over 4×4 patches."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsam.errors import UserValueError


class Patches(nn.Module):
    """Cuts images into patches, and adds what is learned of each position."""

    def __init__(self, channels: int, image_size: int, patch_size: int, width: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.projection = nn.Conv2d(channels, width, patch_size, patch_size)
        self.position = nn.Parameter(torch.zeros(1, (image_size // patch_size) ** 2, width))
        nn.init.trunc_normal_(self.position, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, patches, width)."""
        if x.shape[-2:] != (self.image_size, self.image_size):
            size = f"{self.image_size}×{self.image_size}"
            raise UserValueError(f"images must be {size} for this network, but are {x.shape[-2]}×{x.shape[-1]}")
        return self.projection(x).flatten(2).transpose(1, 2) + self.position  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Every patch looks at every other one, with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.outputs = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return softmax(q kᵀ / √d) v, projected."""
        q, k, v = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        return self.outputs(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a hidden layer, each behind a LayerNorm and with a way past it."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return h + mlp(norm(h)) with h = x + attention(norm(x))."""
        h = x + self.attention(self.norm1(x))
        return h + self.mlp(self.norm2(h))  # type: ignore[no-any-return]


class MeanOfPatches(nn.Module):
    """Takes the mean over the patches."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, width)."""
        return x.mean(1)


class ViT(nn.Sequential):
    """A chain of stem, blocks and head, so that it can be cut before any block. It has no dropout.

    Args:
        classes: The number of outputs.
        channels: Channels of the images.
        image_size: Their height and width.
        patch_size: Height and width of a patch.
        width: Of what is known about a patch.
        depth: The number of blocks.
        heads: Of each attention.
    """

    def __init__(
        self,
        classes: int,
        *,
        channels: int = 3,
        image_size: int = 32,
        patch_size: int = 4,
        width: int = 256,
        depth: int = 8,
        heads: int = 4,
    ) -> None:
        stages: OrderedDict[str, nn.Module] = OrderedDict(stem=Patches(channels, image_size, patch_size, width))
        stages["blocks"] = nn.Sequential(*(Block(width, heads, 4 * width) for _ in range(depth)))
        stages["head"] = nn.Sequential(nn.LayerNorm(width), MeanOfPatches(), nn.Linear(width, classes))
        super().__init__(stages)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
