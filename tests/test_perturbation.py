"""The arithmetic, over dtypes, layouts, shapes and gradients that are not numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import same
from sparsam.perturbation import perturb, restore, save

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(), (0,), (1,), (5,), (3, 4), (2, 3, 4, 5), (0, 7)]


def expected(params, grads, masks, rhos, adaptive=False):
    """The formula, weight by weight, in float64."""
    w, g = ([t.double().reshape(-1).tolist() for t in tensors] for tensors in (params, grads))
    norm = math.sqrt(
        sum(
            ((abs(wi) if adaptive else 1.0) * gi) ** 2
            for wt, gt in zip(w, g, strict=True)
            for wi, gi in zip(wt, gt, strict=True)
        )
    )
    result = []
    for p, wt, gt, m, rho in zip(params, w, g, masks, rhos, strict=True):
        chosen = torch.as_tensor(m).expand(p.shape).reshape(-1).tolist()
        values = [
            wi + rho * gi * (wi * wi if adaptive else 1.0) / norm if chosen[i] and norm > 0 else wi
            for i, (wi, gi) in enumerate(zip(wt, gt, strict=True))
        ]
        result.append(torch.tensor(values, dtype=torch.float64).view(p.shape))
    return result


@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=6),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=6, max_size=6),
    kinds=st.lists(st.sampled_from(["all", "none", "some"]), min_size=6, max_size=6),
    rhos=st.lists(st.sampled_from([0.0, 0.05, 2.0]), min_size=6, max_size=6),
    adaptive=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_formula_for_any_mixture(shapes, dtypes, kinds, rhos, adaptive, seed):
    torch.manual_seed(seed)
    n = len(shapes)
    params = [torch.randn(s).to(d) for s, d in zip(shapes, dtypes, strict=False)]
    grads = [torch.randn(s).to(d) for s, d in zip(shapes, dtypes, strict=False)]
    masks = [{"all": True, "none": False, "some": torch.rand(s) < 0.5}[k] for s, k in zip(shapes, kinds, strict=False)]
    want = expected(params, grads, masks, rhos[:n], adaptive)
    before = [p.clone() for p in params]

    saved = perturb(params, grads, masks, rhos[:n], adaptive=adaptive)
    for got, goal, w in zip(params, want, before, strict=True):
        size = w.double().abs() + (goal - w).abs()  # eps and the sum are rounded once each
        norm_precision = 1e-15 if all(g.dtype == torch.float64 for g in grads) else 4e-7
        precision = max(torch.finfo(got.dtype).eps, norm_precision)
        assert ((got - goal).abs() <= 2 * precision * size + torch.finfo(got.dtype).smallest_normal).all()
    assert not any(
        t is p for group in saved for t in group.tensors for p, m in zip(params, masks, strict=True) if m is False
    )
    restore(saved)
    assert same(params, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype):
    torch.manual_seed(0)
    plain = torch.randn(4, 3, 5, 5, dtype=dtype)
    params = [
        plain.clone().to(memory_format=torch.channels_last),
        torch.randn(6, 4, dtype=dtype).t(),
        torch.randn(6, 8, dtype=dtype)[::2, 1::3],
        torch.randn(3, 2, 4, dtype=dtype).permute(2, 0, 1),
    ]
    grads = [torch.randn_like(p, memory_format=torch.contiguous_format) for p in params]
    masks = [torch.rand(p.shape) < 0.5 for p in params]
    want = expected(params, grads, masks, [0.5] * 4)
    before, strides = [p.clone() for p in params], [p.stride() for p in params]
    saved = perturb(params, grads, masks, [0.5] * 4)
    for got, goal in zip(params, want, strict=True):
        torch.testing.assert_close(got, goal.to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
    restore(saved)
    assert same(params, before)
    assert [p.stride() for p in params] == strides


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("mask", [True, torch.tensor([True, False, True])])
def test_a_gradient_that_is_not_finite_perturbs_nothing(bad, adaptive, mask):
    params = [torch.tensor([1.0, -0.0, 2.0]), torch.tensor([3.0, 4.0])]
    before = [p.clone() for p in params]
    perturb(params, [torch.tensor([1.0, 2.0, bad]), torch.ones(2)], [mask, True], [0.1, 0.1], adaptive=adaptive)
    assert same(params, before)


@pytest.mark.parametrize("scale", [0.0, 1e-42])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_zero_gradient_perturbs_nothing(scale, adaptive):
    """1e-42 squared is 0 in float32."""
    params = [torch.tensor([1.0, -0.0, 2.0])]
    before = [p.clone() for p in params]
    perturb(params, [torch.full((3,), scale)], [True], [0.1], adaptive=adaptive)
    assert same(params, before)


def test_half_precision_gradients_do_not_overflow_the_norm():
    w, g = torch.ones(1000, dtype=torch.float16), torch.full((1000,), 60000.0, dtype=torch.float16)
    perturb([w], [g], [True], [31.6227766])  # the gradient's norm, 1.9e6, is far beyond float16
    torch.testing.assert_close(w, torch.full_like(w, 2.0))


def test_weights_outside_the_mask_keep_their_bits():
    w = torch.tensor([-0.0, 1.0, -0.0])
    perturb([w], [torch.ones(3)], [torch.tensor([False, True, False])], [1.0])
    assert torch.signbit(w).tolist() == [True, False, True]


def test_rho_zero_keeps_every_bit():
    w = torch.tensor([-0.0, 1.0])
    perturb([w], [torch.ones(2)], [True], [0.0])
    assert torch.signbit(w).tolist() == [True, False]


def test_rho_may_be_a_tensor():
    w, rho = torch.zeros(4), torch.tensor(2.0)
    perturb([w], [torch.ones(4)], [True], [rho])
    torch.testing.assert_close(w, torch.ones(4))


def test_all_or_nothing(monkeypatch):
    """If memory runs out at the second bucket, the first is put back."""
    params, calls = [torch.ones(3), torch.ones(3, dtype=torch.float64)], []
    add = torch._foreach_add_

    def fails_the_second_time(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return add(*arguments)

    monkeypatch.setattr(torch, "_foreach_add_", fails_the_second_time)
    with pytest.raises(torch.OutOfMemoryError):
        perturb(params, [torch.ones_like(p) for p in params], [True, True], [0.1, 0.1])
    assert len(calls) == 2
    assert same(params, [torch.ones(3), torch.ones(3, dtype=torch.float64)])


def test_save_and_restore_keep_every_bit():
    tensors = [torch.tensor([math.nan, -0.0, math.inf]), torch.tensor(3), torch.empty(0), torch.tensor([True])]
    copies = [t.clone() for t in tensors]
    saved = save(tensors)
    for t in tensors:
        t.fill_(1)
    restore(saved)
    assert same(tensors, copies)
