r"""Directions in the space of the weights, and the weights at a point of the plane that they span.

A direction d is a list with one tensor for each trainable parameter, in the model's order; a shared parameter occurs
once. At the point (a, b) of a landscape the weights are

.. math::  w + a\, d_1 + b\, d_2 .

**Random, filter-normalised** (Li et al., *Visualizing the Loss Landscape of Neural Nets*, 2018): entries are drawn from
N(0, 1), then each filter i of each weight j is scaled to the length of the weights' own filter,

.. math::  d_{j,i} \leftarrow \frac{d_{j,i}}{\lVert d_{j,i} \rVert_2}\, \lVert w_{j,i} \rVert_2 ,

so that the scale of the weights does not matter. A filter is a slice along the first dimension of a weight: it makes
one channel of a convolution, or one output of a linear layer. Biases and parameters of normalisation layers have no
filters: their direction is zero.

**Principal** directions are those in which checkpoints of a training differ most from w.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sparsam.errors import UserValueError
from sparsam.masks.norm import NORMALISATION
from sparsam.perturbation import restore, save
from sparsam.randomness import random_generator
from sparsam.runs.checkpoint import load_checkpoint
from sparsam.runs.files import RunError

Direction = list[Tensor]
Checkpoint = str | Path | Mapping[str, Tensor]

RESOLUTION = 1e-7  # principal directions shorter than this share of the longest are rounding errors


def random_directions(model: nn.Module, count: int, seed: int = 0) -> list[Direction]:
    """Return random directions, each filter scaled to the length of the model's own filter.

    The random numbers depend on the seed and on the shapes alone. So models of one architecture share their directions,
    each in its own scale, on every device, also if some of their layers are frozen.
    """
    still = _without_filters(model)
    if all(name in still for name, p in model.named_parameters() if p.requires_grad):
        raise UserValueError(
            "model must have a trainable weight with filters (two dimensions or more) for random directions, but all "
            "of its trainable parameters are biases or belong to normalisation layers"
        )
    directions = []
    for k in range(count):
        generator, direction = random_generator(seed, k), []
        for name, p in model.named_parameters():
            draw = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if p.requires_grad:
                d = torch.zeros_like(draw) if name in still else filter_normalised(draw, p)
                direction.append(torch.empty_like(p).copy_(d))  # in the memory format of p
        directions.append(direction)
    return directions


def filter_normalised(direction: Tensor, weight: Tensor) -> Tensor:
    r"""Return :math:`d_i \lVert w_i \rVert_2 / \lVert d_i \rVert_2` for each slice i along the first dimension.

    >>> filter_normalised(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    tensor([[0.6000, 0.8000],
            [2.0000, 0.0000]])
    """
    filters = direction.flatten(1)
    lengths = torch.linalg.vector_norm(weight.detach().to(direction).flatten(1), dim=1, keepdim=True)
    scaled: Tensor = filters * (lengths / torch.linalg.vector_norm(filters, dim=1, keepdim=True))
    return scaled.view_as(direction)


class Principal(NamedTuple):
    """Principal directions, and the coordinates of the checkpoints."""

    directions: list[Direction]
    path: NDArray[np.float64]
    """The coordinates of the checkpoints, one row for each."""
    explained: list[float]
    """The share of the checkpoints' squared distance from w that lies along each direction."""


def principal_directions(model: nn.Module, checkpoints: Sequence[Checkpoint], count: int) -> Principal:
    r"""Return the directions in which checkpoints differ most from the model's weights w.

    They are the leading right singular vectors of the matrix with the rows :math:`w_t - w`. The matrix is not centred
    at the mean: the plane passes through w, its origin. A direction is scaled so that the checkpoint that lies farthest
    along it is at 1; all others lie in [-1, 1]. Biases and normalisation parameters take part: training moves them too.

    Args:
        model: Its trainable parameters are w.
        checkpoints: State dicts, or files with one, or checkpoints of runs.
        count: The number of directions.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    rows = torch.stack([_displacement(named, checkpoint, at) for at, checkpoint in enumerate(checkpoints, 1)])
    # There are few checkpoints and many weights. The small matrix of products yields the same singular vectors.
    squares, vectors = (t.flip(-1) for t in torch.linalg.eigh(rows @ rows.T))
    rank = int((squares > RESOLUTION**2 * squares[0].clamp(min=torch.finfo(squares.dtype).tiny)).sum())
    if rank < count:
        raise UserValueError(
            f"checkpoints must differ from the model's weights in {count} independent directions or more for {count} "
            f"principal ones, but the {len(checkpoints)} given differ in {rank}"
        )
    axes = (rows.T @ vectors[:, :count]).T / squares[:count].sqrt()[:, None]
    path = rows @ axes.T
    farthest = path.gather(0, path.abs().argmax(0, keepdim=True))[0]
    sizes = [p.numel() for _, p in named]
    directions = [
        [torch.empty_like(p).copy_(d.view(p.shape)) for (_, p), d in zip(named, flat.split(sizes), strict=True)]
        for flat in axes * farthest[:, None]
    ]
    return Principal(directions, (path / farthest).numpy(), (squares[:count] / squares.sum()).tolist())


class Plane:
    """Writes the weights of a point into the parameters, and restores the old ones bit for bit.

    Parameters whose directions are all zero are not touched.

    Args:
        params: The parameters.
        directions: One or two directions.
    """

    @torch.no_grad()
    def __init__(self, params: Sequence[Tensor], directions: Sequence[Direction]) -> None:
        some = torch.stack([torch.stack([d[i].any() for d in directions]).any() for i in range(len(params))])
        moved = [i for i, moves in enumerate(some.tolist()) if moves]
        self._saved = save(params[i] for i in moved)
        place = {id(params[i]): i for i in moved}
        self._directions = [
            [[d[place[id(p)]] for p in bucket.tensors] for d in directions] for bucket in self._saved
        ]  # in the buckets of the saved weights

    @torch.no_grad()
    def move_to(self, at: Sequence[float]) -> None:
        """Write w + a d1 + b d2, without a synchronisation."""
        for (tensors, copies), directions in zip(self._saved, self._directions, strict=True):
            torch._foreach_copy_(tensors, copies)
            for length, direction in zip(at, directions, strict=True):
                torch._foreach_add_(tensors, direction, alpha=length)

    @torch.no_grad()
    def restore(self) -> None:
        """Write w."""
        restore(self._saved)


def _without_filters(model: nn.Module) -> set[str]:
    """Return the names of the biases and of the parameters of normalisation layers."""
    normalisation = {
        p
        for module in model.modules()
        if any(NORMALISATION.search(cls.__name__) for cls in type(module).mro())
        for p in module.parameters(recurse=False)
    }
    return {
        name
        for name, p in model.named_parameters()
        if p.dim() < 2 or name.rpartition(".")[2].endswith("bias") or p in normalisation
    }


def _displacement(named: Sequence[tuple[str, Tensor]], checkpoint: Checkpoint, at: int) -> Tensor:
    """Return w_t - w as one vector in float64."""
    label = f"checkpoint {at}" if isinstance(checkpoint, Mapping) else str(checkpoint)
    weights: Mapping[str, Any] = checkpoint if isinstance(checkpoint, Mapping) else _read(Path(checkpoint))
    pieces = []
    for name, p in named:
        saved = weights.get(name)
        if not isinstance(saved, Tensor) or saved.shape != p.shape:
            given = f"one of shape {tuple(saved.shape)}" if isinstance(saved, Tensor) else "none"
            raise UserValueError(f"{label} must have a tensor {name!r} of shape {tuple(p.shape)}, but has {given}")
        pieces.append((saved.detach().to("cpu", torch.float64) - p.detach().to("cpu", torch.float64)).flatten())
    displacement = torch.cat(pieces)
    if not displacement.isfinite().all():
        raise UserValueError(f"{label} must hold finite weights, but has NaN or infinite ones")
    return displacement


def _read(path: Path) -> dict[str, Any]:
    content = load_checkpoint(path, torch.device("cpu"))
    weights = content.get("model", content)  # a run's checkpoint, or a plain state dict
    if not isinstance(weights, Mapping):
        raise RunError(f"{path} holds neither a run's checkpoint nor a state dict")
    return dict(weights)
