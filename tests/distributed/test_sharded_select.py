"""Exactly k of the weights that several processes hold: the same as one process takes with torch.topk's threshold."""

from __future__ import annotations

from threading import Barrier, Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsam.distributed.select import select
from sparsam.selection import largest


def in_threads(scores: list[torch.Tensor], k: int, indices: list[torch.Tensor], counted: list[torch.Tensor]) -> list:
    """Let one thread for each part select; they add up as processes do."""
    results, slots, barrier = [None] * len(scores), [None] * len(scores), Barrier(len(scores))

    def run(rank: int) -> None:
        def total(t: torch.Tensor) -> torch.Tensor:
            slots[rank] = t.clone()
            barrier.wait()
            t.copy_(torch.stack(slots).sum(0))
            barrier.wait()
            return t

        results[rank] = select(scores[rank], k, counted[rank], lambda: indices[rank], total)

    threads = [Thread(target=run, args=(rank,)) for rank in range(len(scores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


VALUES = {
    torch.float64: st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-300, -1e-300, 5e-324, 1e308, float("inf"), -float("inf")])
    | st.floats(-4, 4).map(lambda value: round(value, 1)),
    torch.float32: st.floats(-2, 2, width=16),
    torch.bfloat16: st.integers(-3, 3).map(float),
    torch.int64: st.integers(-(2**62), 2**62) | st.integers(-2, 2),
}


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@settings(max_examples=40)
@given(data=st.data())
def test_parts_together_select_what_one_process_does(dtype, data):
    values = data.draw(st.lists(VALUES[dtype], min_size=2, max_size=40))
    scores = torch.tensor(values, dtype=dtype)
    k = data.draw(st.integers(1, len(values) - 1))
    holder = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(values), max_size=len(values))))
    order = torch.randperm(len(values))  # parts need not be in the order of the flat index
    indices = [order[holder[order] == rank] for rank in range(3)]
    parts = in_threads(
        [scores[i] for i in indices], k, indices, [torch.ones(len(i), dtype=torch.bool) for i in indices]
    )
    together = torch.zeros(len(values), dtype=torch.bool)
    for index, part in zip(indices, parts, strict=True):
        together[index] = part
    assert together.sum() == k
    assert together.tolist() == largest(scores, k).tolist()


@settings(max_examples=40)
@given(values=st.lists(st.integers(0, 3).map(float), min_size=3, max_size=20), data=st.data())
def test_what_several_processes_hold_counts_once(values, data):
    scores, k = torch.tensor(values), data.draw(st.integers(1, len(values) - 1))
    index = torch.arange(len(values))
    owner = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    both = in_threads([scores, scores], k, [index, index], [owner, ~owner])
    assert both[0].tolist() == both[1].tolist() == largest(scores, k).tolist()
