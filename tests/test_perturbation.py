"""The arithmetic, over dtypes, layouts, shapes and gradients that are not numbers."""

from __future__ import annotations

import contextlib
import itertools
import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsam.perturbation
from cases import same
from sparsam.perturbation import blended, perturb, restore, save

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
PATHS = [
    "host",
    "slabs",
    "device",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]
every_path = pytest.mark.parametrize("path", PATHS)
SHAPES = [(), (0,), (1,), (5,), (3, 4), (2, 3, 4, 5), (0, 7)]


def assert_rounded(got, goal, w, norm_precision=0.0):
    """eps and the sum may be rounded once each."""
    got, w = got.cpu(), w.cpu()
    size = w.double().abs() + (goal - w).abs()
    precision = max(torch.finfo(got.dtype).eps, norm_precision)
    assert ((got - goal).abs() <= 2 * precision * size + torch.finfo(got.dtype).smallest_normal).all()


@contextlib.contextmanager
def taking(path):
    """Perturb as on a CPU, as on a CPU in small pieces, as on a GPU but on a CPU, or on a GPU; tells the device."""
    with contextlib.ExitStack() as stack:
        if path == "slabs":
            stack.enter_context(patch.object(sparsam.perturbation, "SLAB", 1))
        elif path == "device":
            stack.enter_context(patch.object(sparsam.perturbation, "_is_on_host", lambda t: False))
            stack.enter_context(patch.object(sparsam.perturbation, "FUSED", {"cpu": (torch.float32,)}))
        yield "cuda" if path == "cuda" else "cpu"


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
@every_path
def test_formula_for_any_mixture(path, shapes, dtypes, kinds, rhos, adaptive, seed):
    with taking(path) as device:
        check_formula(device, shapes, dtypes, kinds, rhos, adaptive, seed)


def check_formula(device, shapes, dtypes, kinds, rhos, adaptive, seed):
    torch.manual_seed(seed)
    n = len(shapes)
    params = [torch.randn(s).to(d) for s, d in zip(shapes, dtypes, strict=False)]
    grads = [torch.randn(s).to(d) for s, d in zip(shapes, dtypes, strict=False)]
    masks = [{"all": True, "none": False, "some": torch.rand(s) < 0.5}[k] for s, k in zip(shapes, kinds, strict=False)]
    want = expected(params, grads, masks, rhos[:n], adaptive)
    params, grads, masks = (
        [t.to(device) if isinstance(t, torch.Tensor) else t for t in ts] for ts in (params, grads, masks)
    )
    before = [p.clone() for p in params]

    saved = perturb(params, grads, masks, rhos[:n], adaptive=adaptive)
    norm_precision = 1e-15 if all(g.dtype == torch.float64 for g in grads) else 4e-7
    for got, goal, w in zip(params, want, before, strict=True):
        assert_rounded(got, goal, w, norm_precision)
    assert not any(
        t is p for group in saved for t in group.tensors for p, m in zip(params, masks, strict=True) if m is False
    )
    restore(saved)
    assert same(params, before)


LAYOUTS = {
    "channels last": lambda: torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "channels last, one pixel": lambda: torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last),
    "one channel": lambda: torch.randn(4, 1, 5, 5).to(memory_format=torch.channels_last),
    "three dimensions": lambda: torch.randn(2, 3, 2, 3, 2).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.randn(6, 4).t(),
    "with gaps": lambda: torch.randn(6, 8)[::2, 1::3],
    "permuted": lambda: torch.randn(3, 2, 4).permute(2, 0, 1),
    "from the middle": lambda: torch.randn(50)[7:34],
    "one number": lambda: torch.randn(()),
}


@every_path
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layouts", [*([name] for name in LAYOUTS), [*LAYOUTS]], ids=",".join)
def test_layouts(path, dtype, layouts):
    """Gradients lie as the weights do (alike), or contiguously."""
    torch.manual_seed(0)
    for alike, masked, adaptive in itertools.product([False, True], repeat=3):
        with taking(path) as device:
            check_layouts(device, dtype, layouts, alike, masked, adaptive)


def check_layouts(device, dtype, layouts, alike, masked, adaptive):
    rhos, form = [0.5] * len(layouts), torch.preserve_format if alike else torch.contiguous_format
    params = [LAYOUTS[name]().to(device, dtype) for name in layouts]
    grads = [torch.randn_like(p, memory_format=form) for p in params]
    masks = [torch.rand(p.shape, device=device) < 0.5 if masked else True for p in params]
    want = expected(params, grads, masks, rhos, adaptive)
    before, strides = [p.clone() for p in params], [p.stride() for p in params]
    saved = perturb(params, grads, masks, rhos, adaptive=adaptive)
    for got, goal, mask, w in zip(params, want, masks, before, strict=True):
        assert_rounded(got, goal, w, 1e-15 if dtype == torch.float64 else 4e-7)
        if masked:
            assert same([got[~mask]], [w[~mask]])
    assert masked or not same(params, before)
    restore(saved)
    assert same(params, before)
    assert [p.stride() for p in params] == strides


@every_path
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("mask", [True, [True, False, True], [True, True, False]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_is_not_finite_perturbs_nothing(path, bad, adaptive, mask, dtype):
    with taking(path) as device:
        params = [torch.tensor(values, dtype=dtype, device=device) for values in ([1.0, -0.0, 2.0], [3.0, 4.0])]
        before = [p.clone() for p in params]
        grads = [torch.tensor(values, dtype=dtype, device=device) for values in ([1.0, 2.0, bad], [1.0, 1.0])]
        first = mask if mask is True else torch.tensor(mask, device=device)
        perturb(params, grads, [first, True], [0.1, 0.1], adaptive=adaptive)
        assert same(params, before)


@every_path
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_direction_that_is_not_finite_does_no_harm_outside_the_mask(path, bad):
    """The caller may have a norm of his own, which is finite."""
    with taking(path) as device:
        w, mask = torch.tensor([1.0, -0.0, 3.0], device=device), torch.tensor([True, False, False], device=device)
        perturb(
            [w], [torch.tensor([2.0, bad, -bad], device=device)], [mask], [0.5], norm=torch.tensor(1.0, device=device)
        )
        assert same([w.cpu()], [torch.tensor([2.0, -0.0, 3.0])])


@every_path
@pytest.mark.parametrize("scale", [0.0, 1e-42])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_zero_gradient_perturbs_nothing(path, scale, adaptive, masked):
    """1e-42 squared is 0 in float32."""
    with taking(path) as device:
        params = [torch.tensor([1.0, -0.0, 2.0], device=device)]
        before = [p.clone() for p in params]
        mask = torch.tensor([True, True, False], device=device) if masked else True
        perturb(params, [torch.full((3,), scale, device=device)], [mask], [0.1], adaptive=adaptive)
        assert same(params, before)


@every_path
@pytest.mark.parametrize("norm", [0.0, math.inf, math.nan])
def test_a_norm_that_divides_by_nothing_perturbs_nothing(path, norm):
    with taking(path) as device:
        w = torch.tensor([1.0, -0.0], device=device)
        perturb([w], [torch.ones(2, device=device)], [True], [0.1], norm=torch.tensor(norm, device=device))
        assert same([w.cpu()], [torch.tensor([1.0, -0.0])])


@every_path
def test_a_scale_beyond_float32_perturbs_nothing(path):
    """The norm is in float64 if any weight is, and may be smaller than float32 can divide by."""
    with taking(path) as device:
        w = torch.tensor([1.0, -0.0], device=device)
        norm = torch.tensor(1e-42, dtype=torch.float64, device=device)
        perturb([w], [torch.ones(2, device=device)], [True], [0.1], norm=norm)
        assert same([w.cpu()], [torch.tensor([1.0, -0.0])])


@every_path
def test_half_precision_gradients_do_not_overflow_the_norm(path):
    with taking(path) as device:
        w = torch.ones(1000, dtype=torch.float16, device=device)
        g = torch.full((1000,), 60000.0, dtype=torch.float16, device=device)
        perturb([w], [g], [True], [31.6227766])  # the gradient's norm, 1.9e6, is far beyond float16
        torch.testing.assert_close(w, torch.full_like(w, 2.0))


@every_path
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rho", [1.0, -1.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_weights_outside_the_mask_keep_their_bits(path, dtype, rho, sign, adaptive):
    """-0.0 among them, to which +0.0 must not be added."""
    with taking(path) as device:
        w = torch.tensor([-0.0, 1.0, -0.0, 0.0] * 9, dtype=dtype, device=device)
        mask = torch.tensor([False, True, False, False] * 9, device=device)
        perturb([w], [torch.full_like(w, sign)], [mask], [rho], adaptive=adaptive)
        assert torch.signbit(w).tolist() == [True, False, True, False] * 9
        assert (w[1::4] != 1).all()


@every_path
@pytest.mark.parametrize("as_tensor", [False, True])
def test_rho_zero_keeps_every_bit(path, as_tensor):
    with taking(path) as device:
        w = torch.tensor([-0.0, 1.0], device=device)
        perturb([w], [torch.ones(2, device=device)], [True], [torch.tensor(0.0, device=device) if as_tensor else 0.0])
        assert torch.signbit(w).tolist() == [True, False]


@every_path
@pytest.mark.parametrize(("rho", "moved"), [(2.0, 1.0), (-2.0, -1.0), (0.0, 0.0), (math.nan, 0.0), (math.inf, 0.0)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
def test_rho_may_be_a_tensor(path, rho, moved, dtype, masked):
    with taking(path) as device:
        w = torch.zeros(40, dtype=dtype, device=device)
        mask = torch.arange(40, device=device) % 2 == 0 if masked else True
        norm = None if not masked else torch.tensor(math.sqrt(40), device=device)
        perturb([w], [torch.ones_like(w)], [mask], [torch.tensor(rho, device=device)], norm=norm)
        goal = torch.full_like(w, moved * 2 / math.sqrt(40))
        torch.testing.assert_close(w, goal * mask if masked else goal)


@every_path
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_weights_that_share_memory_are_perturbed_by_both_and_come_back(path, adaptive, masked):
    if path == "cuda":
        pytest.skip("SAM refuses such weights on a GPU, where kernels would write them side by side")
    with taking(path) as device:
        memory = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)
        params, before = [memory[:3], memory[1:]], memory.clone()
        masks = [torch.tensor([True, False, True], device=device)] * 2 if masked else [True] * 2
        grads = [torch.tensor([1.0, 2.0, 3.0], device=device), torch.tensor([-1.0, 4.0, 1.0], device=device)]
        eps = [
            goal.to(device) - p
            for goal, p in zip(expected(params, grads, masks, [0.5] * 2, adaptive), params, strict=True)
        ]
        goal = before.double()
        goal[:3] += eps[0]
        goal[1:] += eps[1]
        saved = perturb(params, grads, masks, [0.5] * 2, adaptive=adaptive)
        torch.testing.assert_close(memory.double(), goal, rtol=1e-6, atol=0)
        restore(saved)
        assert same([memory], [before])


@every_path
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("share", "finite"), [(0.4, True), (1.0, True), (0.0, True), (0.4, False)])
def test_a_mean_follows_what_is_finite(path, dtype, share, finite):
    with taking(path) as device:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        means = [
            torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=wide, device=device),
            torch.zeros(3, dtype=wide, device=device),
        ]
        new = [means[0].T.contiguous().T * -2 + 1, torch.tensor([0.25, 7.0, -1.0], device=device)]
        new = [t.to(dtype) for t in new]
        if not finite:
            new[1][1] = math.inf
        before = [t.clone() for t in means]
        weight, where = torch.tensor(share, dtype=wide, device=device), torch.tensor(finite, device=device)
        found = blended(means, new, weight, where=where)
        assert same(means, before)  # which a step that is given up needs
        for mean, value, result in zip(before, new, found, strict=True):
            goal = mean.double() + share * (value.double() - mean.double()) if finite else mean.double()
            torch.testing.assert_close(result.double(), goal, rtol=1e-6, atol=1e-7)


@every_path
@pytest.mark.parametrize("dtype", DTYPES)
def test_autograd_sees_that_weights_have_changed(path, dtype):
    """A graph that has kept w must not be run at w + eps."""
    with taking(path) as device:
        w = torch.ones(8, dtype=dtype, device=device, requires_grad=True)
        loss = (w * w).sum()
        with torch.no_grad():
            perturb([w], [torch.ones(8, dtype=dtype, device=device)], [True], [0.1])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize(
    ("shape", "own", "other", "copies"), [((4, 2, 1, 1), (2, 1, 2, 2), (2, 1, 1, 1), 1), ((4, 2), (2, 1), (1, 4), 2)]
)
def test_a_gpu_copies_a_direction_only_if_it_lies_otherwise_in_memory(shape, own, other, copies):
    """Sums leave other strides where a dimension has one entry, as that of a 1×1 convolution in channels_last."""
    w, d = torch.arange(8.0).as_strided(shape, own), torch.ones(8).as_strided(shape, other)
    counted = patch.object(sparsam.perturbation, "_flat_copies", wraps=sparsam.perturbation._flat_copies)
    with taking("device"), counted as flat_copies:
        goal = w + 1
        perturb([w], [d], [True], [math.sqrt(8)])
        torch.testing.assert_close(w, goal)
        assert flat_copies.call_count == copies  # of the weights; and of the direction


@every_path
def test_a_direction_may_have_another_dtype(path):
    with taking(path) as device:
        w = torch.ones(40, dtype=torch.bfloat16, device=device)
        perturb([w], [torch.full((40,), 3.0, device=device)], [True], [math.sqrt(40)])
        torch.testing.assert_close(w, torch.full_like(w, 2.0))


@every_path
def test_all_or_nothing(path):
    """If the second bucket cannot be perturbed, the first is put back."""
    with taking(path) as device:
        params = [torch.ones(3, device=device), torch.ones(3, dtype=torch.float64, device=device)]
        grads = [torch.ones(3, device=device), torch.ones(4, dtype=torch.float64, device=device)]
        with pytest.raises(RuntimeError, match="size"):
            perturb(params, grads, [True, True], [0.1, 0.1])
        assert same(params, [torch.ones(3, device=device), torch.ones(3, dtype=torch.float64, device=device)])


def test_save_and_restore_keep_every_bit():
    tensors = [torch.tensor([math.nan, -0.0, math.inf]), torch.tensor(3), torch.empty(0), torch.tensor([True])]
    copies = [t.clone() for t in tensors]
    saved = save(tensors)
    for t in tensors:
        t.fill_(1)
    restore(saved)
    assert same(tensors, copies)
