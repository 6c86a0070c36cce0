r"""The curvature of the loss: the largest eigenvalues of its Hessian, the density of all of them, and their sum.

.. math::  H = \nabla^2 f(w), \qquad H v_i = \lambda_i v_i, \qquad \lambda_1 \ge \lambda_2 \ge \dots \ge \lambda_n

for the trainable weights (a shared weight counts once), over all samples and with BatchNorm in eval mode, as in
:class:`~sparsam.analysis.objective.Objective`. H is never formed: a few hundred products with it are enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsam.analysis.directions import Direction
from sparsam.analysis.kernels import kernels
from sparsam.analysis.lanczos import Array, lanczos, largest, quadrature
from sparsam.analysis.objective import Objective, check_objective
from sparsam.checks import check_choice, check_number, check_whole
from sparsam.errors import UserValueError
from sparsam.randomness import random_generator
from sparsam.selection import flatten, unflatten

Progress = Callable[[int, int, float], object]
"""Called after each product: products so far, products at most, seconds left at most."""

GIB = 2**30
WORKING = 4  # vectors besides V: the remainder, and for a product its sum and the two derivatives of a batch
TOLERANCES = {"fp32": 1e-4, "tf32": 3e-3}  # rounding to three digits leaves 1e-3 to 2e-3, or more
FURTHER = {"fp32": 1.0, "tf32": 0.7}  # the search goes so far: float32 then measures what TF32 has rounded
EIGENVALUES, DENSITY = 0, 1  # two streams of random numbers


@dataclass(frozen=True)
class Eigenvalues:
    r"""The largest eigenvalues, and how accurate they are.

    For a unit vector v, a value is :math:`v^\top H v` and its residual :math:`\lVert H v - \lambda v \rVert`. Both are
    measured with one more product after the search. H has an eigenvalue within the residual of the value.

    Attributes:
        values: The largest first.
        residuals: In the same order.
        vectors: The unit vectors v, as rows of a matrix: all trainable weights, one parameter after the other.
        products: The number of products used.
        converged: Whether each residual is at most the tolerance times the largest absolute eigenvalue found.
    """

    values: tuple[float, ...]
    residuals: tuple[float, ...]
    vectors: Tensor = field(repr=False, compare=False)
    products: int
    converged: bool

    @property
    def ratio(self) -> float | None:
        """λ1/λ5; None if there is no positive λ5."""
        return self.values[0] / self.values[4] if len(self.values) > 4 and self.values[4] > 0 else None

    def directions(self, objective: Objective) -> list[Direction]:
        """Return the vectors as directions of a landscape, with one tensor for each parameter."""
        return [unflatten(v, objective.params) for v in self.vectors]


@dataclass(frozen=True, eq=False)
class Density:
    r"""The density of all eigenvalues by stochastic Lanczos quadrature (Ghorbani, Krishnan and Xiao 2019).

    .. math::  \phi(t) = \frac1n \sum_{i=1}^n \delta(t - \lambda_i)
               \;\approx\; \frac1p \sum_{j=1}^p \sum_i \omega_{ji}\, \delta(t - \theta_{ji})

    Attributes:
        nodes: θ, a row for each of p probes.
        weights: ω, the same; each row adds up to 1.
        size: n, the number of weights of the model.

    >>> density = Density(np.array([[3.0, 1.0]]), np.array([[0.25, 0.75]]), size=8)
    >>> density.moment(1), density.trace
    (1.5, 12.0)
    """

    nodes: Array
    weights: Array
    size: int

    def moment(self, power: int) -> float:
        r"""Return the estimate of :math:`\mathrm{tr}(H^k) / n`."""
        return float(self._moments(power).mean())

    @property
    def trace(self) -> float:
        """The sum of all eigenvalues, Hutchinson's estimate."""
        return self.size * self.moment(1)

    @property
    def trace_error(self) -> float | None:
        """The standard error of the trace; None for a single probe."""
        found = self._moments(1)
        return float(self.size * found.std(ddof=1) / len(found) ** 0.5) if len(found) > 1 else None

    def curve(self, grid: Array | None = None, width: float | None = None) -> tuple[Array, Array]:
        """Return points and the density there. Every node becomes a normal distribution.

        Args:
            grid: The points; default: 2000 over all nodes, and as far beyond as the curve is not 0.
            width: The standard deviation; default: 0.5 % of the range of the nodes.
        """
        low, high = self.range
        width = width or 0.005 * (high - low) or 1e-6
        grid = np.linspace(low - 6 * width, high + 6 * width, 2000) if grid is None else grid
        far = (grid[:, None] - self.nodes.ravel()) / width
        heights = self.weights.ravel() / len(self.nodes) / (width * math.sqrt(2 * math.pi))
        return grid, np.exp(-0.5 * far**2) @ heights

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest node. They lie within the range of the eigenvalues, close to its ends."""
        held = self.nodes[self.weights > 0]
        return float(held.min()), float(held.max())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for a JSON file."""
        return {"nodes": self.nodes.tolist(), "weights": self.weights.tolist(), "size": self.size}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Density:
        """Return what :meth:`to_dict` was called on."""
        return cls(np.array(values["nodes"]), np.array(values["weights"]), values["size"])

    def _moments(self, power: int) -> Array:
        moments: Array = (self.weights * self.nodes**power).sum(1)
        return moments


def top_eigenvalues(
    objective: Objective,
    k: int = 5,
    *,
    products: int = 100,
    tolerance: float | None = None,
    precision: str = "fp32",
    memory_limit: float = 4.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Eigenvalues:
    """Find the k largest eigenvalues by the Lanczos method, with full orthogonalisation.

    The search ends when the residuals are small, or when the products are used up. It keeps 4 k + 20 vectors, or as
    many as fit into memory, and restarts from the best of them. With fewer vectors it takes more products. A multiple
    eigenvalue may be found only once.

    Args:
        objective: The loss as a function of the weights. It does not change.
        k: The number of eigenvalues.
        products: The largest number of products, k of them for the residuals at the end.
        tolerance: The largest residual, in units of the largest absolute eigenvalue; default: 1e-4, or 3e-3 for "tf32".
            The error of an eigenvalue is of the order of its squared residual. Rounding leaves residuals of about 1e-6
            in float32 and of 1e-3 or more in TF32.
        precision: "fp32", or "tf32" to search with faster products, which a GPU rounds to three digits. Values and
            residuals are always measured in float32.
        memory_limit: GiB for vectors. The activations of a product come on top.
        seed: The seed of the first vector.
        progress: Called after each product.

    >>> data = torch.eye(2), torch.zeros(2, 1)
    >>> objective = Objective(torch.nn.Linear(2, 1, bias=False), torch.nn.functional.mse_loss, data)
    >>> top_eigenvalues(objective, k=2).values
    (1.0, 1.0)
    """
    check_objective(objective)
    n = weights_of(objective)
    check_choice("precision", precision, tuple(TOLERANCES))
    tolerance = TOLERANCES[precision] if tolerance is None else tolerance
    check_number("tolerance", tolerance, "a number >= 0", lambda value: value >= 0)
    vectors = search_vectors(objective, k, products=products, memory_limit=memory_limit)
    starts = iter(range(products + 1))
    timer = _Timer(products, progress)

    def start() -> Tensor:
        generator = random_generator(seed, EIGENVALUES, next(starts))
        return torch.randn(n, generator=generator, dtype=_dtype(objective)).to(objective.device)

    _check_loss(objective)
    search = _product(objective, precision)
    further = tolerance * FURTHER[precision]
    space = largest(search, start, k, steps=products - k, vectors=vectors, tolerance=further, on_step=timer.tick)
    scale = float(np.abs(space.ritz().values).max())
    space.restart(k)
    exact = _product(objective, "fp32")
    measured = [(*_measured(exact, space.basis[i], timer), i) for i in range(k)]
    values, residuals, order = zip(*sorted(measured, reverse=True), strict=True)
    return Eigenvalues(
        values, residuals, space.basis[list(order)], timer.done, bool(max(residuals) <= tolerance * scale)
    )


def spectral_density(
    objective: Objective,
    *,
    probes: int = 3,
    steps: int = 60,
    known: Eigenvalues | None = None,
    precision: str = "fp32",
    memory_limit: float = 4.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Density:
    r"""Estimate the density of the eigenvalues by Lanczos quadrature from random sign vectors.

    If the k largest eigenvalues are known, only the others are estimated, in the space that is orthogonal to the known
    vectors Q:

    .. math::  \mathrm{tr}(H) = \mathrm{tr}(Q H Q^\top) + \mathrm{tr}\big((1 - Q^\top Q)\, H\, (1 - Q^\top Q)\big)

    which holds for any orthonormal Q, and removes most of the noise (Meyer et al. 2021, Hutch++).

    Args:
        objective: The loss as a function of the weights. It does not change.
        probes: The number of random vectors. The noise falls with its square root.
        steps: Lanczos steps for each vector, one product each. Twice as many resolve details half as wide.
        known: The result of :func:`top_eigenvalues` for the same objective.
        precision: "fp32", or "tf32": its rounding is far below the noise of a few probes.
        memory_limit: GiB for vectors. The activations of a product come on top.
        seed: The seed of the random vectors.
        progress: Called after each product.
    """
    check_objective(objective)
    n, dtype = weights_of(objective), _dtype(objective)
    check_whole("probes", probes)
    check_choice("precision", precision, tuple(TOLERANCES))
    k, deflated = (len(known.values), known.vectors) if known else (0, None)
    if deflated is not None and deflated.shape[1] != n:
        raise UserValueError(f"known must be of the same objective, of {n:,} weights, but is of {deflated.shape[1]:,}")
    steps = density_steps(objective, steps, k=k, memory_limit=memory_limit)
    timer, shape = _Timer(probes * steps, progress), (probes, k + steps)
    nodes, weights = np.zeros(shape), np.zeros(shape)  # a space that ends early leaves nodes of weight 0
    if known:
        nodes[:, :k], weights[:, :k] = known.values, 1 / n
    _check_loss(objective)
    product = _product(objective, precision)
    for probe in range(probes if steps else 0):
        generator = random_generator(seed, DENSITY, probe)
        signs = torch.randint(0, 2, (n,), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        space = lanczos(product, signs.to(objective.device, dtype), steps, deflated=deflated, on_step=timer.tick)
        found, shares = quadrature(space)
        nodes[probe, k : k + len(found)], weights[probe, k : k + len(found)] = found, shares * (n - k) / n
        timer.done = (probe + 1) * steps
    return Density(nodes, weights, n)


def search_vectors(objective: Objective, k: int, *, products: int, memory_limit: float) -> int:
    """Return the number of vectors that :func:`top_eigenvalues` keeps. Refuse impossible settings."""
    n = weights_of(objective)
    check_whole("k", k)
    if k > n:
        raise UserValueError(f"k must be at most the number of trainable weights, {n}, but is {k}")
    check_whole("products", products, least=2 * k, allowed="a whole number >= 2 k = {least}")
    wanted, held = min(n, products - k, 4 * k + 20), _vectors_in(memory_limit, objective) - k
    least = min(wanted, 2 * k + 2)  # with fewer, a restart would keep nearly all vectors
    if held < least:
        raise UserValueError(
            f"memory_limit must hold {least} vectors for k={k} eigenvalues of {n:,} weights and {k + WORKING} to work "
            f"with, {_gib(objective, least + k)}, but is {memory_limit:g} GiB: raise it, or lower k"
        )
    return min(wanted, held)


def density_steps(objective: Objective, steps: int, *, k: int = 0, memory_limit: float) -> int:
    """Return the number of steps of :func:`spectral_density`. Refuse more than fit into the memory."""
    check_whole("steps", steps)
    n, held = weights_of(objective), _vectors_in(memory_limit, objective) - 2 * k
    steps = min(steps, n - k)
    if held < steps:
        remedy = f"raise it, or take at most {held} steps" if held > 0 else "raise it"
        raise UserValueError(
            f"memory_limit must hold {steps} vectors of {n:,} weights for as many steps and {2 * k + WORKING} to work "
            f"with, {_gib(objective, steps + 2 * k)}, but is {memory_limit:g} GiB: {remedy}"
        )
    return steps


def memory_needed(
    objective: Objective, *, k: int = 5, products: int = 100, steps: int = 60, memory_limit: float = 4.0
) -> int:
    """Return the bytes that the vectors of both functions take at most, the density with `known`.

    Activations come on top. Settings that those functions refuse are refused here too.
    """
    search = search_vectors(objective, k, products=products, memory_limit=memory_limit) + k
    density = density_steps(objective, steps, k=k, memory_limit=memory_limit) + 2 * k
    return _bytes(objective, max(search, density))


def weights_of(objective: Objective) -> int:
    """Return n, the number of trainable weights."""
    return sum(p.numel() for p in objective.params)


class _Timer:
    """Counts products and reports how long the others will take at most."""

    def __init__(self, total: int, progress: Progress | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.progress, self.clock = total, progress, clock
        self.done, self.began = 0, clock()

    def tick(self) -> None:
        self.done += 1
        if self.progress is not None:
            left = (self.clock() - self.began) / self.done * (self.total - self.done)
            self.progress(self.done, self.total, left)


def _check_loss(objective: Objective) -> None:
    loss = objective.loss().item()
    if not math.isfinite(loss):
        raise UserValueError(f"the loss over the data must be finite, but is {loss}")


def _product(objective: Objective, precision: str) -> Callable[[Tensor], Tensor]:
    def product(v: Tensor) -> Tensor:
        with kernels("tf32" if precision == "tf32" else "ieee"):
            return flatten(objective.hessian_product(unflatten(v, objective.params)))

    return product


def _measured(product: Callable[[Tensor], Tensor], v: Tensor, timer: _Timer) -> tuple[float, float]:
    """Return the value and the residual of a vector, from one product."""
    w = product(v)
    square = (v * v).sum(dtype=torch.float64)
    value = (v * w).sum(dtype=torch.float64) / square
    residual = torch.linalg.vector_norm(w - value.to(v.dtype) * v, dtype=torch.float64) / square.sqrt()
    timer.tick()
    value_, residual_ = torch.stack((value, residual)).tolist()
    return value_, residual_


def _dtype(objective: Objective) -> torch.dtype:
    dtypes = {p.dtype for p in objective.params}
    wrong = dtypes - {torch.float32, torch.float64}
    if wrong:
        raise UserValueError(
            f"the weights must be float32 or float64 for a Hessian, but some are {wrong.pop()}: use model.float()"
        )
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _vectors_in(memory_limit: float, objective: Objective) -> int:
    check_number("memory_limit", memory_limit, "a number of GiB > 0", lambda value: value > 0)
    if math.isinf(memory_limit):
        return 1 << 62
    return int(memory_limit * GIB / (weights_of(objective) * _dtype(objective).itemsize)) - WORKING


def _bytes(objective: Objective, vectors: int) -> int:
    return (vectors + WORKING) * weights_of(objective) * _dtype(objective).itemsize


def _gib(objective: Objective, vectors: int) -> str:
    return f"{_bytes(objective, vectors) / GIB:.3g} GiB"
