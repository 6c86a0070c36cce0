"""The Hessian's largest eigenvalues: against the exact matrix and scipy's eigsh, and nothing disturbed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from exact_hessian import descending, eigsh_of, exact_hessian, objective_of
from small_models import CASES, conv, mlp, tied, trained_task
from torch import nn
from torch.nn import functional as F

from cases import same, task
from sparsam.analysis.hessian import (
    GIB,
    _Timer,
    density_steps,
    memory_needed,
    search_vectors,
    spectral_density,
    top_eigenvalues,
    weights_of,
)
from sparsam.analysis.objective import Objective
from sparsam.analysis.sharpness import average_case, worst_case

# torch.func's forward mode compiles its formulas with torch's own, old compiler.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


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
    seen = []
    found = top_eigenvalues(objective_of(mlp), 2, products=30, progress=lambda *numbers: seen.append(numbers))
    assert [done for done, _, _ in seen] == list(range(1, found.products + 1))
    assert {total for _, total, _ in seen} == {30}
    assert all(left >= 0 for _, _, left in seen)
    seen.clear()
    spectral_density(objective_of(mlp), probes=2, steps=4, progress=lambda *numbers: seen.append(numbers))
    assert [(done, total) for done, total, _ in seen] == [(i, 8) for i in range(1, 9)]
    assert seen[-1][2] == 0
    seen.clear()
    clock = iter([10.0, 12.0, 13.0, 16.0])
    timer = _Timer(5, lambda *numbers: seen.append(numbers), lambda: next(clock))
    for _ in range(3):
        timer.tick()
    assert seen == [(1, 5, 8.0), (2, 5, 4.5), (3, 5, 4.0)]


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
        with pytest.raises(ValueError, match=r"^the loss over the data must be finite, but is nan$"):
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
    with pytest.raises(ValueError, match=r"must be float32 or float64 .* some are torch.bfloat16: use model.float"):
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
