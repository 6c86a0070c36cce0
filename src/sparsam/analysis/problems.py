r"""Smooth problems, not convex, of which all constants in the convergence theorems are known.

.. math::  f(w) = \sum_i a_i\, \varphi(\langle x_i, w\rangle - y_i), \qquad
           \nabla f(w) = X^\top \big(a \odot \varphi'(Xw - y)\big)

with a_i > 0 and a bounded term :math:`\varphi \ge 0` of which :math:`|\varphi'| \le s_1` and
:math:`|\varphi''| \le s_2` are known. X has the rows :math:`x_i` and :math:`\lVert X\rVert` is its spectral norm. Then,
whatever the noise,

.. math::  \lVert\nabla f(w)\rVert \le \lVert X\rVert\, \lVert a \odot \varphi'\rVert
           \le \lVert X\rVert\, \lVert a\rVert\, s_1 = G .

L and :math:`\sigma` depend on how a gradient is observed and stand with each class. The theorems need L of the
*observed* gradient, the same noise at both points (docs/theorems.md), so that is what L is here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsam.checks import check_choice
from sparsam.randomness import random_generator


@dataclass(frozen=True)
class Term:
    r"""A bounded function :math:`\varphi \ge 0` with its derivative and what bounds the first and the second."""

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    slope: float
    curvature: float


COSINE = Term(lambda z: 1 - z.cos(), torch.sin, 1.0, 1.0)
# r²/(1+r²): φ' = 2r/(1+r²)² is largest at r = 1/√3; φ'' = (2-6r²)/(1+r²)³ lies between -1/2 (r = ±1) and 2 (r = 0).
ROBUST = Term(lambda r: r**2 / (1 + r**2), lambda r: 2 * r / (1 + r**2) ** 2, 3 * math.sqrt(3) / 8, 2.0)
# 1/(1+e^z) =: p: φ' = -p(1-p) is -1/4 at z = 0; |φ''| = p(1-p)|1-2p| is largest at p = 1/2 ± 1/√12.
SIGMOID = Term(lambda z: (-z).sigmoid(), lambda z: -z.sigmoid() * (-z).sigmoid(), 1 / 4, 1 / (6 * math.sqrt(3)))


class Problem(ABC):
    """A sum of terms and a way to observe its gradient.

    Args:
        about: One line for people.
        term: phi.
        x: The rows x_i.
        y: One number for each row.
        a: The weight of each term.
        start: w_1.
    """

    L: float
    sigma: float

    def __init__(self, about: str, term: Term, x: Tensor, y: Tensor, a: Tensor, start: Tensor) -> None:
        self.about, self.term, self.x, self.y, self.a, self.start = about, term, x, y, a, start
        self.G = float(torch.linalg.matrix_norm(x, 2) * a.norm()) * term.slope

    def loss(self, w: Tensor) -> Tensor:
        """Return f(w); dimensions before the last are a batch of points."""
        return self.term.value(w @ self.x.T - self.y) @ self.a

    def gradient(self, w: Tensor) -> Tensor:
        """Return the gradient of f at w; dimensions before the last are a batch of points."""
        return (self.a * self.term.derivative(w @ self.x.T - self.y)) @ self.x

    @abstractmethod
    def draw(self, steps: int, generator: torch.Generator) -> Tensor:
        """Return the noise of so many steps, one row for each."""

    @abstractmethod
    def observed(self, w: Tensor, noise: Tensor) -> Tensor:
        """Return the observed gradient g(w; noise) at one point."""


class AdditiveNoise(Problem):
    r"""g = gradient + n with n uniform on the sphere of radius :math:`\sigma`: E n = 0 and E‖n‖² = σ², exactly.

    The noise does not depend on w, so the observed gradient is as smooth as f:

    .. math::  \lVert\nabla^2 f\rVert = \lVert X^\top \mathrm{diag}(a \odot \varphi'') X\rVert
               \le s_2 \lVert X^\top \mathrm{diag}(a) X\rVert = L .
    """

    def __init__(self, about: str, term: Term, x: Tensor, y: Tensor, a: Tensor, start: Tensor, *, sigma: float) -> None:
        super().__init__(about, term, x, y, a, start)
        self.sigma = sigma
        self.L = term.curvature * float(torch.linalg.matrix_norm(x.T @ (a[:, None] * x), 2))

    def draw(self, steps: int, generator: torch.Generator) -> Tensor:
        """Return points on the sphere."""
        n = torch.randn(steps, self.start.numel(), dtype=self.start.dtype, generator=generator)
        return self.sigma * nn.functional.normalize(n)

    def observed(self, w: Tensor, noise: Tensor) -> Tensor:
        """Return the gradient plus the noise."""
        return self.gradient(w) + noise


class Batches(Problem):
    r"""The mean of n terms (a_i = 1/n), observed through b of them, drawn uniformly with replacement.

    With :math:`g_i = \varphi'(\langle x_i, w\rangle - y_i)\, x_i` the gradient of one term, g is the mean of b
    independent :math:`g_i`, whose mean is the gradient of f and whose variance is at most :math:`E\lVert g_i\rVert^2`:

    .. math::  \sigma^2 = \frac{s_1^2}{b} \cdot \frac1n \sum_i \lVert x_i\rVert^2, \qquad
               L = s_2 \max_i \lVert x_i\rVert^2,

    the latter for every batch, as the smoothness of a mean is at most that of its roughest member.
    """

    def __init__(self, about: str, term: Term, x: Tensor, y: Tensor, start: Tensor, *, batch: int) -> None:
        super().__init__(about, term, x, y, torch.full_like(y, 1 / len(y)), start)
        self.batch = batch
        squares = x.square().sum(1)
        self.sigma = term.slope * math.sqrt(float(squares.mean()) / batch)
        self.L = term.curvature * float(squares.max())

    def draw(self, steps: int, generator: torch.Generator) -> Tensor:
        """Return the terms of each batch, by their numbers."""
        return torch.randint(len(self.y), (steps, self.batch), generator=generator)

    def observed(self, w: Tensor, noise: Tensor) -> Tensor:
        """Return the mean gradient of the batch."""
        x = self.x[noise]
        return self.term.derivative(x @ w - self.y[noise]) @ x / self.batch


def cosine() -> Problem:
    r""":math:`\sum_i a_i (1 - \cos z_i)` with z = Qw, Q orthogonal, a from 0.1 to 1: L = 1 and G = ‖a‖ are attained."""
    d, generator = 40, random_generator(1)
    q = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=generator)).Q
    a = torch.logspace(-1, 0, d, dtype=torch.float64)
    z = 2.5 * torch.rand(d, dtype=torch.float64, generator=generator) - 1.25
    z[:10] *= 2  # beyond the rims of their basins: the start has negative curvature
    about = "rotated sum of 40 cosines, additive noise"
    return AdditiveNoise(about, COSINE, q, torch.zeros_like(a), a, q.T @ z, sigma=2.5)


def robust() -> Problem:
    """Regression with the loss r²/(1+r²), a fifth of the targets far off; the noise is that of batches of 4."""
    n, generator = 200, random_generator(2)
    x = _rows(n, 40, generator, common=1.0)
    w = 0.5 * torch.randn(40, dtype=torch.float64, generator=generator)
    w[0] += 1.5
    y = x @ w + 0.1 * torch.randn(n, dtype=torch.float64, generator=generator)
    y[: n // 5] += 3
    about = "robust regression, batches of 4 of 200"
    return Batches(about, ROBUST, x, y, torch.zeros_like(w), batch=4)


def sigmoid() -> Problem:
    """Classification with the loss 1/(1+e^z), z = label · ⟨x, w⟩, a tenth of the labels wrong; batches of 4."""
    n, generator = 200, random_generator(3)
    x = 4 * _rows(n, 40, generator)
    w = torch.randn(40, dtype=torch.float64, generator=generator)
    label = (x @ w).sign()
    label[: n // 10] *= -1
    about = "sigmoid loss with wrong labels, batches of 4 of 200"
    return Batches(about, SIGMOID, label[:, None] * x, torch.zeros(n, dtype=torch.float64), -0.3 * w, batch=4)


def _rows(n: int, d: int, generator: torch.Generator, common: float = 0.0) -> Tensor:
    """Return rows of length 1 whose directions matter less and less; they may have some of the first in common."""
    x = torch.randn(n, d, dtype=torch.float64, generator=generator) / torch.arange(1, d + 1)
    x[:, 0] += common
    return nn.functional.normalize(x)


PROBLEMS: dict[str, Callable[[], Problem]] = {"cosine": cosine, "robust": robust, "sigmoid": sigmoid}


def build_problem(name: str) -> Problem:
    """Return a problem by its name; it is the same every time."""
    check_choice("problem", name, tuple(PROBLEMS))
    return PROBLEMS[name]()
