"""The density of the eigenvalues and the trace, against the exact matrix."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from exact_hessian import descending, exact_hessian, moments, objective_of
from small_models import conv, mlp
from torch import nn
from torch.nn import functional as F

from cases import same
from sparsam.analysis.hessian import (
    Density,
    spectral_density,
    top_eigenvalues,
)
from sparsam.analysis.objective import Objective

# torch.func's forward mode compiles its formulas with torch's own, old compiler.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


@pytest.mark.parametrize("deflated", [False, True])
def test_density_within_its_noise(deflated):
    model, loss_fn, x, y = conv()
    exact, objective = exact_hessian(model, loss_fn, x, y), Objective(model, loss_fn, (x, y))
    known = top_eigenvalues(objective, 5, tolerance=1e-8) if deflated else None
    density = spectral_density(objective, probes=40, steps=6, known=known)
    np.testing.assert_allclose(density.weights.sum(1), 1, atol=1e-12)
    assert np.trapezoid(*density.curve()[::-1]) == pytest.approx(1, abs=1e-6)
    assert abs(density.trace - torch.trace(exact).item()) < 4 * density.trace_error
    second = (density.weights * density.nodes**2).sum(1)
    error = second.std(ddof=1) / len(second) ** 0.5
    assert abs(density.moment(2) - moments(exact)[1]) < 4 * error
    # Hutchinson's variance for signs is twice the sum of squares beside the diagonal.
    left = exact
    if known:
        away = torch.eye(len(exact)).double() - known.vectors.T @ known.vectors
        left = away @ exact @ away
    variance = 2 * (left.square().sum() - left.diagonal().square().sum()).item()
    assert density.trace_error == pytest.approx((variance / 40) ** 0.5, rel=0.35)
    low, high = density.range
    assert descending(exact)[-1] - 1e-9 <= low
    assert high <= descending(exact)[0] + 1e-9


def test_what_is_known_makes_the_trace_better():
    """Where few eigenvalues are far larger than the rest, most of the noise is theirs."""
    x = torch.randn(50, 30, dtype=torch.float64) * torch.tensor([9.0, 8, 7, 6, 5] + [0.1] * 25)
    x @= torch.linalg.qr(torch.randn(30, 30, dtype=torch.float64)).Q
    objective = Objective(nn.Linear(30, 1, bias=False).double(), F.mse_loss, (x, torch.zeros(50, 1).double()))
    known = top_eigenvalues(objective, 5)
    plain, better = (spectral_density(objective, probes=10, steps=4, known=k) for k in (None, known))
    assert better.trace_error < plain.trace_error / 100
    assert better.trace == pytest.approx(2 * x.square().sum().item() / 50, rel=1e-3)


def test_the_curve_is_the_nodes_widened():
    density = Density(np.array([[1.0, 3.0], [1.0, 0.0]]), np.array([[0.5, 0.5], [1.0, 0.0]]), 10)
    grid, curve = density.curve(np.array([1.0, 3.0]), width=0.1)
    height = 1 / (0.1 * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(curve, [0.75 * height, 0.25 * height])
    assert grid.tolist() == [1, 3]
    assert density.range == (1, 3)
    assert Density(np.array([[1.0]]), np.array([[1.0]]), 3).trace_error is None


def test_density_survives_json():
    density = spectral_density(objective_of(mlp), probes=2, steps=5)
    again = Density.from_dict(json.loads(json.dumps(density.to_dict(), allow_nan=False)))
    assert same(*([torch.from_numpy(d.nodes), torch.from_numpy(d.weights)] for d in (density, again)))
    assert again.trace == density.trace
