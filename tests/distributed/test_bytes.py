"""What a step sends beside plain DistributedDataParallel, counted."""

from __future__ import annotations

import pytest
import torch
from ranks import in_ranks
from replicas import CUT, STEPS, build, loss_of, network, share
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed"),
]
CASES = [
    *(("dense", kind) for kind in ("global", "local", "global share", "local share")),
    *(("random-fixed", kind) for kind in ("global", "local")),
    *(("friendly", kind) for kind in ("global", "local")),
    *(("suffix", kind) for kind in ("global", "local")),
    ("momentum", "global"),
    ("top-k", "local"),
    ("fisher", "global"),
]


def count(rank: int, size: int) -> dict:
    """Return the bytes of each step: all that is summed or broadcast, DistributedDataParallel's buckets included."""
    sent: list[int] = []

    def counting(function):
        def counted(tensor: torch.Tensor, *arguments, **options):
            sent[-1] += tensor.nbytes
            return function(tensor, *arguments, **options)

        return counted

    dist.all_reduce, dist.broadcast = counting(dist.all_reduce), counting(dist.broadcast)
    results = {}
    for policy, kind in [("plain", ""), *CASES]:
        model = DistributedDataParallel(network())
        model.register_comm_hook(None, allreduce_hook)  # which calls dist.all_reduce with each bucket
        if policy == "plain":
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            perturbation, *of_batch = kind.split()
            opt = build(policy, model, perturbation=perturbation, share=0.5 if of_batch else 1.0)
        sent.clear()
        for step in range(STEPS):
            sent.append(0)

            def closure(rows=lambda batch: batch, step=step, model=model, opt=opt):
                opt.zero_grad()
                loss = loss_of(model, *rows(share(step, rank, size)))
                loss.backward()
                return loss

            opt.step(closure)
        results[policy, kind] = list(sent)
    return results


@pytest.fixture(scope="module")
def sent():
    return in_ranks(count, 2)


def test_bytes_of_a_step(sent):
    model = network()
    sizes = {name: p.nbytes for name, p in model.named_parameters()}
    whole, weights = sum(sizes.values()), sum(p.numel() for p in model.parameters())
    suffix = sum(size for name, size in sizes.items() if int(name.split(".")[0]) >= int(CUT))
    # A byte for each weight and for each tensor; five numbers that tell whether all hold the same weights.
    mask, check = weights + len(sizes), 5 * 8
    for rank in sent:
        assert rank["plain", ""] == [whole] * STEPS
        extra = {case: [n - whole for n in steps] for case, steps in rank.items()}
        later = [0] * (STEPS - 1)
        assert extra["dense", "local"] == extra["dense", "local share"] == [0] * STEPS
        assert extra["dense", "global share"] == [whole] * STEPS
        assert extra["friendly", "local"] == [0] * STEPS
        assert extra["momentum", "global"] == [0] * STEPS
        assert extra["random-fixed", "local"] == [mask + check, *later]
        assert extra["suffix", "local"] == [len(sizes), *later]  # which parameters follow the cut, once
        assert extra["dense", "global"] == extra["friendly", "global"] == [whole] * STEPS
        assert extra["random-fixed", "global"] == [whole + mask + check] + [whole] * (STEPS - 1)
        assert extra["suffix", "global"] == [suffix + len(sizes)] + [suffix] * (STEPS - 1)
        assert extra["top-k", "local"] == [mask + check, 0] * (STEPS // 2)
        assert extra["fisher", "global"] == [2 * whole + mask + check, whole] * (STEPS // 2)  # the scores too
