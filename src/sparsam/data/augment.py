"""Crop, flip, normalise and cutout for whole batches on the device: no Python for single images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Augmentation:
    """How a training image is augmented.

    Args:
        crop_padding: Pad by so many zero pixels, then crop to the old size at random; 0: do not crop.
        flip: Mirror images with a probability of one half.
        cutout: The side of a square that is set to the mean colour. Its centre is random, so part of it may lie outside
            the image; 0: no cutout.
        cutout_probability: The share of the images that get one.
    """

    crop_padding: int = 0
    flip: bool = False
    cutout: int = 0
    cutout_probability: float = 1.0

    def __call__(self, x: Tensor, mean: Tensor, std: Tensor, generator: torch.Generator) -> Tensor:
        """Return bytes (N, C, H, W) as normalised, augmented float32 images."""
        if self.crop_padding:
            x = random_crop(x, self.crop_padding, generator)
        if self.flip:
            x = random_flip(x, generator)
        x = normalise(x, mean, std)
        if self.cutout:
            x = random_cutout(x, self.cutout, self.cutout_probability, generator)
        return x


def normalise(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return (x / 255 - mean) / std, channel by channel."""
    # In place on a copy: a batch of ImageNet is large, and three more of its size take longer than the arithmetic.
    return x.to(torch.float32, copy=True).div_(255).sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))


def random_crop(x: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Return each image shifted by up to `padding` pixels in both directions and filled up with zeros."""
    n, _, height, width = x.shape
    top, left = torch.randint(0, 2 * padding + 1, (2, n, 1), device=x.device, generator=generator)
    rows = (top + torch.arange(height, device=x.device)).unsqueeze(2)
    columns = (left + torch.arange(width, device=x.device)).unsqueeze(1)
    image = torch.arange(n, device=x.device).view(n, 1, 1)
    return F.pad(x, [padding] * 4).permute(0, 2, 3, 1)[image, rows, columns].permute(0, 3, 1, 2)


def random_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return each image mirrored with a probability of one half."""
    mirrored = torch.rand(len(x), 1, 1, 1, device=x.device, generator=generator) < 0.5
    return torch.where(mirrored, x.flip(3), x)


def random_cutout(x: Tensor, size: int, probability: float, generator: torch.Generator) -> Tensor:
    """Return the images, a share of them with a square of zeros whose centre is uniform over the image."""
    n, _, height, width = x.shape
    place = torch.rand(3, n, 1, device=x.device, generator=generator)
    top = (place[0] * height).floor() - size // 2
    left = (place[1] * width).floor() - size // 2
    rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
    inside_rows = (rows >= top) & (rows < top + size) & (place[2] < probability)
    inside_columns = (columns >= left) & (columns < left + size)
    return x.masked_fill((inside_rows.unsqueeze(2) & inside_columns.unsqueeze(1)).unsqueeze(1), 0.0)
