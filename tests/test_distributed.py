"""Two processes with DistributedDataParallel: the same masks and the same weights on both ranks."""

from __future__ import annotations

import os

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import BASES, MASKS, NEED_CLOSURES, same, task
from sparsam import SAM

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
STEPS = 5


def run(rank: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results = {}
    for name in names:
        for synced in (True, False):
            t = task()
            model = DistributedDataParallel(t.model)
            cls, arguments = BASES["SGD"]
            mine = slice(rank, None, 2)
            if name in NEED_CLOSURES:
                part = t._replace(model=model, x=t.x[mine], y=t.y[mine])
                opt = SAM(model.parameters(), cls, rho=0.1, mask=MASKS[name](part), **arguments)
                for _ in range(STEPS):
                    opt.step(part.closure(opt))
                results[name, synced] = ([p.detach() for p in t.model.parameters()], opt.masks())
                continue
            opt = SAM(model.parameters(), cls, rho=0.1, mask=MASKS[name](t), model=t.model, **arguments)
            for _ in range(STEPS):
                opt.zero_grad()
                if synced:  # one perturbation, by the gradient of the whole batch
                    F.cross_entropy(model(t.x[mine]), t.y[mine]).backward()
                else:  # each replica perturbs by its own gradient; no_sync must wrap the forward pass too
                    with model.no_sync():
                        F.cross_entropy(model(t.x[mine]), t.y[mine]).backward()
                with opt.perturbed():
                    opt.zero_grad()
                    F.cross_entropy(model(t.x[mine]), t.y[mine]).backward()
                opt.step()
            results[name, synced] = ([p.detach() for p in t.model.parameters()], opt.masks())
    torch.save(results, os.path.join(folder, f"rank{rank}.pt"))  # noqa: PTH118
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ranks"))
    mp.spawn(run, (folder, list(MASKS)), nprocs=2)
    return [torch.load(f"{folder}/rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("synced", [True, False], ids=["synced perturbation", "perturbation per replica"])
def test_ranks_agree(ranks, name, synced):
    (weights_0, masks_0), (weights_1, masks_1) = (results[name, synced] for results in ranks)
    assert same(weights_0, weights_1)
    assert same(masks_0, masks_1)


def test_the_two_kinds_of_perturbation_differ(ranks):
    assert not same(ranks[0]["none", True][0], ranks[0]["none", False][0])
