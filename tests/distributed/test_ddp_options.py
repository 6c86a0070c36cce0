"""Options of DistributedDataParallel, uneven inputs and ZeroRedundancyOptimizer: they work, or say why not."""

from __future__ import annotations

import warnings

import pytest
import torch
from ranks import in_ranks
from replicas import CUT, POLICIES, SGD, STEPS, assert_same_weights, build, loss_of, network, share, train
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import ASCENTS, same
from sparsam import SAM, MomentumAscent, SuffixMask
from sparsam.distributed import groups
from sparsam.errors import UserRuntimeError, UserTypeError, UserValueError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed"),
]
OPTIONS = {
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "bucket view": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
}
SOME = ("dense", "dynamic", "suffix", "friendly-suffix", "momentum", "adamw-suffix")
SHARED = ("dense", "friendly", "dynamic")  # policies that are also trained with a share of the batch


def train_options(rank: int, size: int) -> dict:
    results = {}
    for name, options in OPTIONS.items():
        for policy in SOME:
            for kind in ("global", "local"):
                model = DistributedDataParallel(network(), **options)
                if kind == "local" and options.get("static_graph"):
                    with pytest.raises(
                        UserValueError, match=r"^perturbation must be 'global' with .*static_graph=True"
                    ):
                        build(policy, model, perturbation=kind)
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # replay falls back for a static graph, which has its own test
                    results[name, policy, kind] = train(
                        build(policy, model, perturbation=kind), model, rank, size
                    ).weights
        for policy in SHARED:
            for kind in ("global", "local"):
                model = DistributedDataParallel(network(), **options)
                if options.get("static_graph"):
                    with pytest.raises(UserValueError, match=r"static_graph=True.*build it with static_graph=False"):
                        build(policy, model, perturbation=kind, share=0.5)
                    continue
                opt = build(policy, model, perturbation=kind, share=0.5)
                results[name, policy, f"{kind} share"] = train(opt, model, rank, size).weights
    return results


@pytest.fixture(scope="module")
def optional():
    return in_ranks(train_options, 2)


@pytest.mark.parametrize("policy", SOME)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_leave_the_weights_as_they_are(optional, name, policy):
    model = network()
    expected = train(build(policy, model), model).weights
    for rank in optional:
        assert_same_weights(rank[name, policy, "global"], expected, 1e-10)
        if name != "static graph":
            assert_same_weights(rank[name, policy, "local"], rank["small buckets", policy, "local"], 1e-12)


@pytest.mark.parametrize("policy", SHARED)
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "static graph"])
def test_options_leave_the_weights_of_a_share_as_they_are(optional, name, policy):
    model = network()
    expected = train(build(policy, model, share=0.5), model).weights
    for rank in optional:
        assert_same_weights(rank[name, policy, "global share"], expected, 1e-10)
        local = rank["small buckets", policy, "local share"]
        assert_same_weights(rank[name, policy, "local share"], local, 1e-12)
        assert not same(local[-1], expected[-1])


def average_mixed(rank: int) -> tuple[list[torch.Tensor], int]:
    """Average tensors of several dtypes and layouts, in buckets of 64 bytes; count the messages."""
    groups.BUCKET_BYTES, messages, all_reduce = 64, [], dist.all_reduce
    dist.all_reduce = lambda t, *arguments, **options: messages.append(t) or all_reduce(t, *arguments, **options)
    tensors = [
        torch.arange(6.0, dtype=torch.float64).view(2, 3).t() * (rank + 1),  # 48 bytes
        torch.full((4,), float(rank), dtype=torch.float64),  # 32: another bucket
        torch.full((40,), 2.0 * rank),  # 160: one by itself
        torch.empty(0),
        torch.full((), 4.0 * rank, dtype=torch.bfloat16),
    ]
    groups.average(tensors, None)
    return tensors, len(messages)


def test_means_over_ranks():
    for tensors, messages in in_ranks(average_mixed):
        expected = [1.5 * torch.arange(6.0).view(2, 3).t(), torch.full((4,), 0.5), torch.ones(40)]
        for t, wanted in zip(tensors, [*expected, torch.empty(0), torch.tensor(2.0)], strict=True):
            assert torch.equal(t.float(), wanted)
        assert messages == 4


def train_inside(rank: int, size: int) -> dict:
    """The mask holds what is inside of the DistributedDataParallel; a closure that runs that alone is found out."""
    results = {}
    for kind in ("global", "local"):
        inside = network()
        model = DistributedDataParallel(inside)
        mask = SuffixMask(inside, CUT)
        opt = SAM(model.parameters(), rho=0.3, mask=mask, model=model, perturbation=kind, **SGD)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            results[kind] = train(opt, model, rank, size).weights
    opt = build("dense", DistributedDataParallel(network()), perturbation="local")
    with pytest.raises(UserRuntimeError, match=r"`model` there, the DistributedDataParallel, to be what runs"):
        train(opt, opt._replicas.ddp.module, rank, size)
    return results


def test_a_mask_may_hold_the_model_inside(optional):
    for rank, results in enumerate(in_ranks(train_inside, 2)):
        for kind in ("global", "local"):
            assert_same_weights(results[kind], optional[rank]["small buckets", "suffix", kind], 1e-12)


class Branches(nn.Module):
    """Uses `left` or `right` after the cut, and `never` never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut = nn.Linear(6, 8), nn.Linear(8, 8)
        self.left, self.right, self.never = (nn.Linear(8, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.cut(self.first(x).tanh()).tanh()
        signs = x[:, 0] > 0  # the parts of a batch go different ways
        return (
            (self.left(h) if signs.all() else self.right(h)) if signs.all() or not signs.any() else self.both(h, signs)
        )

    def both(self, h: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
        return torch.where(signs[:, None], self.left(h), self.right(h))


def branches() -> tuple[Branches, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = Branches().double()
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    x[::2, 0], x[1::2, 0] = x[::2, 0].abs(), -x[1::2, 0].abs()
    return model, x, y


def train_branches(model: nn.Module, x: torch.Tensor, y: torch.Tensor, way: str) -> list[torch.Tensor]:
    ascent, cut = ASCENTS[way.removesuffix(" share")](), SuffixMask(model, "cut")
    options = {"share": 0.5} if way.endswith("share") else {"mask": cut}
    opt = SAM(model.parameters(), rho=0.3, ascent=ascent, model=model, lr=0.1, weight_decay=0.1, **options)

    def closure(rows=lambda batch: batch):
        opt.zero_grad()
        loss = loss_of(model, rows(x), rows(y))
        loss.backward()
        return loss

    for _ in range(STEPS):
        opt.step(closure)
    return [p.detach() for p in model.parameters()]


WAYS = ("gradient", "friendly", "gradient share", "friendly share")


def train_unused(rank: int) -> dict:
    results = {}
    for way in WAYS:
        model, x, y = branches()
        replica = DistributedDataParallel(model, find_unused_parameters=True)
        results[way] = train_branches(replica, x[rank::2], y[rank::2], way)
    return results


def test_parameters_that_one_rank_does_not_use():
    """Rank 0 uses `left` alone and rank 1 `right`; the mean is that of one process, which uses both.

    No rank uses `never`, so that even its weight decay stays away.
    """
    ranks = in_ranks(train_unused)
    for way in WAYS:
        expected = train_branches(*branches(), way)
        for rank in ranks:
            assert_same_weights([rank[way]], [expected], 1e-10)


# ------------------------------------------------------------------------------------------------- uneven inputs


def train_unevenly(rank: int) -> dict:
    """Rank 0 has two batches more than rank 1."""
    results = {}
    for policy in ("dense", "random-fixed", "friendly", "momentum"):
        for kind in ("global", "local"):
            model = DistributedDataParallel(network())
            opt = build(policy, model, perturbation=kind)
            with model.join(divide_by_initial_world_size=False):
                for step in range(4 - 2 * rank):

                    def closure(step=step, opt=opt, model=model):
                        opt.zero_grad()
                        loss = loss_of(model, *share(step, rank, 2))
                        loss.backward()
                        return loss

                    opt.step(closure)
            results[policy, kind] = [p.detach().clone() for p in model.parameters()]
    refused = {
        "dynamic": ("a mask with an interval", {}),
        "suffix": ("a cut", {}),
        "dense": ("a share of the batch", {"share": 0.5}),
    }
    for policy, (reason, options) in refused.items():
        model = DistributedDataParallel(network())
        opt = build(policy, model, **options)
        before = [p.detach().clone() for p in model.parameters()]
        calls = []

        def closure(rows=lambda batch: batch, opt=opt, model=model, calls=calls):
            calls.append(rows)
            opt.zero_grad()
            loss_of(model, *rows(share(0, rank, 2))).backward()

        try:
            with model.join():
                opt.step(closure)
        except UserRuntimeError as error:
            assert str(error).startswith(
                f"{reason} needs every rank, but in `with model.join():` some may have no more"
            )
            unchanged = same(before, [p.detach() for p in model.parameters()])
            results[reason] = unchanged and (not options or not calls)
    return results


def test_uneven_inputs():
    one, other = in_ranks(train_unevenly)
    assert "a share of the batch" in one
    for key in one:
        if isinstance(key, str):
            assert one[key] and other[key]  # refused, and nothing changed
        else:
            assert same(one[key], other[key]), key
    for policy in ("dense", "friendly"):  # both ranks in the first two steps, then rank 0 alone
        model = network()
        opt = build(policy, model)
        for step in range(4):
            part = share(step, 0, 1) if step < 2 else share(step, 0, 2)

            def closure(part=part, opt=opt, model=model):
                opt.zero_grad()
                loss = loss_of(model, *part)
                loss.backward()
                return loss

            opt.step(closure)
        assert_same_weights([one[policy, "global"]], [list(model.parameters())], 1e-10)


# ------------------------------------------------------------------------------------- ZeroRedundancyOptimizer


def train_sharded_state(rank: int, size: int) -> dict:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit.script

    results = {}
    for policy in ("dense", "dynamic", "friendly-suffix"):
        for way in ("wrap", "class"):
            model = DistributedDataParallel(network())
            options = {"rho": 0.3, "model": model, **POLICIES[policy](model)}
            if way == "wrap":
                base = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **SGD)
                opt = SAM.wrap(base, **options)
            else:
                opt = SAM(
                    model.parameters(), ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, **SGD, **options
                )
            results[policy, way] = train(opt, model, rank, size).weights
    opt.base_optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        state = opt.state_dict()
        assert all("momentum_buffer" in state["state"][i] for i in range(len(list(model.parameters()))))
        model = network()
        single = SAM(model.parameters(), ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, **SGD, rho=0.3)
        with pytest.raises(UserValueError, match="settings"):
            single.load_state_dict(state)
    with pytest.raises(UserTypeError, match=r"^MomentumAscent reads the momentum of every weight, but ZeroRedundancy"):
        SAM(
            network().parameters(),
            ZeroRedundancyOptimizer,
            optimizer_class=torch.optim.SGD,
            ascent=MomentumAscent(),
            **SGD,
        )
    with pytest.raises(
        UserTypeError, match=r"^base_optimizer must step when it is told to, but .*overlap_with_ddp=True"
    ):
        SAM.wrap(ZeroRedundancyOptimizer(network().parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1))
    return results


def test_zero_redundancy_optimizer():
    for rank in in_ranks(train_sharded_state, 2):
        for (policy, _), weights in rank.items():
            model = network()
            assert_same_weights(weights, train(build(policy, model), model).weights, 1e-10)
