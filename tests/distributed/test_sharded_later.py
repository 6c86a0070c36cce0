"""A model that is sharded after its optimizer was built, as Accelerate does: the groups get the new parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import in_ranks
from sharded import apart, batch, closure, network, optimizer, train, whole
from torch import distributed as dist
from torch import nn

from cases import same
from sparsam import SAM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed"),
    pytest.mark.filterwarnings("ignore:the second pass is computed in full"),  # with a cut
]
POLICIES = ["dense", "random", "norm", "suffix", "suffix-random", "friendly"]
STEPS = 3


def shard(model: nn.Module, opt: SAM) -> None:
    """Shard the model, and put each new parameter where the old one was."""
    from torch.distributed.fsdp import fully_shard

    names = {p: name for name, p in model.named_parameters()}
    for layer in list(model.children()):
        fully_shard(layer)
    fully_shard(model)
    new = dict(model.named_parameters())
    for group in opt.param_groups:
        group["params"] = [new[names[p]] for p in group["params"]]


def own_part(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch()
    return x[rank::2], y[rank::2]


def refusal(opt: SAM, model: nn.Module, rank: int) -> tuple[str, bool]:
    """Return the error of a step, and whether the weights stayed."""
    before = whole(model.parameters())
    try:
        opt.step(closure(opt, model, *own_part(rank)))
    except Exception as error:
        return f"{type(error).__name__}: {error}", same(before, whole(model.parameters()))
    return "nothing was raised", False


def inside_a_rank(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for policy in POLICIES:
        model = network()
        opt = optimizer(model, policy)
        shard(model, opt)
        for _ in range(STEPS):
            opt.step(closure(opt, model, *own_part(rank)))
        results[policy] = whole(model.parameters()), whole(opt.masks())
    model = network()
    opt = SAM(model.parameters(), rho=0.1, lr=0.1)
    shard(model, opt)
    results["no model"] = refusal(opt, model, rank)
    model = network()
    opt = optimizer(model, "random")
    opt.step(closure(opt, model, *batch()))
    state = opt.state_dict()
    shard(model, opt)
    results["after a step"] = refusal(opt, model, rank)
    model = network()
    opt = optimizer(model, "random")
    opt.load_state_dict(state)
    shard(model, opt)
    results["after loading"] = refusal(opt, model, rank)
    return results


@pytest.fixture(scope="module")
def inside():
    return in_ranks(inside_a_rank)


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_are_those_of_one_process(inside, policy):
    model = network()
    opt = train(model, policy, *batch(), steps=STEPS)
    for result in inside:
        got, masks = result[policy]
        assert apart(got, model.parameters()) < 1e-10
        assert same(masks, opt.masks())


def test_the_model_must_be_known(inside):
    for result in inside:
        message, kept = result["no model"]
        assert message.startswith("UserTypeError: model must be given where parameters are sharded (DTensors)")
        assert kept


@pytest.mark.parametrize("when", ["after a step", "after loading"])
def test_what_was_kept_of_whole_parameters_is_refused(inside, when):
    for result in inside:
        message, kept = result[when]
        assert message.startswith(
            "UserRuntimeError: params must be sharded before the first step, but were sharded after one"
        )
        assert kept
