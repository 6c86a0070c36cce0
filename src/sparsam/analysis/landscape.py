r"""The loss along one direction, or over the plane of two, around the weights of a trained model.

.. math::  L(a, b) = f(w + a\, d_1 + b\, d_2)

with f the mean loss over fixed samples, in eval mode, as :class:`~sparsam.analysis.objective.Objective` computes it,
and directions as in :mod:`sparsam.analysis.directions`. Data, weights, directions and losses stay on the model's
device. The host waits for it only when finished points are saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sparsam.analysis.directions import Checkpoint, Direction, Plane, principal_directions, random_directions
from sparsam.analysis.fusion import fastest
from sparsam.analysis.objective import Objective
from sparsam.checks import check_choice, check_number, check_whole
from sparsam.errors import UserValueError
from sparsam.runs.files import RunError, replace_file

PRECISIONS = ("fp32", "bf16")
BATCH = 1000
FUSED_BATCH = 5000  # small images; fused kernels compute fewer of them faster than they are launched
LARGE_GPU = 40 * 2**30  # bytes; from here on twice as many fit
SMALL = 3 * 32 * 32  # values of an image
AGREEMENT = {"fp32": 1e-4, "bf16": 1e-2}  # relative difference of one loss computed twice, by rounding


@dataclass(frozen=True)
class Landscape:
    """Losses on a grid, and all that a figure needs to know about them."""

    losses: NDArray[np.float64]
    """Of shape (points,), or (points, points) with rows b and columns a. NaN where unfinished, or where the loss is."""
    axis: NDArray[np.float64]
    """The values of a, and of b."""
    centre: float
    """The loss at a = b = 0, which a grid with an even number of points does not hold."""
    finished: int
    """The number of finished points, counted row by row."""
    settings: dict[str, Any]
    """What must be equal for two points to belong to one landscape."""
    path: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 2)))
    """The coordinates of the checkpoints that principal directions come from."""
    explained: list[float] = field(default_factory=list)
    """The share of the checkpoints' squared distance from w that lies along each axis."""
    about: dict[str, Any] = field(default_factory=dict)
    """What the caller wants to be kept, such as the name of the run."""

    @property
    def complete(self) -> bool:
        """Whether all points are finished."""
        return self.finished == self.losses.size

    @property
    def gaps(self) -> int:
        """The number of finished points without a finite loss."""
        return self.finished - int(np.isfinite(self.losses.ravel()[: self.finished]).sum())

    @property
    def median(self) -> float:
        """The median of the finite losses. Unlike the mean, it does not depend on a few far corners."""
        finite = self.losses[np.isfinite(self.losses)]
        return float(np.median(finite)) if len(finite) else math.nan

    def save(self, file: str | Path) -> None:
        """Write it to an npz file. After a crash at any moment there is either the old file or the new one."""
        words = json.dumps({"settings": self.settings, "explained": self.explained, "about": self.about})
        arrays: dict[str, Any] = {"losses": self.losses, "axis": self.axis, "path": self.path}
        numbers: dict[str, Any] = {"centre": self.centre, "finished": self.finished}
        replace_file(Path(file), lambda stream: np.savez(stream, **arrays, **numbers, words=np.array(words)))

    @classmethod
    def load(cls, file: str | Path) -> Landscape:
        """Read what :meth:`save` wrote."""
        if not Path(file).is_file():
            raise RunError(f"there is no landscape at {file}")
        try:
            with Path(file).open("rb") as stream, np.load(stream) as saved:
                arrays = {key: saved[key] for key in ("losses", "axis", "path")}
                words = json.loads(str(saved["words"]))
                return cls(centre=float(saved["centre"]), finished=int(saved["finished"]), **arrays, **words)
        except Exception as error:  # whatever numpy, zip and JSON say of a damaged file
            raise RunError(f"{file} cannot be read as a landscape: {error}") from error


def loss_landscape(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    data: tuple[Any, Any] | Iterable[tuple[Any, Any]],
    *,
    dimensions: int = 2,
    points: int = 50,
    range: float = 1.0,
    directions: str | Sequence[Direction] = "random",
    checkpoints: Sequence[Checkpoint] = (),
    seed: int = 0,
    precision: str = "fp32",
    batch_size: int | None = None,
    file: str | Path | None = None,
    overwrite: bool = False,
    save_every: float = 30.0,
    about: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Landscape:
    """Return the loss around a model's weights. Afterwards the model is as it was before, also after an error.

    Args:
        model: Any module. Frozen parameters do not move, a shared parameter moves once.
        loss_fn: `loss_fn(outputs, targets)`, the mean over the batch, or one loss for each sample.
        data: A pair of tensors (inputs, targets), or batches of such pairs.
        dimensions: 1 or 2.
        points: The number of points on each axis.
        range: Each axis goes from -range to range.
        directions: "random" (filter-normalised), "pca" (of checkpoints), or a list of directions, one for each
            dimension, such as eigenvectors of the Hessian.
        checkpoints: For "pca": state dicts, files with one, or checkpoints of runs.
        seed: The seed of random directions. Models of one architecture share their directions if they share the seed.
        precision: "fp32" computes in the type of the weights, "bf16" under autocast and, on a GPU, with fused kernels
            (:mod:`sparsam.analysis.fusion`).
        batch_size: The size of the batches into which a pair of tensors is split; default: 1000. By default, fused
            kernels get larger batches of small images: 5000, or 10,000 on a large GPU.
        file: An npz file for the finished points. If it exists, the grid is continued from it; one with other settings
            or weights is refused.
        overwrite: Start anew. The file keeps its content until points of the new grid are saved.
        save_every: Seconds between two writes of the file.
        about: What to keep with the losses.
        progress: Called with the number of finished points and of all points. It may raise, to stop.

    >>> model = nn.Linear(3, 1, bias=False)
    >>> found = loss_landscape(model, nn.functional.mse_loss, (torch.ones(4, 3), torch.ones(4, 1)), points=5)
    >>> found.losses.shape, bool(found.losses[2, 2] == found.centre)  # rows and columns 0 to 4: the middle is w
    ((5, 5), True)
    """
    _check(dimensions, points, range, directions, checkpoints, seed, precision)
    dimensions, points, seed = int(dimensions), int(points), int(seed)
    objective = Objective(model, loss_fn, data, batch_size=BATCH if batch_size is None else batch_size)
    # Without its cache: autocast would keep the converted weights of the first point.
    autocast = torch.autocast(objective.device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)
    with torch.no_grad(), autocast:
        forward = fastest(objective) if precision == "bf16" else None
        if forward is not None and all(_values(x) <= SMALL for x, _ in objective.batches):
            # Once for all points. Large images would take too much memory.
            batches = [(forward.prepare(x), y) for x, y in objective.batches]
            batches = joined(batches, fused_batch(objective.device)) if batch_size is None else batches
            objective = Objective(model, loss_fn, batches)
        centre = objective.loss(forward).item()
        if not math.isfinite(centre):
            raise UserValueError(
                f"the loss at the model's own weights must be finite, but is {centre}: {_blame(model)}"
            )
        chosen, path, explained = _directions(model, dimensions, directions, checkpoints, seed)
        settings = {
            "dimensions": dimensions,
            "points": points,
            "range": float(range),
            "directions": directions if isinstance(directions, str) else "given",
            "seed": seed if directions == "random" else None,
            "toward": None if directions == "random" else _fingerprint(t for d in chosen for t in d),
            "samples": objective.count,
            "precision": precision,
            **({} if forward is None else {"fused": True}),
            "device": objective.device.type,
            "weights": _fingerprint([*model.parameters(), *model.buffers()]),
        }
        kept: dict[str, Any] = json.loads(json.dumps(dict(about or {})))  # what cannot be saved fails here, at once
        axis = np.linspace(-range, range, points)
        shape = (points,) * dimensions
        new = Landscape(np.full(shape, np.nan), axis, centre, 0, settings, path, explained, kept)
        old = new if overwrite else _unfinished(file, new)
        values = torch.from_numpy(old.losses.ravel().copy()).to(objective.device)
        grid = _Grid(new, old.finished, values, None if file is None else Path(file), save_every, progress)
        if not old.complete:
            # Row by row: b changes slowly, a fast. A point is (a, b).
            coordinates = [at[::-1] for at in product(axis.tolist(), repeat=dimensions)]
            plane = Plane(objective.params, chosen)
            try:
                for i, point in enumerate(coordinates[old.finished :], old.finished):
                    plane.move_to(point)
                    if forward is not None:
                        forward.refresh()
                    values[i].copy_(objective.loss(forward))
                    grid.point_done()
            except BaseException:  # also for Ctrl-C, finished points are kept
                if grid.finished > old.finished:
                    with contextlib.suppress(Exception):  # a device that failed has no results
                        grid.save()
                raise
            finally:
                plane.restore()
        return grid.save()


def fused_batch(device: torch.device) -> int:
    """Return the batch size for small images and fused convolutions."""
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory > LARGE_GPU
    return 2 * FUSED_BATCH if large else FUSED_BATCH


def joined(batches: Sequence[tuple[Any, Any]], size: int) -> list[tuple[Any, Any]]:
    """Join batches to larger ones of `size` samples. Return them unchanged if their shapes do not fit together."""
    if not all(isinstance(t, Tensor) and t.dim() for batch in batches for t in batch):
        return list(batches)
    if any(len(x) != len(y) for x, y in batches) or len({(x.shape[1:], y.shape[1:]) for x, y in batches}) > 1:
        return list(batches)
    size = max(size, *(len(x) for x, _ in batches))
    return list(zip(*(torch.split(torch.cat(parts), size) for parts in zip(*batches, strict=True)), strict=True))


def _values(x: Any) -> float:
    """Return the number of values in a sample; infinite if it is not a tensor."""
    return x[0].numel() if isinstance(x, Tensor) and x.dim() else math.inf


class _Grid:
    """Counts the finished points, reports them and saves them."""

    def __init__(
        self,
        landscape: Landscape,
        finished: int,
        values: Tensor,
        file: Path | None,
        save_every: float,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.landscape, self.finished, self.values = landscape, finished, values
        self.file, self.save_every, self.progress = file, save_every, progress
        self.last = time.monotonic()
        self._report()

    def point_done(self) -> None:
        self.finished += 1
        self._report()
        if self.file is not None and time.monotonic() - self.last > self.save_every:
            self.save()
            self.last = time.monotonic()

    def save(self) -> Landscape:
        losses = self.values.cpu().numpy().reshape(self.landscape.losses.shape).copy()
        losses.ravel()[self.finished :] = np.nan  # an interrupted point may be written in part
        result = replace(self.landscape, losses=losses, finished=self.finished)
        if self.file is not None:
            result.save(self.file)
        return result

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(self.finished, self.values.numel())


def _unfinished(file: str | Path | None, new: Landscape) -> Landscape:
    """Return the finished points in the file, or the new landscape if there is no file."""
    if file is None or not Path(file).exists():
        return new
    old = Landscape.load(file)
    differences = [
        f"{key} {old.settings.get(key)}, now {new.settings.get(key)}"
        for key in dict.fromkeys([*new.settings, *old.settings])
        if old.settings.get(key) != new.settings.get(key)
    ]
    if not differences and not math.isclose(old.centre, new.centre, rel_tol=AGREEMENT[new.settings["precision"]]):
        differences = [f"loss at the centre {old.centre:g}, now {new.centre:g} (other data, or another loss function)"]
    if differences:
        raise UserValueError(
            f"{file} holds a landscape with other settings, which cannot be continued: {'; '.join(differences)}. "
            f"Delete it to start anew, or use --overwrite"
        )
    return old


def _directions(
    model: nn.Module,
    dimensions: int,
    directions: str | Sequence[Direction],
    checkpoints: Sequence[Checkpoint],
    seed: int,
) -> tuple[Sequence[Direction], NDArray[np.float64], list[float]]:
    nowhere = np.zeros((0, dimensions))
    if directions == "pca":
        principal = principal_directions(model, checkpoints, dimensions)
        return principal.directions, principal.path, principal.explained
    if isinstance(directions, str):
        return random_directions(model, dimensions, seed), nowhere, []
    params = [p for p in model.parameters() if p.requires_grad]
    shapes = [[tuple(t.shape) for t in d] for d in directions]
    if any(shape != [tuple(p.shape) for p in params] for shape in shapes):
        raise UserValueError(
            "directions must have one tensor of its shape for each trainable parameter, but have others"
        )
    return [[torch.empty_like(p).copy_(t) for p, t in zip(params, d, strict=True)] for d in directions], nowhere, []


def _check(
    dimensions: object,
    points: object,
    range: object,
    directions: str | Sequence[Direction],
    checkpoints: Sequence[Checkpoint],
    seed: object,
    precision: object,
) -> None:
    if isinstance(dimensions, bool) or not isinstance(dimensions, Integral) or dimensions not in (1, 2):
        raise UserValueError(f"dimensions must be 1 or 2, but is {dimensions!r}")
    check_whole("points", points, least=2)
    check_number("range", range, "a finite number > 0", lambda value: 0 < value < math.inf)
    check_whole("seed", seed, least=0)
    check_choice("precision", precision, PRECISIONS)
    if isinstance(directions, str):
        check_choice("directions", directions, ("random", "pca"))
    elif len(directions) != dimensions:
        raise UserValueError(f"directions must be {dimensions} for dimensions={dimensions}, but are {len(directions)}")
    if (directions == "pca") != bool(checkpoints):
        given = "there are none" if directions == "pca" else f"directions is {directions!r}"
        raise UserValueError(f'checkpoints must be given for directions="pca", and only then, but {given}')


def _blame(model: nn.Module) -> str:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    broken = [name for name, t in tensors if not t.isfinite().all()]
    return f"{broken[0]} has NaN or infinite values" if broken else "the weights are finite, so check the data"


def _fingerprint(tensors: Iterable[Tensor]) -> str:
    """Return a short hash of all bits of the tensors."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
