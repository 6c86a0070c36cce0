"""Exactly k, ties to the lower index, for any scores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference import ranked
from sparsam.masks.nm import n_of_m
from sparsam.selection import (
    expand,
    flatten,
    largest,
    overlap,
    perturbed_count,
    random_generator,
    settle,
    unflatten,
)

few_values = st.lists(st.sampled_from([-2.0, -0.0, 0.0, 0.5, 1.0, float("inf")]), min_size=1, max_size=60)
any_values = st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=60)


@given(scores=few_values | any_values, data=st.data())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_largest_is_exact_and_ties_go_to_the_lower_index(dtype, scores, data):
    scores = torch.tensor(scores).to(dtype)
    k = data.draw(st.integers(0, len(scores)))
    assert largest(scores, k).nonzero().flatten().tolist() == sorted(ranked(scores.tolist())[:k])


@given(total=st.integers(0, 10**12), sparsity=st.floats(0, 1))
def test_count(total, sparsity):
    k = perturbed_count(total, sparsity)
    assert 0 <= k <= total
    assert abs(k - (1 - sparsity) * total) <= 0.5 + 1e-4


def test_flat_index_runs_over_tensors_in_row_major_order():
    tensors = [torch.arange(4.0).view(2, 2).t(), torch.tensor(9.0), torch.empty(0, 3), torch.arange(2)]
    flat = flatten(tensors)
    assert flat.tolist() == [0, 2, 1, 3, 9, 0, 1]
    for piece, t in zip(unflatten(flat, tensors), tensors, strict=True):
        assert torch.equal(piece, t.to(piece.dtype))


def test_settle_reduces_full_and_empty_tensors_and_keeps_the_layout():
    p = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    some = torch.rand(p.shape) < 0.5
    settled = settle(
        [True, torch.zeros(3, dtype=torch.bool), torch.ones(3, dtype=torch.bool), some], [p, *[p[0, :, 0, 0]] * 2, p]
    )
    assert settled[:3] == [True, False, True]
    assert torch.equal(settled[3], some)
    assert settled[3].stride() == p.stride()
    assert [m.sum().item() for m in expand(settled[:3], [p, p[0, :, 0, 0], p[0, :, 0, 0]])] == [96, 0, 3]


@given(
    rows=st.integers(1, 4),
    inputs=st.integers(1, 13),
    kernel=st.integers(1, 2),
    m=st.integers(1, 6),
    data=st.data(),
)
def test_n_of_m(rows, inputs, kernel, m, data):
    n = data.draw(st.integers(1, m))
    size = rows * inputs * kernel
    values = data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=size, max_size=size))
    scores = torch.tensor(values).view(rows, inputs, kernel)
    keep = n_of_m(scores, n, m)
    for r in range(rows):
        for c in range(kernel):
            for start in range(0, inputs, m):
                group = scores[r, start : start + m, c].tolist()
                chosen = keep[r, start : start + m, c].nonzero().flatten().tolist()
                assert chosen == (sorted(ranked(group)[:n]) if len(group) == m else list(range(len(group))))


def test_random_numbers_depend_on_each_of_the_given_numbers():
    draws = {
        tuple(torch.rand(3, generator=random_generator(*seed)).tolist()) for seed in [(0, 0), (0, 1), (1, 0), (0, 0, 1)]
    }
    assert len(draws) == 4
    assert torch.rand(1, generator=random_generator(4, 2)).equal(torch.rand(1, generator=random_generator(4, 2)))


def test_overlap_of_masks():
    params = [torch.zeros(2, 2), torch.zeros(3)]
    one = [torch.tensor([[True, False], [True, False]]), True]
    other = [torch.tensor([[True, True], [False, False]]), torch.tensor([True, False, True])]
    assert overlap(one, one, params) == 1.0
    assert overlap(one, other, params) == 3 / 5
    assert overlap([False, False], one, params) == 1.0
