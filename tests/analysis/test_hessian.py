"""The Hessian's eigenvalues, density and trace: against the exact matrix, scipy's eigsh, and nothing disturbed."""

from __future__ import annotations

import copy
import json
import re
import shutil
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from commands import ROOT, invoke
from scipy.sparse.linalg import LinearOperator, eigsh
from small_models import CASES, conv, frozen, mlp, tied, trained_task
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cases import same, task
from sparsam.analysis.hessian import (
    GIB,
    Density,
    density_steps,
    memory_needed,
    search_vectors,
    spectral_density,
    top_eigenvalues,
    weights_of,
)
from sparsam.analysis.lanczos import lanczos, largest, quadrature
from sparsam.analysis.objective import Objective
from sparsam.analysis.run_objective import load_objective
from sparsam.analysis.sharpness import average_case, worst_case

# torch.func's forward mode compiles its formulas with torch's own, old compiler.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


def objective_of(case, **options):
    model, loss_fn, x, y = case()
    return Objective(model, loss_fn, (x, y), **options)


def exact_hessian(model, loss_fn, x, y):
    """The whole matrix, from torch.func on one flat vector of the trainable weights."""
    model = copy.deepcopy(model).eval()
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(flat):
        pieces = torch.split(flat, [p.numel() for p in params.values()])
        weights = {name: piece.view_as(p) for (name, p), piece in zip(params.items(), pieces, strict=True)}
        return loss_fn(functional_call(model, weights, (x,)), y)

    with sdpa_kernel(SDPBackend.MATH):
        flat = torch.cat([p.flatten() for p in params.values()])
        return torch.func.hessian(loss)(flat).detach()


def descending(matrix):
    return torch.linalg.eigvalsh(matrix).flip(0).numpy()


@pytest.mark.parametrize("case", CASES)
def test_eigenvalues_are_those_of_the_exact_hessian(case):
    model, loss_fn, x, y = case()
    exact = exact_hessian(model, loss_fn, x, y)
    found = top_eigenvalues(Objective(model, loss_fn, (x, y)), 5, products=1000, tolerance=1e-9)
    scale = np.abs(descending(exact)).max()
    assert found.converged
    np.testing.assert_allclose(found.values, descending(exact)[:5], rtol=1e-6, atol=1e-9 * scale)
    assert found.ratio == pytest.approx(found.values[0] / found.values[4])


@pytest.mark.parametrize("options", [{"products": 12}, {"tolerance": 1e-2}, {"tolerance": 1e-9}], ids=str)
def test_residuals_are_what_they_claim(options):
    model, loss_fn, x, y = conv()
    exact = exact_hessian(model, loss_fn, x, y)
    found = top_eigenvalues(Objective(model, loss_fn, (x, y)), 4, **options)
    for value, residual, v in zip(found.values, found.residuals, found.vectors, strict=True):
        assert v.norm().item() == pytest.approx(1, abs=1e-12)
        assert (v @ exact @ v).item() == pytest.approx(value, rel=1e-10)
        assert (exact @ v - value * v).norm().item() == pytest.approx(residual, rel=1e-4, abs=1e-12)
        assert np.abs(descending(exact) - value).min() <= residual + 1e-12
    assert found.converged == (max(found.residuals) <= options.get("tolerance", 1e-4) * descending(exact)[0])
    assert found.converged == ("tolerance" in options)
    assert found.products <= options.get("products", 100)


def eigsh_of(objective, k):
    """scipy's answer, from the products alone."""
    n, like = weights_of(objective), objective.params

    def product(v):
        pieces = torch.split(torch.from_numpy(v).to(like[0].dtype).flatten(), [p.numel() for p in like])
        products = objective.hessian_product([piece.view_as(p) for piece, p in zip(pieces, like, strict=True)])
        return torch.cat([p.flatten() for p in products]).double().numpy()

    operator = LinearOperator((n, n), matvec=product, dtype=np.float64)
    start = torch.randn(n, generator=torch.Generator().manual_seed(9)).double().numpy()
    return np.sort(eigsh(operator, k=k, which="LA", v0=start, return_eigenvectors=False))[::-1]


def test_a_bare_model_is_refused():
    model = nn.Linear(2, 2)
    for call in (top_eigenvalues, spectral_density, lambda m: worst_case(m, 0.1), lambda m: average_case(m, 0.1)):
        with pytest.raises(TypeError, match=r"objective must be an Objective\(model, loss_fn, data\), but is a Linear"):
            call(model)


def test_tf32_is_a_search_with_the_same_result():
    """A CPU has no TF32, so only the tolerance differs; on a GPU, test_cuda.py."""
    model, loss_fn, x, y = conv()
    objective = Objective(model, loss_fn, (x, y))
    fast, same_as = (top_eigenvalues(objective, 3, precision="tf32"), top_eigenvalues(objective, 3, tolerance=3e-3))
    assert (fast.values, fast.residuals, fast.products) == (same_as.values, same_as.residuals, same_as.products)
    assert fast.products < top_eigenvalues(objective, 3).products
    for tolerance in (0.3, 0.1, 0.03, 0.01, 1e-3):  # the search goes further than the tolerance
        one, other = (
            top_eigenvalues(objective, 3, tolerance=t, precision=precision).products
            for t, precision in ((tolerance, "tf32"), (0.7 * tolerance, "fp32"))
        )
        assert one == other
    seen = []

    def loss(outputs, targets):
        seen.append(torch.backends.cudnn.conv.fp32_precision)
        return loss_fn(outputs, targets)

    found = top_eigenvalues(Objective(model, loss, (x, y)), 3, precision="tf32")
    # The loss itself; reverse mode, and forward mode of the trace and folded; the search; values and residuals.
    assert seen[1:] == ["ieee"] * 3 + ["tf32"] * (found.products - 3) + ["ieee"] * 3
    seen.clear()
    spectral_density(Objective(model, loss, (x, y)), probes=1, steps=5, precision="tf32")
    assert seen[1:] == ["ieee"] * 3 + ["tf32"] * 5
    for function in (top_eigenvalues, spectral_density):
        with pytest.raises(ValueError, match=r"precision must be one of 'fp32', 'tf32', but is 'bf16'"):
            function(objective, precision="bf16")


def test_scipy_finds_the_same():
    objective = objective_of(conv)
    np.testing.assert_allclose(top_eigenvalues(objective, 5, tolerance=1e-9).values, eigsh_of(objective, 5), rtol=1e-8)


def test_batches_of_unequal_size_are_one_batch():
    one, many = objective_of(conv), objective_of(conv, batch_size=7)
    assert many.sizes == [7, 7, 7, 3]
    a, b = (top_eigenvalues(o, 3, tolerance=1e-9).values for o in (one, many))
    np.testing.assert_allclose(a, b, rtol=1e-9)
    a, b = (spectral_density(o, probes=2, steps=8) for o in (one, many))
    np.testing.assert_allclose(a.nodes, b.nodes, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", [mlp, conv])
def test_few_vectors_at_once_find_the_same(case):
    """Room for 2 k + 2 vectors: restarts, more products, the same eigenvalues."""
    objective = objective_of(case)
    limit = (12 + 5 + 4) * weights_of(objective) * 8 / GIB
    assert search_vectors(objective, 5, products=1000, memory_limit=limit * 1.01) == 12
    tight = top_eigenvalues(objective, 5, products=1000, tolerance=1e-9, memory_limit=limit * 1.01)
    roomy = top_eigenvalues(objective, 5, products=1000, tolerance=1e-9)
    assert tight.converged
    assert tight.products >= roomy.products
    np.testing.assert_allclose(tight.values, roomy.values, rtol=1e-9)


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


def test_every_eigenvalue_in_as_many_steps_as_weights():
    model, loss_fn, x, y = tied()
    objective, exact = Objective(model, loss_fn, (x, y)), descending(exact_hessian(model, loss_fn, x, y))
    n = weights_of(objective)
    found = top_eigenvalues(objective, n, products=3 * n, tolerance=1e-12)
    np.testing.assert_allclose(found.values, exact, atol=1e-9 * exact[0])
    assert found.products == 2 * n
    whole = spectral_density(objective, probes=2, steps=1000, known=found)  # nothing is left to be estimated
    assert whole.trace == pytest.approx(exact.sum(), rel=1e-9)
    assert whole.trace_error == 0


def test_a_loss_without_curvature():
    objective = Objective(nn.Linear(3, 2), lambda out, y: out.mean(), (torch.randn(4, 3), torch.zeros(4)))
    found = top_eigenvalues(objective, 5)
    assert found.values == found.residuals == (0.0,) * 5
    assert found.ratio is None
    assert found.converged
    density = spectral_density(objective, probes=2, steps=4)
    assert density.trace == 0
    assert density.range == (0, 0)
    assert np.trapezoid(*density.curve()[::-1]) == pytest.approx(1)


def moments(matrix, powers=(1, 2, 3)):
    return [torch.trace(torch.linalg.matrix_power(matrix, p)).item() / len(matrix) for p in powers]


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


@pytest.mark.parametrize("deflated", [False, True])
def test_density_within_its_noise(deflated):
    model, loss_fn, x, y = conv()
    exact, objective = exact_hessian(model, loss_fn, x, y), Objective(model, loss_fn, (x, y))
    known = top_eigenvalues(objective, 5, tolerance=1e-8) if deflated else None
    density = spectral_density(objective, probes=40, steps=12, known=known)
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


def test_same_seed_same_numbers():
    def numbers(seed):
        t = task(torch.float32)
        objective = Objective(t.model, F.cross_entropy, (t.x, t.y))
        found = top_eigenvalues(objective, 3, seed=seed)
        return found.values, found.residuals, spectral_density(objective, steps=5, seed=seed).to_dict()

    assert numbers(0) == numbers(0)
    assert numbers(0) != numbers(1)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_disturbed(fails):
    t = trained_task(dropout=0.5)
    t.model[4].eval()  # a layer whose mode the user has set
    for p in t.model.parameters():
        p.grad = torch.full_like(p, 3.0)
    modes, buffers = [m.training for m in t.model.modules()], [b.clone() for b in t.model.buffers()]
    weights, state = [p.detach().clone() for p in t.model.parameters()], torch.get_rng_state()
    calls = []

    def loss_fn(outputs, targets):
        calls.append(torch.backends.cudnn.conv.fp32_precision)
        if fails and len(calls) == 5:
            raise ZeroDivisionError
        return F.cross_entropy(outputs, targets)

    precision = torch.backends.cudnn.conv.fp32_precision
    try:
        objective = Objective(t.model, loss_fn, (t.x, t.y))
        spectral_density(objective, probes=1, steps=3, known=top_eigenvalues(objective, 2))
    except ZeroDivisionError:
        assert fails
    else:
        assert not fails
    assert "ieee" in calls
    assert torch.backends.cudnn.conv.fp32_precision == precision
    assert [m.training for m in t.model.modules()] == modes
    assert same(list(t.model.buffers()), buffers)
    assert same([p.detach() for p in t.model.parameters()], weights)
    assert all((p.grad == 3).all() for p in t.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_progress_and_time_left():
    told = []
    found = top_eigenvalues(objective_of(mlp), 2, products=30, progress=lambda *numbers: told.append(numbers))
    assert [done for done, _, _ in told] == list(range(1, found.products + 1))
    assert {total for _, total, _ in told} == {30}
    assert all(left >= 0 for _, _, left in told)
    told.clear()
    spectral_density(objective_of(mlp), probes=2, steps=4, progress=lambda *numbers: told.append(numbers))
    assert [(done, total) for done, total, _ in told] == [(i, 8) for i in range(1, 9)]
    assert told[-1][2] == 0


def test_refuses():
    objective = objective_of(mlp)  # 73 weights of 8 bytes: 584 bytes a vector
    vector = 584 / GIB

    def refused(message, call, **options):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            call(objective, **options)

    refused("k must be a whole number >= 1, but is 0", top_eigenvalues, k=0)
    refused("k must be at most the number of trainable weights, 73, but is 74", top_eigenvalues, k=74)
    refused("products must be a whole number >= 2 k = 10, but is 9", top_eigenvalues, products=9)
    refused("tolerance must be a number >= 0, but is -1", top_eigenvalues, tolerance=-1)
    refused("memory_limit must be a number of GiB > 0, but is 0", top_eigenvalues, memory_limit=0)
    refused("probes must be a whole number >= 1, but is 0", spectral_density, probes=0)
    refused("steps must be a whole number >= 1, but is 2.5", spectral_density, steps=2.5)
    other = top_eigenvalues(objective_of(tied), 2)
    refused("known must be of the same objective, of 73 weights, but is of 15", spectral_density, known=other)
    refused(
        "memory_limit must hold 12 vectors for k=5 eigenvalues of 73 weights and 9 to work with, 1.14e-05 GiB, but is "
        "1.08778e-05 GiB: raise it, or lower k",
        top_eigenvalues,
        memory_limit=20 * vector,
    )
    refused(
        "memory_limit must hold 60 vectors of 73 weights for as many steps and 4 to work with, 3.48e-05 GiB, but is "
        "3.42652e-05 GiB: raise it, or take at most 59 steps",
        spectral_density,
        memory_limit=63 * vector,
    )
    refused(
        "memory_limit must hold 60 vectors of 73 weights for as many steps and 4 to work with, 3.48e-05 GiB, but is "
        "5.43892e-07 GiB: raise it",
        spectral_density,
        memory_limit=vector,
    )


def test_memory_is_known_before():
    objective = objective_of(mlp)
    assert memory_needed(objective, k=5, products=30, steps=8) == (25 + 5 + 4) * 73 * 8
    assert memory_needed(objective, k=2, products=10, steps=20) == (20 + 2 * 2 + 4) * 73 * 8
    limit = memory_needed(objective, k=5, products=30, steps=8) / GIB
    assert search_vectors(objective, 5, products=1000, memory_limit=limit) == 25
    assert density_steps(objective, 20, k=5, memory_limit=limit) == 20
    with pytest.raises(ValueError, match="take at most 20 steps"):
        density_steps(objective, 21, k=5, memory_limit=limit)


def test_losses_and_products_that_are_not_finite():
    model, loss_fn, x, y = mlp()
    x[3, 2] = torch.nan
    for call in (top_eigenvalues, spectral_density):
        with pytest.raises(
            ValueError, match=r"^the loss over the data must be finite to have a curvature, but is nan$"
        ):
            call(Objective(model, loss_fn, (x, y)))
    root = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(root.weight)  # a finite loss whose second derivative is not
    objective = Objective(root, lambda out, y: out.abs().pow(1.5).mean(), (torch.ones(3, 2).double(), torch.zeros(3)))
    with pytest.raises(ValueError, match=r"^the product must be finite, but holds NaN or infinity in step 1$"):
        top_eigenvalues(objective, 1)


def test_half_precision_is_refused_and_mixed_is_float64():
    t = task(torch.float32)
    t.model[8].double()
    model = nn.Sequential(t.model[:8], nn.Identity(), t.model[8])
    model[1].forward = lambda x: x.double()
    objective = Objective(model, F.cross_entropy, (t.x, t.y))
    assert top_eigenvalues(objective, 2).vectors.dtype == torch.float64
    t = task(torch.bfloat16)
    with pytest.raises(ValueError, match=r"must be float32 or float64 .* some are torch.bfloat16: look at model.float"):
        top_eigenvalues(Objective(t.model, F.cross_entropy, (t.x, t.y)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    """Data are moved there, no product waits for it, and float32 is float32."""
    from sparsam.analysis.hessian import _product

    model, loss_fn, x, y = conv()
    exact = descending(exact_hessian(model, loss_fn, x, y))
    objective = Objective(model.float().cuda(), loss_fn, (x.float(), y))
    np.testing.assert_allclose(top_eigenvalues(objective, 5).values, exact[:5], rtol=1e-3)
    product, v = _product(objective, "fp32"), torch.ones(weights_of(objective), device="cuda")
    product(v)  # whatever is made once
    torch.cuda.set_sync_debug_mode("error")
    try:
        product(v)
    finally:
        torch.cuda.set_sync_debug_mode("default")


QUICK = ["--samples", 200, "--probes", 2, "--steps", 10, "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "digits"
    invoke("train", "recipes/digits-sgd.toml", "--set", "train.epochs=1", "-o", path, "--device", "cpu")
    return path


@pytest.fixture(scope="module")
def measured(run, tmp_path_factory):
    output = tmp_path_factory.mktemp("figures")
    return (
        invoke("hessian", run, *QUICK, "-o", output),
        output,
        json.loads((run / "analysis/hessian.json").read_text()),
    )


def test_command_measures_a_run(run, measured):
    done, output, result = measured
    objective = load_objective(run, samples=200)
    assert result["eigenvalues"][0] == pytest.approx(eigsh_of(objective, 1)[0], rel=1e-3)
    assert len(result["eigenvalues"]) == len(result["residuals"]) == 5
    assert result["ratio"] == pytest.approx(result["eigenvalues"][0] / result["eigenvalues"][4])
    assert result["loss"] == pytest.approx(objective.loss().item(), rel=1e-5)
    density = Density.from_dict(result["density"])
    assert density.size == weights_of(objective)
    assert (result["trace"], result["trace_error"]) == (density.trace, density.trace_error)
    assert {result[key] for key in ("samples", "probes", "steps", "seed", "weights", "method")} == {
        200,
        2,
        10,
        0,
        "last",
        "SGD",
    }
    assert result["versions"]["torch"] == torch.__version__
    values = result["eigenvalues"]
    row = next(line for line in done.stdout.splitlines() if line.split()[:1] == ["digits"])
    assert row.split()[1:4] == [f"{values[0]:.4g}", f"{values[4]:.4g}", f"{result['ratio']:.2f}"]
    assert f"{result['trace']:.4g} ± {result['trace_error']:.2g}" in row
    assert f"{result['residuals'][0]:.1e}, {result['residuals'][4]:.1e}" in row
    assert (output / "hessian.png").read_bytes()[:4] == b"\x89PNG"
    drawn = (output / "hessian.svg").read_text()
    assert "<svg" in drawn
    assert "GiB for vectors" in " ".join(done.stderr.split())


def test_command_draws_again_without_measuring(run, measured, tmp_path):
    done, _, result = measured
    copied = tmp_path / "digits"
    shutil.copytree(run, copied, ignore=shutil.ignore_patterns("checkpoints"))
    again = invoke("hessian", copied, copied, "--redraw", "-o", tmp_path / "figures")
    rows = [
        [line for line in text.splitlines() if line.split()[:1] == ["digits"]] for text in (done.stdout, again.stdout)
    ]
    assert rows[1] == 2 * rows[0]
    assert json.loads((copied / "analysis/hessian.json").read_text()) == result
    assert (tmp_path / "figures/hessian.png").is_file()


def test_command_refuses(run, tmp_path):
    done = invoke("hessian", run, *QUICK, "--memory", 0.001, "-o", tmp_path, code=1)
    assert "error: memory_limit must hold 12 vectors for k=5 eigenvalues" in done.stderr
    assert "or lower k (k is --top, memory_limit is --memory)" in done.stderr
    done = invoke("hessian", run, *QUICK, "--top", 60, "-o", tmp_path, code=1)
    assert "error: products must be a whole number >= 2 k = 120, but is 100 (k is --top" in done.stderr
    bare = tmp_path / "bare"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("analysis"))
    done = invoke("hessian", bare, "--redraw", "-o", tmp_path, code=1)
    assert f"there is no {bare}/analysis/hessian.json; compute it with: sparsam hessian" in done.stderr
    assert not list(tmp_path.glob("*.png"))


def test_command_says_that_it_was_stopped(run, tmp_path):
    command = [sys.executable, "-m", "sparsam", "hessian", run, "--device", "cpu", "-o", tmp_path]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a shell's background jobs do not
    options = {"stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "preexec_fn": heard}
    with subprocess.Popen(list(map(str, command)), **options) as process:
        assert "weights" in process.stderr.readline()  # it has begun
        process.send_signal(signal.SIGINT)
        last = process.stderr.read().splitlines()[-1]
    assert process.returncode == 1
    assert last == "digits: stopped; nothing new of it was saved, results of earlier runs were"
