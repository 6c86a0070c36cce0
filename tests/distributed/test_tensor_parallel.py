"""Tensor parallelism, alone and with FSDP2 or replicas on a second dimension of the mesh: each weight counts once."""

from __future__ import annotations

import warnings

import pytest
import torch
from ranks import in_ranks
from sharded import apart, batch, closure, magnitude, network, train, whole
from torch import distributed as dist

from cases import same
from sparsam import SAM, NMMask
from sparsam.errors import UserValueError

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed"),
    pytest.mark.slow,
]
CHOSEN = [
    "dense",
    "adaptive",
    "random",
    "topk-tied",
    "dynamic",
    "fisher",
    "suffix-random",  # of a layer that is not in the plan
    "suffix-dynamic",
    "friendly",
    "momentum",
    "adamw",
]
CASES = [(policy, 1.0) for policy in CHOSEN] + [(policy, 0.5) for policy in ("dense", "dynamic", "friendly")]
LAYOUTS = ["tensor parallel", "sequence parallel", "FSDP + tensor parallel", "FSDP beside tensor parallel", "HSDP"]


def sharded_model(layout: str):
    """Return a model on a mesh of 2 x 2, and by how many and as which of them this process takes part in a batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model, mesh = network(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    if layout == "HSDP":
        fully_shard(model.up, mesh=mesh)
        return fully_shard(model, mesh=mesh), (4, dist.get_rank())
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if layout == "sequence parallel":  # its gradients are sums that are still to be made
        plan["norm"] = SequenceParallel(sequence_dim=0)
        model.norm.register_forward_pre_hook(lambda _, args: DTensor.from_local(*args, mesh["tensor"], [Replicate()]))
    parallelize_module(model, mesh["tensor"], plan)
    if layout == "sequence parallel":
        model.norm.register_forward_hook(lambda _, args, output: output.full_tensor())
    if layout == "FSDP + tensor parallel":
        fully_shard(model.up, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        return model, (2, mesh.get_local_rank("data"))
    if layout == "FSDP beside tensor parallel":  # meshes of which none holds the other
        fully_shard(model.stem, mesh=mesh["data"])
    return model, (1, 0)


def run(rank: int, layout: str) -> dict:
    results = {"nm": n_of_m(layout), "partial": False}
    x, y = batch()
    for policy, share in CASES:
        model, (of, place) = sharded_model(layout)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the second pass is computed in full", UserWarning)
            opt = train(model, policy, x[place::of], y[place::of], share=share)
        results[policy, share] = whole(model.parameters()), whole(opt.masks())
        grads = [p.grad for p in model.parameters() if hasattr(p.grad, "placements")]
        results["partial"] |= any(place.is_partial() for grad in grads for place in grad.placements)
    return results


def n_of_m(layout: str) -> list[torch.Tensor] | str:
    """Return the masks of 2 of every 5 weights, of which tensor parallelism leaves groups whole; and of 2 of every 4."""
    results = []
    for m in (5, 4):
        model, _ = sharded_model(layout)
        opt = SAM(model.parameters(), torch.optim.SGD, mask=NMMask(2, m, magnitude), model=model, lr=0.1)
        try:
            opt.step(closure(opt, model, *batch()))
            results.append(whole(opt.masks()))
        except UserValueError as error:
            results.append(str(error))
    return results


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request):
    return request.param, in_ranks(run, request.param, world_size=4)


@pytest.mark.parametrize(("policy", "share"), CASES)
def test_a_run_on_a_mesh_is_that_of_one_process(ranks, policy, share):
    model = network()
    opt = train(model, policy, *batch(), share=share)
    for result in ranks[1]:
        weights, masks = result[policy, share]
        assert apart(weights, model.parameters()) < 1e-10
        assert same(masks, opt.masks())


def test_gradients_may_be_sums_that_are_still_to_be_made(ranks):
    layout, results = ranks
    assert [result["partial"] for result in results] == [layout == "sequence parallel"] * 4


def test_groups_of_m_must_not_be_split(ranks):
    layout, results = ranks
    model = network()
    opt = SAM(model.parameters(), torch.optim.SGD, mask=NMMask(2, 5, magnitude), model=model, lr=0.1)
    opt.step(closure(opt, model, *batch()))
    for result in results:
        whole_groups, split = result["nm"]
        assert same(whole_groups, opt.masks())
        if layout == "HSDP":  # which shards the first dimension alone
            assert not isinstance(split, str)
        else:
            assert split.startswith("NMMask needs every 4 weights along the input dimension in one process")
