"""The Lanczos method: no ghosts, multiple eigenvalues, restarts, exact quadrature."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exact_hessian import exact_hessian, moments
from small_models import conv, frozen, mlp

from sparsam.analysis.hessian import (
    Density,
)
from sparsam.analysis.lanczos import lanczos, largest, quadrature

# torch.func's forward mode compiles its formulas with torch's own, old compiler.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


def plain_lanczos(product, v, steps):
    """The three-term recurrence, without re-orthogonalisation."""
    v, before, beta, diagonal, beside = v / v.norm(), torch.zeros_like(v), 0.0, [], []
    for _ in range(steps):
        w = product(v) - beta * before
        diagonal.append((v @ w).item())
        w -= diagonal[-1] * v
        beta = w.norm().item()
        beside.append(beta)
        before, v = v, w / beta
    return np.linalg.eigvalsh(np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1))[::-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_ghosts(dtype):
    """Like a network's spectrum: few large eigenvalues over many small ones. Each outlier is found once."""
    outliers = torch.tensor([100.0, 50.0, 20.0, 10.0, 5.0])
    spectrum = torch.cat([outliers, torch.linspace(-1, 1, 395)]).to(dtype)
    start = torch.randn(400, dtype=dtype)
    ghosts = plain_lanczos(lambda v: spectrum * v, start, 120)
    assert (np.abs(ghosts - 100) < 1e-3).sum() > 1  # what happens without
    space = lanczos(lambda v: spectrum * v, start, 120)
    found = space.ritz().values
    np.testing.assert_allclose(found[:5], outliers, rtol=1e-5)
    assert found[5] < 1 + 1e-5
    basis = space.basis.double()
    assert (basis @ basis.T - torch.eye(120)).abs().max() < 100 * torch.finfo(dtype).eps


def rotated(spectrum, dtype):
    turn = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), dtype=torch.float64)).Q
    return (turn @ torch.diag(torch.tensor(spectrum, dtype=torch.float64)) @ turn.T).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vectors", [16, 60])
@pytest.mark.parametrize(
    ("spectrum", "k"),
    [
        ([5.0, 5.0, 5.0, 3.0, 3.0, 1.0] + [0.0] * 54, 6),
        ([5.0, 4.0, 4.0, 1.0] + [0.0] * 50 + [-9.0] * 6, 3),
        ([2.0] * 30 + [1.0] * 30, 5),
        ([float(value) for value in range(10, 0, -1) for _ in range(6)], 7),  # with 16 vectors, restarts in between
        ([1.0] * 60, 2),
        ([0.0] * 60, 3),
    ],
)
def test_multiplicities(spectrum, k, vectors, dtype):
    matrix, generator = rotated(spectrum, dtype), torch.Generator().manual_seed(1)

    def start():
        return torch.randn(60, generator=generator, dtype=dtype)

    space = largest(lambda v: matrix @ v, start, k, steps=400, vectors=vectors, tolerance=1e-5)
    np.testing.assert_allclose(space.ritz().values[:k], sorted(spectrum)[::-1][:k], atol=1e-4)


@pytest.mark.parametrize("case", [mlp, conv, frozen])
def test_quadrature_from_a_whole_basis_has_the_exact_moments(case):
    """With m steps, moments up to 2 m - 1 are exact for each vector; over a basis they add up to the trace."""
    exact = exact_hessian(*case())
    n, steps = len(exact), 3
    pairs = [quadrature(lanczos(lambda v: exact @ v, e, steps)) for e in torch.eye(n, dtype=torch.float64)]
    nodes, weights = np.zeros((n, steps)), np.zeros((n, steps))
    for row, (found, shares) in enumerate(pairs):
        nodes[row, : len(found)], weights[row, : len(found)] = found, shares
    density = Density(nodes, weights, n)
    for power, expected in enumerate(moments(exact, range(1, 6)), 1):
        assert density.moment(power) == pytest.approx(expected, rel=1e-9)
    assert density.moment(0) == pytest.approx(1, abs=1e-12)
    assert density.trace == pytest.approx(torch.trace(exact).item(), rel=1e-9)
