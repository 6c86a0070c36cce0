"""Replicas in several processes: against one process on the joined batch, and against a slow reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import in_ranks
from replicas import (
    CUT,
    POLICIES,
    SGD,
    STEPS,
    assert_same_weights,
    batch,
    build,
    loss_of,
    network,
    share,
    squared_error,
    train,
    train_replica,
)
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from cases import same
from reference import Reference, SuffixReference, fisher, local_step, suffix_masks, top_k
from sparsam import SAM, FisherMask, FriendlyAscent, RandomMask, thrifty
from sparsam.errors import UserRuntimeError, UserTypeError, UserValueError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed"),
]
SIZES = [2, 4]
SHARE = 0.5
LOCAL = [policy for policy in POLICIES if policy != "momentum"]  # whose steps take one pass, which is synchronised


def train_all(rank: int, size: int) -> dict:
    """Train each policy in both ways."""
    results = {(policy, "global"): train_replica(rank, size, policy) for policy in POLICIES}
    results |= {(policy, "local"): train_replica(rank, size, policy, perturbation="local") for policy in LOCAL}
    results |= {
        (policy, f"{kind} share"): train_replica(rank, size, policy, perturbation=kind, share=SHARE)
        for policy in ("dense", "friendly", "dynamic")
        for kind in ("global", "local")
    }
    results["parts"] = mask_of_parts(rank, size)
    return results


def mask_of_parts(rank: int, size: int) -> list[torch.Tensor]:
    """Return the Fisher mask of ranks that hold a part of the data each, and draw all of it."""
    model = DistributedDataParallel(network())
    x, y = share(0, rank, size)
    mask = FisherMask(0.5, model, squared_error, TensorDataset(x, y), samples=len(x), method="exact")
    opt = SAM(model.parameters(), mask=mask, lr=0.1)
    step_once(opt, model)
    return opt.masks()


@pytest.mark.parametrize("size", SIZES)
def test_fisher_scores_are_those_of_all_samples_together(trained, size):
    expected = top_k(fisher(network(), squared_error, *batch()), 0.5)
    for rank in trained(size):
        for mask, wanted in zip(rank["parts"], expected, strict=True):
            assert mask.flatten().tolist() == wanted.tolist()
    part = top_k(fisher(network(), squared_error, *share(0, 0, size)), 0.5)
    assert any((a != b).any() for a, b in zip(part, expected, strict=True))  # rank 0 alone would choose otherwise


@pytest.fixture(scope="module")
def trained():
    """What the ranks return, for each number of them."""
    results: dict[int, list] = {}

    def of(size: int) -> list:
        if size not in results:
            results[size] = in_ranks(train_all, size, world_size=size)
        return results[size]

    return of


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("policy", POLICIES)
def test_global_is_one_process_on_the_joined_batch(trained, policy, size):
    model = network()
    expected = train(build(policy, model), model)
    for rank in trained(size):
        result = rank[policy, "global"]
        assert_same_weights(result.weights, expected.weights, 1e-10)
        for masks, expected_masks in zip(result.masks, expected.masks, strict=True):
            assert same(masks, expected_masks)
    losses = torch.stack([torch.stack(rank[policy, "global"].losses) for rank in trained(size)]).mean(0)
    torch.testing.assert_close(losses, torch.stack(expected.losses), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", [(p, "global") for p in POLICIES] + [(p, "local") for p in LOCAL], ids=" ".join)
def test_masks_and_weights_agree_on_all_ranks(trained, case, size):
    first, *others = (rank[case] for rank in trained(size))
    for other in others:
        for step in range(STEPS):
            assert same(first.masks[step], other.masks[step])
            assert same(first.weights[step], other.weights[step])


def top_k_of_gradient(reference: Reference) -> list[np.ndarray]:
    """The mask of the policies with top-k: made in every second step, by the gradient of the first replica."""
    if reference.step_count % 2 == 0:
        reference.made = top_k([abs(g) for g in reference.g], 0.6)
    return reference.made


REFERENCES = {
    "dense": {},
    "adaptive": {"adaptive": True, "rho": 1.0},
    "top-k": {"mask": top_k_of_gradient},
    "friendly": {"friendly": (1.0, 0.6)},
    "friendly-top-k": {"friendly": (1.0, 0.6), "mask": top_k_of_gradient},
    "suffix": {"suffix": True},
    "friendly-suffix": {"friendly": (1.0, 0.6), "suffix": True},
    "random": {"recorded": True},
    "dynamic": {"recorded": True},
    "fisher": {"recorded": True},
    "suffix-dynamic": {"recorded": True, "suffix": True},
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("policy", REFERENCES)
def test_local_perturbs_each_replica_by_its_own_gradient(trained, policy, size):
    results = [rank[policy, "local"] for rank in trained(size)]
    options = {"rho": 0.3, **SGD, **REFERENCES[policy]}
    if options.pop("recorded", False):  # that all ranks have the mask of rank 0 is another test
        recorded = [[m.flatten().numpy() for m in masks] for masks in results[0].masks]
        options["mask"] = lambda reference: recorded[reference.step_count]
    kind = SuffixReference if options.pop("suffix", False) else Reference
    if kind is SuffixReference:
        options["suffix"] = suffix_masks(network(), int(CUT))

    def replica(rank: int) -> Reference:
        reference = kind(network(), None, **options)
        reference.loss = lambda model, _: loss_of(model, *share(reference.step_count, rank, size))
        return reference

    replicas = [replica(rank) for rank in range(size)]
    for step in range(STEPS):
        local_step(replicas)
        expected = [list(replicas[0].model.parameters())]
        for result in results:
            assert_same_weights([result.weights[step]], expected, 1e-10)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("policy", ["dense", "friendly", "dynamic"])
def test_a_global_share_is_one_process_whose_share_is_all_shares(trained, policy, size):
    model = network()
    expected = train(build(policy, model, share=SHARE), model)
    for rank in trained(size):
        assert_same_weights(rank[policy, "global share"].weights, expected.weights, 1e-10)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("policy", ["dense", "friendly"])
def test_a_local_share_is_perturbed_by_its_own_gradient(trained, policy, size):
    def part(reference: Reference, rank: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = share(reference.step_count, rank, size)
        half = slice(0, len(x) // 2) if k == 0 else slice(len(x) // 2, None)
        return x[half], y[half]

    def replica(rank: int) -> Reference:
        reference = Reference(network(), None, rho=0.3, share=SHARE, **SGD, **REFERENCES[policy])
        reference.loss = lambda model, k: loss_of(model, *part(reference, rank, k))
        return reference

    replicas = [replica(rank) for rank in range(size)]
    for step in range(STEPS):
        local_step(replicas)
        for rank in trained(size):
            weights = rank[policy, "local share"].weights[step]
            assert_same_weights([weights], [list(replicas[0].model.parameters())], 1e-10)


def unequal(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return five samples of a batch for rank 0 and three for rank 1."""
    x, y = batch(step)
    own = slice(0, 5) if rank == 0 else slice(5, None)
    return x[own], y[own]


def train_unequal(rank: int) -> list[list[torch.Tensor]]:
    model, weights = DistributedDataParallel(network()), []
    opt = build("dense", model, share=SHARE)
    for step in range(STEPS):

        def closure(rows, step=step):
            opt.zero_grad()
            loss = loss_of(model, *rows(unequal(step, rank)))
            loss.backward()
            return loss

        opt.step(closure)
        weights.append([p.detach().clone() for p in model.parameters()])
    return weights


def test_ranks_may_have_shares_of_batches_of_different_sizes():
    """The mean over ranks is that of their mean losses, as always in DDP: 2 of 5 and 2 of 3 samples are perturbed."""
    model, expected = network(), []
    opt = build("dense", model)
    for step in range(STEPS):

        def backward(rows, weights, step=step):
            parts = (unequal(step, rank) for rank in range(2))
            sum(w * loss_of(model, x[rows], y[rows]) / 2 for w, (x, y) in zip(weights, parts, strict=True)).backward()

        opt.zero_grad()
        backward(slice(0, 2), (1, 1))
        with opt.perturbed():
            opt.zero_grad()
            backward(slice(0, 2), (2 / 5, 2 / 3))
        backward(slice(2, None), (3 / 5, 1 / 3))
        opt.step()
        expected.append([p.detach().clone() for p in model.parameters()])
    for weights in in_ranks(train_unequal):
        assert_same_weights(weights, expected, 1e-10)


def test_the_two_kinds_differ(trained):
    rank = trained(2)[0]
    for policy in LOCAL:
        assert not same(rank[policy, "global"].weights[-1], rank[policy, "local"].weights[-1]), policy


# ------------------------------------------------------------------------------------------------- other ways to step


def train_other_ways(rank: int, size: int) -> dict:
    """Local perturbation by the two-step API, and each replica's own mean of F-SAM."""
    results = {"closure": train_replica(rank, size, "friendly", perturbation="local").weights}
    for way in ("first_step", "perturbed"):
        model = DistributedDataParallel(network())
        opt = build("friendly", model, perturbation="local")
        results[way] = []
        for step in range(STEPS):
            part = share(step, rank, size)
            opt.zero_grad()
            with model.no_sync():
                loss_of(model, *part).backward()
            if way == "first_step":
                opt.first_step(zero_grad=True)
                loss_of(model, *part).backward()
                opt.second_step()
            else:
                with opt.perturbed():
                    opt.zero_grad()
                    loss_of(model, *part).backward()
                opt.step()
            results[way].append([p.detach().clone() for p in model.parameters()])
    results["memory"] = opt.state_dict()["sparsam"]["memories"][0][0]["mean"]
    resumed = DistributedDataParallel(network())
    other = build("friendly", resumed, perturbation="local")
    other.load_state_dict(opt.state_dict())
    results["loaded"] = other.state_dict()["sparsam"]["memories"][0][0]["mean"]
    opt.zero_grad()
    loss_of(model, *part).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UserRuntimeError, match=r"^perturbation='local' needs `with model.no_sync\(\):` around forward"):
        opt.first_step()
    results["unchanged"] = same(before, [p.detach() for p in model.parameters()])
    with pytest.raises(UserValueError, match=r"settings: perturbation was 'local' and is None\. "):
        build("friendly", resumed).load_state_dict(opt.state_dict())
    return results


@pytest.mark.slow
def test_two_step_use_and_the_state_of_a_replica():
    ranks = in_ranks(train_other_ways, 2)
    for results in ranks:
        for way in ("first_step", "perturbed"):
            assert all(same(a, b) for a, b in zip(results["closure"], results[way], strict=True)), way
        assert same([results["memory"]], [results["loaded"]])
        assert results["unchanged"]
    assert not same([ranks[0]["memory"]], [ranks[1]["memory"]])  # each replica remembers its own gradients


def train_thrifty(rank: int, size: int, perturbation: str) -> list:
    model = DistributedDataParallel(network())
    options = {"total_steps": STEPS, "cut": CUT, "fraction": 0.7, "rho": 0.3, "perturbation": perturbation, **SGD}
    return train(thrifty(model, torch.optim.SGD, share(0, rank, size)[0], **options), model, rank, size).weights


@pytest.mark.slow
@pytest.mark.parametrize("perturbation", ["global", "local"])
def test_thrifty_passes_it_on(trained, perturbation):
    for rank, weights in enumerate(in_ranks(train_thrifty, 2, perturbation)):
        assert all(same(a, b) for a, b in zip(weights, trained(2)[rank]["thrifty", perturbation].weights, strict=True))


# ------------------------------------------------------------------------------------------------- what is refused


def test_perturbation_must_be_one_of_two_words():
    model = network()
    with pytest.raises(UserValueError, match=r"^perturbation must be one of 'global', 'local', but is 'own'$"):
        SAM(model.parameters(), lr=0.1, perturbation="own")


@pytest.mark.parametrize("given", [True, False])
def test_local_needs_the_distributed_model(given):
    model = network()
    with pytest.raises(UserTypeError, match=r"^model must be the DistributedDataParallel .*; pass model=ddp_model\. "):
        SAM(model.parameters(), lr=0.1, perturbation="local", model=model if given else None)


@pytest.mark.parametrize("group", ["world", nn.Identity()])
def test_a_process_group_must_be_one(group):
    model = network()
    with pytest.raises(UserTypeError, match=r"^process_group must be a group that torch.distributed.new_group\(\) "):
        SAM(model.parameters(), lr=0.1, process_group=group)


# ------------------------------------------------------------------------------------------------- groups of processes


def step_once(opt: SAM, model: nn.Module) -> None:
    def closure():
        opt.zero_grad()
        loss_of(model, *share(0, 0, 1)).backward()

    opt.step(closure)


def train_in_groups(rank: int) -> dict:
    """Two models in two groups of two ranks, and one model on each rank."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([r]) for r in range(4)]
    own, other = pairs[rank // 2], pairs[1 - rank // 2]
    results = {}

    def model_of(number: int) -> nn.Module:
        torch.manual_seed(number)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def masks(group=None, *, model: nn.Module, seed: int) -> list[torch.Tensor]:
        opt = SAM(model.parameters(), lr=0.1, mask=RandomMask(0.5, seed=seed), model=model, process_group=group)
        step_once(opt, model)
        return opt.masks()

    pair = DistributedDataParallel(model_of(rank // 2), process_group=own)
    results["of the model"] = masks(model=pair, seed=rank)
    results["named"] = masks(own, model=model_of(rank // 2), seed=rank)
    results["alone"] = masks(alone[rank], model=model_of(rank), seed=rank)
    with pytest.raises(UserRuntimeError, match=r"^all ranks must train .*independently each need a process_group="):
        masks(model=model_of(rank), seed=0)
    with pytest.raises(UserValueError, match=r"^process_group must hold this process, but does not"):
        masks(other, model=model_of(rank), seed=0)
    return results


@pytest.mark.slow
def test_masks_are_those_of_a_group():
    ranks = in_ranks(train_in_groups, world_size=4)
    for name in ("of the model", "named"):
        assert same(ranks[0][name], ranks[1][name])
        assert same(ranks[2][name], ranks[3][name])
        assert not same(ranks[1][name], ranks[2][name])
    for rank in (1, 2, 3):
        assert not same(ranks[0]["alone"], ranks[rank]["alone"])


def copies(rank: int) -> None:
    import copy
    import pickle

    model = DistributedDataParallel(network())
    opt = SAM(model.parameters(), lr=0.1, model=model, process_group=dist.group.WORLD, ascent=FriendlyAscent())
    step_once(opt, model)
    twin = copy.deepcopy(opt)
    assert twin._replicas.group is opt._replicas.group
    with pytest.raises(UserRuntimeError, match=r"^an optimizer with process_group= cannot be pickled; save its state"):
        pickle.dumps(opt)


@pytest.mark.slow
def test_copies_share_the_group():
    in_ranks(copies, world_size=1)
