r"""The Lanczos method on flat vectors: a symmetric matrix A, known by its products only, projected to a small space.

After m steps there are orthonormal vectors, the rows of V, and a small symmetric T with

.. math::  A V^\top = V^\top T + u\, c^\top, \qquad V u = 0, \quad \lVert u \rVert = 1

An eigenpair :math:`T s = \theta s` gives the Ritz pair :math:`(\theta, V^\top s)` of A, whose residual has the norm
:math:`|c^\top s|`. T is tridiagonal and :math:`c = \beta e_m`, until a restart keeps some Ritz vectors only (thick
restart, Wu and Simon 2000): then T is their diagonal with an arrow, and c what couples them to u.

Every new vector is made orthogonal to all before it, twice. Otherwise converged eigenvalues would appear again and
again, as ghosts. One step is one product with A, four products with V, and one synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsam.errors import UserValueError

Product = Callable[[Tensor], Tensor]
"""v -> A v for symmetric A, on flat vectors. It returns a new tensor, which the method overwrites."""

Array = NDArray[np.float64]

ENDED = 100  # a remainder below so many machine epsilons of ‖A‖ is rounding error: the space is invariant
COLUMNS = 1 << 17  # columns of V that a restart rotates at a time


class Ritz(NamedTuple):
    """Ritz values from the largest on, their residuals, their coordinates in V (columns), and which are recent."""

    values: Array
    residuals: Array
    coordinates: Array
    recent: NDArray[np.bool_]


class Krylov:
    """A Krylov space. Each step adds one vector.

    Args:
        start: The first vector, of any length but zero. V has its dtype and device.
        vectors: The largest number of vectors in V.
        tolerance: A remainder below it, in units of ‖A‖, counts as zero, as does one below rounding error.
    """

    def __init__(self, start: Tensor, vectors: int, tolerance: float = 0.0) -> None:
        self.basis = torch.empty(vectors, start.numel(), dtype=start.dtype, device=start.device)
        self.projected: Array = np.zeros((vectors, vectors))
        self.size = 0  # vectors whose product is known
        self.ended = False  # the space is invariant: there is no next vector
        self.coupling: Array = np.zeros(0)  # c
        self.recent = 0  # where the part of the latest start vector begins; c is zero before it
        self._next, self._length = start, float(_norm(start))
        self._scale, self._least = 0.0, max(tolerance, ENDED * torch.finfo(start.dtype).eps)

    def step(self, product: Product) -> None:
        """Add the next vector and its product."""
        j = self.size
        v = torch.mul(self._next, 1 / self._length, out=self.basis[j])
        self.projected[j, :j] = self.projected[:j, j] = self.coupling
        w = product(v)
        alpha = (v * w).sum(dtype=torch.float64)
        self._orthogonalise(w, j + 1)
        alpha_, beta = torch.stack((alpha, _norm(w))).tolist()  # the one wait
        if not np.isfinite(alpha_ + beta):
            raise UserValueError(f"the product must be finite, but holds NaN or infinity in step {j + 1}")
        self.projected[j, j] = alpha_
        self.size, self._next, self._length = j + 1, w, beta
        self._scale = max(self._scale, abs(alpha_) + beta)
        self.ended = beta <= self._least * self._scale or self.size == v.numel()
        self.coupling = np.zeros(self.size)
        self.coupling[j] = 0.0 if self.ended else beta

    def continue_from(self, start: Tensor) -> None:
        """Continue a space that has ended, from the part of another vector that is orthogonal to V."""
        self._next = start.clone()
        self._orthogonalise(self._next, self.size)
        self._length, self.ended, self.recent = float(_norm(self._next)), False, self.size

    def ritz(self) -> Ritz:
        """Return the Ritz pairs. The part of the latest start vector is separate from what was before."""
        values, coordinates = np.zeros(self.size), np.zeros((self.size, self.size))
        for part in (slice(0, self.recent), slice(self.recent, self.size)):
            values[part], coordinates[part, part] = np.linalg.eigh(self.projected[part, part])
        recent = np.arange(self.size) >= self.recent
        order = np.argsort(-values, kind="stable")
        residuals = np.abs(self.coupling @ coordinates)
        return Ritz(values[order], residuals[order], coordinates[:, order], recent[order])

    def restart(self, keep: int) -> None:
        """Keep the Ritz vectors of the largest values only."""
        ritz = self.ritz()
        chosen = np.argsort(ritz.recent[:keep], kind="stable")  # V holds what is recent last
        coordinates = ritz.coordinates[:, chosen]
        turn = torch.from_numpy(coordinates.T.copy()).to(self.basis)
        for columns in torch.split(self.basis[: self.size], COLUMNS, dim=1):  # in pieces: a copy of V would not fit
            columns[:keep] = turn @ columns
        self.projected[:] = 0
        self.projected[range(keep), range(keep)] = ritz.values[chosen]
        self.coupling = self.coupling @ coordinates
        self.recent = int((~ritz.recent[:keep]).sum())
        self.size = keep

    def _orthogonalise(self, w: Tensor, size: int) -> None:
        basis = self.basis[:size]
        for _ in range(2):  # once leaves rounding errors of the size of |w|, twice is enough (Kahan and Parlett)
            w.addmv_(basis.T, basis @ w, alpha=-1)


def lanczos(
    product: Product,
    start: Tensor,
    steps: int,
    *,
    deflated: Tensor | None = None,
    on_step: Callable[[], Any] = lambda: None,
) -> Krylov:
    """Take so many steps, or fewer if the space ends before.

    Args:
        product: v -> A v, for symmetric A.
        start: The first vector.
        steps: The number of steps, and of vectors in V.
        deflated: Orthonormal vectors, as rows. Only the space that is orthogonal to them is searched. They are the
            first vectors of V.
        on_step: Called after each step.

    >>> diagonal = torch.tensor([3.0, 2.0, 2.0, 1.0], dtype=torch.float64)
    >>> space = lanczos(lambda v: diagonal * v, torch.ones(4, dtype=torch.float64), steps=4)
    >>> space.size, space.ritz().values.round(10).tolist()
    (3, [3.0, 2.0, 1.0])
    """
    kept = 0 if deflated is None else len(deflated)
    space = Krylov(start, min(kept + steps, start.numel()))
    if deflated is not None:
        space.basis[:kept] = deflated
        space.size, space.coupling = kept, np.zeros(kept)
        space.continue_from(start)
    while space.size < len(space.basis) and not space.ended:
        space.step(product)
        on_step()
    return space


def quadrature(space: Krylov) -> tuple[Array, Array]:
    r"""Return the nodes and weights of the Gauss quadrature for the start vector v.

    .. math::  v^\top p(A)\, v = \sum_i \omega_i\, p(\theta_i), \qquad \omega_i = s_{1i}^2, \quad \lVert v \rVert = 1

    for every polynomial p of a degree below twice the number of steps.

    >>> diagonal = torch.tensor([3.0, 2.0, 2.0, 1.0], dtype=torch.float64)
    >>> nodes, weights = quadrature(lanczos(lambda v: diagonal * v, torch.ones(4, dtype=torch.float64), steps=4))
    >>> nodes.round(10).tolist(), weights.round(10).tolist()
    ([3.0, 2.0, 1.0], [0.25, 0.5, 0.25])
    """
    values, _, coordinates, recent = space.ritz()
    return values[recent], coordinates[space.recent, recent] ** 2


def largest(
    product: Product,
    start: Callable[[], Tensor],
    k: int,
    *,
    steps: int,
    vectors: int,
    tolerance: float,
    on_step: Callable[[], Any] = lambda: None,
) -> Krylov:
    """Take steps until the k largest Ritz values have converged. Restart when V is full.

    A single start vector finds a multiple eigenvalue once. When the space ends, and only then, the search goes on from
    another start vector, until that finds nothing among the k largest.

    Args:
        product: v -> A v, for symmetric A.
        start: Returns a new random vector with each call.
        k: The number of values.
        steps: The largest number of steps.
        vectors: The largest number of vectors in V, more than k + 1 unless that is all.
        tolerance: The largest residual, in units of the largest absolute Ritz value.
        on_step: Called after each step.
    """
    space = Krylov(start(), vectors, tolerance)
    for _ in range(steps):
        if space.size == vectors:
            space.restart(k + (vectors - k) // 2)
        space.step(product)
        on_step()
        if _settled(space, k, tolerance):
            break
        if space.ended:
            space.continue_from(start())
    return space


def _settled(space: Krylov, k: int, tolerance: float) -> bool:
    if space.size < k or space.size == space.basis.shape[1]:
        return space.size >= k
    ritz = space.ritz()
    near = tolerance * np.abs(ritz.values).max()
    close = ritz.residuals <= near
    top = int(ritz.recent.argmax())  # the largest that the latest start has found
    alone = space.recent == 0 and not space.ended
    return bool(close[:k].all() and (alone or (close[top] and ritz.values[top] <= ritz.values[k - 1] + near)))


def _norm(vector: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(vector, dtype=torch.float64)
    return length
