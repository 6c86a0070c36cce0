"""Two processes with DistributedDataParallel: the same masks and the same weights on both ranks."""

from __future__ import annotations

import pytest
import torch
from ranks import in_ranks
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from cases import ASCENTS, MASKS, SCHEDULES, Policy, optimizer, same, task
from sparsam import SAM, FisherMask, Mask, RandomMask
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


def fisher_mask(model):
    data = TensorDataset(torch.ones(4, 4), torch.zeros(4, dtype=torch.long))
    return FisherMask(0.5, model, F.cross_entropy, data, samples=4)


OF_ONE_MODEL = {"random": lambda model: RandomMask(0.5), "fisher": fisher_mask}


def train_one_each(rank: int, difference: float, width: int, mask: str) -> tuple[str, bool]:
    """Each rank has a model of its own, which differs in values or in size; nothing synchronizes them."""
    torch.manual_seed(0)
    model = nn.Linear(4, 5 + width * rank)
    with torch.no_grad():
        model.weight += difference * rank
    before = [p.detach().clone() for p in model.parameters()]
    opt = SAM(model.parameters(), torch.optim.SGD, mask=OF_ONE_MODEL[mask](model), lr=0.1)
    try:
        opt.step(lambda: (opt.zero_grad(), model(torch.ones(2, 4)).square().sum().backward()))
    except UserRuntimeError as error:
        return str(error), same(before, [p.detach() for p in model.parameters()])
    return "", False


@pytest.fixture(scope="module")
def apart():
    """What ranks are told whose models differ by so much, and in so many weights."""
    cases = [(0.01, 0, "random"), (0.0, 1, "random"), (0.0, 1, "fisher"), (1e-8, 0, "random")]
    return dict(zip(cases, zip(*in_ranks(train_each, cases), strict=True), strict=True))


def train_each(rank: int, cases: list) -> list:
    return [train_one_each(rank, *case) for case in cases]


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("case", [(0.01, 0, "random"), (0.0, 1, "random"), (0.0, 1, "fisher")])
def test_ranks_that_train_different_models_are_refused(apart, case):
    for message, unchanged in apart[case]:
        assert message.startswith("all ranks must train the same weights, because all use the mask of rank 0")
        assert unchanged


@pytest.mark.slow
def test_ranks_may_differ_in_the_last_bits(apart):
    assert apart[1e-8, 0, "random"] == (("", False),) * 2


class SteepestLayer(Mask):
    """Perturbs the tensor with the largest gradient as a whole, which each replica would choose otherwise."""

    def select(self, params, step, previous):
        largest = max(range(len(params)), key=lambda i: float(params[i].grad.abs().max()))
        return [i == largest for i in range(len(params))]


def choose_whole_tensors(rank: int) -> list[list[bool]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)))
    opt = SAM(model.parameters(), mask=SteepestLayer(interval=1), perturbation="local", model=model, lr=0.1)
    scale = torch.tensor([1e3, 1.0] if rank == 0 else [1.0, 1e3])
    chosen = []
    for _ in range(2):

        def closure():
            opt.zero_grad()
            (
                model.module[0].weight.sum() * scale[0]
                + model.module[1].weight.sum() * scale[1]
                + model(torch.ones(1, 2)).sum()
            ).backward()

        opt.step(closure)
        chosen.append([bool(m.all()) for m in opt.masks()])
    return chosen


@pytest.mark.slow
def test_whole_tensors_are_those_of_the_first_rank():
    assert in_ranks(choose_whole_tensors) == [[[True, False]] * 2] * 2
