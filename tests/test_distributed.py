"""Two processes with DistributedDataParallel: the same masks and the same weights on both ranks."""

from __future__ import annotations

import pytest
import torch
from ranks import in_ranks
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import ASCENTS, MASKS, SCHEDULES, Policy, optimizer, same, task
from sparsam import SAM, RandomMask
from sparsam.errors import UserRuntimeError

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
STEPS = 5
CASES = [
    *(Policy(mask) for mask in MASKS),
    *(Policy(ascent=ascent) for ascent in ASCENTS if ascent != "none"),
    *(Policy(schedule=schedule) for schedule in SCHEDULES if schedule != "none"),
    Policy("dynamic", "friendly", "every-nth"),
    Policy("suffix", "friendly", "last-steps-momentum"),
]


def take_step(opt, model, x, y, *, synced: bool) -> None:
    """Take a step; without `synced` each replica perturbs by its own gradient."""
    opt.zero_grad()
    if opt.needs_second_pass and synced:  # one perturbation, by the gradient of the whole batch
        F.cross_entropy(model(x), y).backward()
    elif opt.needs_second_pass:  # no_sync must wrap the forward pass too
        with model.no_sync():
            F.cross_entropy(model(x), y).backward()
    with opt.perturbed():
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
    opt.step()


def run(rank: int) -> dict:
    results = {}
    for case in CASES:
        for synced in (True, False):
            t = task()
            model = DistributedDataParallel(t.model)
            opt = optimizer(t, **case._asdict())
            for _ in range(STEPS):
                take_step(opt, model, t.x[rank::2], t.y[rank::2], synced=synced)
            results[str(case), synced] = ([p.detach() for p in t.model.parameters()], opt.masks())
    return results


@pytest.fixture(scope="module")
def ranks():
    return in_ranks(run)


@pytest.mark.parametrize("name", [str(case) for case in CASES])
@pytest.mark.parametrize("synced", [True, False], ids=["synced perturbation", "perturbation per replica"])
def test_ranks_agree(ranks, name, synced):
    (weights_0, masks_0), (weights_1, masks_1) = (results[name, synced] for results in ranks)
    assert same(weights_0, weights_1)
    assert same(masks_0, masks_1)


def test_the_two_kinds_of_perturbation_differ(ranks):
    assert not same(ranks[0][str(Policy()), True][0], ranks[0][str(Policy()), False][0])


def train_one_each(rank: int, difference: float, width: int) -> tuple[str, bool]:
    """Each rank has a model of its own, which differs in values or in size; nothing synchronizes them."""
    torch.manual_seed(0)
    model = nn.Linear(4, 5 + width * rank)
    with torch.no_grad():
        model.weight += difference * rank
    before = [p.detach().clone() for p in model.parameters()]
    opt = SAM(model.parameters(), torch.optim.SGD, mask=RandomMask(0.5), lr=0.1)
    try:
        opt.step(lambda: (opt.zero_grad(), model(torch.ones(2, 4)).square().sum().backward()))
    except UserRuntimeError as error:
        return str(error), same(before, [p.detach() for p in model.parameters()])
    return "", False


@pytest.fixture(scope="module")
def apart():
    """What ranks are told whose models differ by so much, and in so many weights."""
    cases = [(0.01, 0), (0.0, 1), (1e-8, 0)]
    return dict(zip(cases, zip(*in_ranks(train_each, cases), strict=True), strict=True))


def train_each(rank: int, cases: list) -> list:
    return [train_one_each(rank, *case) for case in cases]


@pytest.mark.parametrize(("difference", "width"), [(0.01, 0), (0.0, 1)])
def test_ranks_that_train_different_models_are_refused(apart, difference, width):
    for message, unchanged in apart[difference, width]:
        assert message.startswith("all ranks must train the same weights, because all use the mask of rank 0")
        assert unchanged


def test_ranks_may_differ_in_the_last_bits(apart):
    assert apart[1e-8, 0] == (("", False),) * 2
