r"""SAM and SSAM under the conditions of the convergence theorems, and the bounds of the theorems.

With :math:`\eta_t = \eta_0/\sqrt t` and :math:`\rho_t = \rho_0/\sqrt t`, the theorems bound

.. math::  \frac1T \sum_{t=1}^T E\lVert\nabla f(w_t)\rVert^2 .

Here E is the mean over seeds. Seeds differ in the noise of the gradients and in the masks. All start at the same
:math:`w_1`, and both gradients of a step have the same noise. docs/theorems.md has the theorems, the errors in their
printed proofs, and corrected proofs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from sparsam import __version__
from sparsam.analysis.problems import Problem, build_problem
from sparsam.checks import check_choice, check_number, check_share, check_whole
from sparsam.masks import DynamicMask, Mask, RandomMask
from sparsam.randomness import random_generator
from sparsam.rho import InverseSqrtRho
from sparsam.sam import SAM

Numbers = NDArray[np.float64]

ZETA_2 = math.pi**2 / 6
ZETA_3_2 = 2.612375348685488
MASKS = ("dense", "random", "dynamic")
INTERVAL = 25  # steps between two masks
POINTS = 60  # values of T that are kept of a curve, at most
ROUNDING = 1e-9  # by so much may conditions that hold with equality fail


@dataclass(frozen=True)
class Bounds:
    r"""The right-hand sides of Theorems 1 (SAM) and 2 (SSAM), and their conditions.

    With :math:`\Delta_T = f(w_1) - E f(w_{T+1})` and :math:`C_2 = C_4 = 2 (L\sigma^2\eta_0 + LG\rho_0)`:

    .. math::  \text{printed:}\quad
               \frac{2}{\eta_0\sqrt T}(\Delta_T + M) + C_2 \frac{\log T}{\sqrt T}, \qquad
               \text{corrected:}\quad
               \frac{2}{\eta_0\sqrt T}(\Delta_T + M') + C_2 \frac{1 + \log T}{\sqrt T}

    M = M' = 0 for SAM; for SSAM :math:`M = \eta_0 L^2\rho_0^2 (1 + \eta_0 L)\,\zeta(2)` and
    :math:`M' = \eta_0 L^2\rho_0^2 (\zeta(3/2) + \eta_0 L\,\zeta(2))`. :meth:`sharper` is a bound of our own, for both.

    Args:
        L: The observed gradients are L-smooth.
        G: Bounds the norm of the gradient.
        sigma: Its square bounds the variance of the observed gradient.
        eta_0: The first learning rate, at most 1/L.
        rho_0: The first radius, at most :math:`G\eta_0` for SAM and half of that for SSAM.
        sparse: Whether these are the bounds for SSAM.
    """

    L: float
    G: float
    sigma: float
    eta_0: float
    rho_0: float
    sparse: bool = False

    def __post_init__(self) -> None:
        for name in ("L", "G", "sigma"):
            check_number(name, getattr(self, name), "a finite number >= 0", lambda value: 0 <= value < math.inf)
        most = math.inf if self.L == 0 else 1 / self.L
        allowed = f"a number in (0, 1/L] = (0, {most:.6g}] for the theorems to hold"
        check_number("eta_0", self.eta_0, allowed, lambda value: 0 < value <= most * (1 + ROUNDING))
        most = largest_rho(self.G, self.eta_0, sparse=self.sparse)
        theorem, formula = ("Theorem 2 (SSAM)", "G eta_0 / 2") if self.sparse else ("Theorem 1 (SAM)", "G eta_0")
        allowed = f"a number in [0, {formula}] = [0, {most:.6g}] for {theorem} to hold"
        check_number("rho_0", self.rho_0, allowed, lambda value: 0 <= value <= most * (1 + ROUNDING))

    def printed(self, T: Numbers, decrease: Numbers) -> Numbers:
        r"""Return the bound as the paper prints it, for each T with its :math:`\Delta_T`."""
        return self._bound(T, decrease, self._mask_term(ZETA_2), np.log(T))

    def corrected(self, T: Numbers, decrease: Numbers) -> Numbers:
        r"""Return the bound with 1 + log T for log T, and with :math:`\zeta(3/2)` where :math:`t^{-3/2}` is summed."""
        return self._bound(T, decrease, self._mask_term(ZETA_3_2), 1 + np.log(T))

    def sharper(self, T: Numbers, decrease: Numbers) -> Numbers:
        r"""Return a bound in which neither G nor the mask appears, and :math:`\rho_0` not beside log T.

        .. math::  \frac{1}{\sqrt T} \Big[\frac{2}{\eta_0} \Delta_T + L\eta_0\sigma^2 (1 + \log T)
                   + \zeta(3/2)\, L^2\rho_0 (2\eta_0\sigma + \rho_0)\Big]
        """
        noise = self.L * self.eta_0 * self.sigma**2 * (1 + np.log(T))
        perturbation = ZETA_3_2 * self.L**2 * self.rho_0 * (2 * self.eta_0 * self.sigma + self.rho_0)
        bound: Numbers = (2 / self.eta_0 * decrease + noise + perturbation) / np.sqrt(T)
        return bound

    def _mask_term(self, zeta: float) -> float:
        if not self.sparse:
            return 0.0
        return self.eta_0 * self.L**2 * self.rho_0**2 * (zeta + self.eta_0 * self.L * ZETA_2)

    def _bound(self, T: Numbers, decrease: Numbers, mask_term: float, log: Numbers) -> Numbers:
        noise = 2 * (self.L * self.sigma**2 * self.eta_0 + self.L * self.G * self.rho_0)
        bound: Numbers = (2 / self.eta_0 * (decrease + mask_term) + noise * log) / np.sqrt(T)
        return bound


def largest_rho(G: float, eta_0: float, *, sparse: bool) -> float:
    r"""Return the largest :math:`\rho_0` that the theorem for SAM, or for SSAM, allows."""
    return G * eta_0 / 2 if sparse else G * eta_0


@dataclass(frozen=True)
class Method:
    """SAM ("dense"), or SSAM with a mask of some sparsity."""

    mask: str = "dense"
    sparsity: float = 0.0

    def __post_init__(self) -> None:
        check_choice("mask", self.mask, MASKS)
        check_share("sparsity", self.sparsity)

    @property
    def sparse(self) -> bool:
        """Whether Theorem 2 applies, and not Theorem 1."""
        return self.mask != "dense"

    def __str__(self) -> str:
        return f"SSAM, {self.mask} mask, s = {self.sparsity:g}" if self.sparse else "SAM"

    def build_mask(self, steps: int, seed: int) -> Mask | None:
        """Return the mask for a run of so many steps."""
        if self.mask == "random":
            return RandomMask(self.sparsity, interval=INTERVAL, seed=seed)
        if self.mask == "dynamic":
            return DynamicMask(self.sparsity, interval=INTERVAL, total_steps=steps, seed=seed)
        return None


def methods(sparsities: Iterable[float]) -> list[Method]:
    """Return SAM, and SSAM with each mask at each sparsity."""
    return [Method(), *(Method(mask, s) for s in sparsities for mask in MASKS[1:])]


def walk(problem: Problem, method: Method, bounds: Bounds, steps: int, seed: int) -> Tensor:
    """Take so many steps. Return the points w_1 to w_(steps + 1) as rows."""
    w = nn.Parameter(problem.start.clone())
    mask = method.build_mask(steps, seed)
    opt = SAM([w], torch.optim.SGD, rho=bounds.rho_0, mask=mask, lr=bounds.eta_0)
    eta = LambdaLR(opt, lambda taken: 1 / math.sqrt(taken + 1))
    rho = InverseSqrtRho(opt)
    points = [problem.start]
    for noise in problem.draw(steps, random_generator(seed)):
        opt.step(partial(_observe, problem, w, noise))
        eta.step()
        rho.step()
        points.append(w.detach().clone())
    return torch.stack(points)


def _observe(problem: Problem, w: nn.Parameter, noise: Tensor) -> None:
    """Compute the observed gradient, as the closure of a step. The noise is the same in both passes."""
    w.grad = problem.observed(w.detach(), noise)


@dataclass(frozen=True)
class Curve:
    """The results of a method on a problem, over several seeds.

    Args:
        method, bounds: The method and its bounds.
        squares: The squared norm of the gradient at w_t, t = 1 to T; a row for each seed.
        decrease: f(w_1) - f(w_(t+1)), likewise.
    """

    method: Method
    bounds: Bounds
    squares: Numbers
    decrease: Numbers

    @property
    def T(self) -> Numbers:
        """1, 2, 3, ..."""
        return np.arange(1, self.squares.shape[1] + 1, dtype=np.float64)

    @property
    def running_means(self) -> Numbers:
        """The mean of the squares up to each T; a row for each seed."""
        means: Numbers = self.squares.cumsum(1) / self.T
        return means

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a figure and a table: the curve at some values of T, other numbers over all T."""
        T, means, decrease = self.T, self.running_means, self.decrease.mean(0)
        mean = means.mean(0)
        corrected = self.bounds.corrected(T, decrease)
        kept = kept_points(len(T))
        return {
            "mask": self.method.mask,
            "sparsity": self.method.sparsity,
            "eta_0": self.bounds.eta_0,
            "rho_0": self.bounds.rho_0,
            "T": [int(t) for t in T[kept]],
            "mean": _rounded(mean[kept]),
            "lowest": _rounded(means.min(0)[kept]),
            "highest": _rounded(means.max(0)[kept]),
            "decrease": _rounded(decrease[kept]),
            "slope": fitted_slope(T, mean),
            "bound_slope": fitted_slope(T, corrected),
            "largest_share": float((mean / corrected).max()),  # of the corrected bound, over all T
            "printed_fails_at": [int(t) for t in T[mean > self.bounds.printed(T, decrease)]],
        }


def measure(
    problem: Problem, method: Method, *, steps: int, seeds: Sequence[int], eta: float = 1.0, rho: float = 1.0
) -> Curve:
    r"""Run a method on a problem with several seeds.

    Args:
        problem, method: What to run.
        steps: T.
        seeds: One run for each.
        eta: :math:`\eta_0` as a share of 1/L, the largest value that the theorems allow.
        rho: :math:`\rho_0` as a share of the largest value that the theorem of the method allows.
    """
    eta_0 = eta / problem.L
    rho_0 = rho * largest_rho(problem.G, eta_0, sparse=method.sparse)
    bounds = Bounds(problem.L, problem.G, problem.sigma, eta_0, rho_0, method.sparse)
    check_whole("steps", steps, least=2)
    points = torch.stack([walk(problem, method, bounds, steps, seed) for seed in seeds])
    squares = problem.gradient(points[:, :-1]).square().sum(-1)
    decrease = problem.loss(problem.start) - problem.loss(points[:, 1:])
    return Curve(method, bounds, squares.numpy(), decrease.numpy())


def measure_all(
    problems: Sequence[str],
    sparsities: Sequence[float],
    *,
    steps: int,
    seeds: int,
    seed: int = 0,
    eta: float = 1.0,
    rho: float = 1.0,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run SAM and SSAM on problems. Return plain values that can be kept in a file.

    Args:
        problems: The names of the problems.
        sparsities: The sparsities of the masks.
        steps, eta, rho: See :func:`measure`.
        seeds: The number of seeds; they are seed, seed + 1, ...
        seed: The first seed.
        progress: Called with the name of each run.
    """
    check_whole("seeds", seeds)
    check_whole("seed", seed, least=0)
    chosen = methods(dict.fromkeys(sparsities))
    built = {name: build_problem(name) for name in problems}
    settings = {"steps": steps, "seeds": seeds, "seed": seed, "eta": eta, "rho": rho}
    versions = {"sparsam": __version__, "torch": torch.__version__}
    result: dict[str, Any] = {**settings, "versions": versions, "problems": {}, "curves": []}
    for name, problem in built.items():
        constants = {"L": problem.L, "G": problem.G, "sigma": problem.sigma, "weights": problem.start.numel()}
        result["problems"][name] = {"about": problem.about, **constants}
        for method in chosen:
            progress(f"{name}: {method}")
            curve = measure(problem, method, steps=steps, seeds=range(seed, seed + seeds), eta=eta, rho=rho)
            result["curves"].append({"problem": name, "method": str(method), **curve.to_dict()})
    return result


def kept_points(steps: int) -> list[int]:
    """Return indices of T = 1 to `steps` that lie evenly on a logarithmic axis, the first and the last among them.

    >>> kept_points(4)
    [0, 1, 2, 3]
    """
    T = np.geomspace(1, steps, POINTS).round().astype(int)
    return [int(t) - 1 for t in np.unique(T)]


def fitted_slope(T: Numbers, values: Numbers) -> float:
    r"""Return the exponent p of :math:`T^p` that fits the last tenth of a logarithmic axis best, by least squares.

    >>> T = np.arange(1.0, 1001)
    >>> round(fitted_slope(T, T**-0.5), 6)
    -0.5
    """
    kept = [i for i in kept_points(len(T)) if T[i] >= T[-1] / 10]
    return float(np.polyfit(np.log(T[kept]), np.log(values[kept]), 1)[0])


def _rounded(values: Numbers) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
