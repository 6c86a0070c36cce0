r"""How much the loss rises near the weights.

Worst case, SAM's own objective, dense or with a mask m, and ASAM's:

.. math::  \max_{\lVert \epsilon \rVert_2 \le \rho} f(w + \epsilon \odot m) - f(w)
           \qquad\text{adaptive:}\quad \lVert \epsilon / |w| \rVert_2 \le \rho

Average case, of the same mean length:

.. math::  E_z\, f(w + \tfrac{\rho}{\sqrt n}\, z) - f(w), \quad z \sim N(0, I)
           \qquad\text{adaptive:}\quad z \sim N(0, \mathrm{diag}(w^2))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sparsam.analysis.objective import Objective, check_objective
from sparsam.checks import check_rho, check_whole
from sparsam.errors import UserValueError
from sparsam.perturbation import Saved, perturb, restore, save
from sparsam.randomness import random_generator
from sparsam.selection import Selection


@torch.no_grad()
def worst_case(
    objective: Objective,
    rho: float,
    *,
    steps: int = 1,
    mask: Selection | None = None,
    adaptive: bool = False,
) -> float:
    r"""Return the largest rise of the loss that gradient ascent finds within rho.

    The first step is SAM's :math:`\epsilon_1 = \rho\, g / \lVert g\rVert \odot m`. Each further step takes the gradient
    at the latest point: :math:`\epsilon_{k+1} = \rho\, g_k / \lVert g_k\rVert \odot m` with
    :math:`g_k = \nabla f(w + \epsilon_k)`. The largest rise counts, so more steps never give less. The norm is that of
    the whole gradient, also with a mask, as in the paper.

    Args:
        objective: The loss as a function of the weights. Afterwards the weights are restored bit for bit.
        rho: The radius.
        steps: The number of ascent steps; 1 is SAM's own perturbation.
        mask: Which weights are perturbed, one entry for each parameter of the objective; None: all.
        adaptive: ASAM's ball.
    """
    check_objective(objective)
    check_rho(rho)
    check_whole("steps", steps)
    params = objective.params
    mask = checked_mask(mask, params)
    start = _finite(objective)
    rises = [torch.zeros_like(start)]
    g = objective.gradient()
    for step in range(steps):
        with _at(perturb(params, g, mask, [float(rho)] * len(params), adaptive=adaptive)):
            rises.append(objective.loss() - start)
            if step + 1 < steps:
                g = objective.gradient()
    return float(torch.stack(rises).nan_to_num(nan=torch.inf, posinf=torch.inf).max())


@torch.no_grad()
def average_case(
    objective: Objective, rho: float, *, samples: int = 10, adaptive: bool = False, seed: int = 0
) -> tuple[float, float]:
    """Return the mean rise of the loss under Gaussian noise of mean length rho, and its standard error.

    Args:
        objective: The loss as a function of the weights. Afterwards the weights are restored bit for bit.
        rho: The root mean square of the length of the noise; if adaptive, of its length relative to the weights.
        samples: The number of random perturbations, at least 2.
        adaptive: Draw noise in proportion to each weight.
        seed: The seed of the noise. Runs that are compared should share it.
    """
    check_objective(objective)
    check_rho(rho)
    check_whole("samples", samples, least=2)
    params: list[Tensor] = list(objective.params)
    sigma = rho / sum(p.numel() for p in params) ** 0.5
    start, rises = _finite(objective), []
    for i in range(samples):
        generator = random_generator(seed, i)
        noise = [sigma * torch.randn(p.shape, generator=generator).to(p) for p in params]
        if adaptive:
            torch._foreach_mul_(noise, params)
        with _at(save(params)):
            torch._foreach_add_(params, noise)
            rises.append(objective.loss() - start)
    found = torch.stack(rises)
    return float(found.mean()), float(found.std() / samples**0.5)


def checked_mask(mask: Selection | None, params: Sequence[Tensor]) -> Selection:
    """Return a mask with an entry for each parameter. Refuse a mask of another length."""
    mask = [True] * len(params) if mask is None else mask
    if len(mask) != len(params):
        raise UserValueError(f"mask must have an entry for each of {len(params)} parameters, but has {len(mask)}")
    return mask


@contextmanager
def _at(saved: list[Saved]) -> Iterator[None]:
    """Put the weights back after the block."""
    try:
        yield
    finally:
        restore(saved)


def _finite(objective: Objective) -> Tensor:
    loss = objective.loss()
    if not torch.isfinite(loss):
        raise UserValueError(f"the loss at the model's own weights must be finite, but is {loss.item()}")
    return loss
