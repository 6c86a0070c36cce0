"""What a whole training computes, counted by torch's own counter of operations, is what thrifty's choice says."""

from __future__ import annotations

import math
import re
import warnings

import pytest
import torch
from ranks import in_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from sparsam import SAM, thrifty
from sparsam.replay import counting
from sparsam.sam.without_closure import run_passes

TOTAL, BUDGET, CUT, SIZE = 40, 1.3, "3", 16
SAMPLES = 32
LAYER = 2 * SAMPLES * SIZE * SIZE  # the operations of a product; a layer takes one forward and two backward
PASS = 3 * 6 * LAYER


def network() -> nn.Sequential:
    """Build six blocks that begin with a norm, so that a gradient goes through every product, also through a cut's."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)) for _ in range(6)))


def batch(rank: int = 0) -> Tensor:
    return torch.randn(SAMPLES, SIZE, generator=torch.Generator().manual_seed(rank))


@pytest.fixture
def products_only(monkeypatch):
    """Let elements and weights cost nothing, so that a cost is that of the products."""
    monkeypatch.setattr(counting, "ELEMENT", 0)


def build(model: nn.Module, x: Tensor, **arguments) -> SAM:
    return thrifty(model, torch.optim.SGD, x, **{"total_steps": TOTAL, "budget": BUDGET, "lr": 0.1, **arguments})


def plain_loop(model, x, opt) -> None:
    def closure():
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    opt.step(closure)


def accumulation(model, x, opt) -> None:
    def closure():
        opt.zero_grad()
        for part in x.chunk(4):
            (model(part).square().mean() / 4).backward()

    opt.step(closure)


def two_steps(model, x, opt) -> None:
    opt.zero_grad()
    model(x).square().mean().backward()
    if opt.needs_second_pass:
        opt.first_step(zero_grad=True)
        model(x).square().mean().backward()
        opt.second_step()
    else:
        opt.step()


class WithScaler:
    """A loop with a GradScaler, which steps without a closure."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

    def __call__(self, model, x, opt) -> None:
        opt.zero_grad()
        self.scaler.scale(model(x).square().mean()).backward()
        if opt.needs_second_pass:
            with opt.perturbed(scale=self.scaler.get_scale()):
                opt.zero_grad()
                self.scaler.scale(model(x).square().mean()).backward()
        self.scaler.step(opt)
        self.scaler.update()


def operations(take, model, x, opt) -> list[int]:
    """Return the operations of each step of a training."""
    steps = []
    for _ in range(TOTAL):
        with FlopCounterMode(display=False) as counter:
            take(model, x, opt)
        steps.append(counter.get_total_flops())
    return steps


IN_FULL = {"accumulation": accumulation, "first_step": two_steps, "GradScaler": WithScaler()}
WAYS = {"plain loop": plain_loop, **IN_FULL}


def test_a_training_computes_what_the_choice_says(products_only):
    model, x = network(), batch()
    opt = build(model, x, cut=CUT)
    steps = operations(plain_loop, model, x, opt)
    assert sum(steps) == pytest.approx(opt.choice.cost * TOTAL * PASS, rel=1e-12)
    assert opt.choice.cost <= BUDGET
    first = opt.schedule.first
    assert steps[:first] == [PASS] * first
    proofs = [PASS + 3 * LAYER, PASS]  # the second pass, and a pass that ends at the cut, whose forward is whole
    assert [step - PASS * 3 // 2 for step in steps[first:]] == [*proofs, *([0] * (TOTAL - first - 2))]
    assert opt.choice.step_cost == 1.5


def test_a_cut_before_a_product_saves_the_gradient_of_its_input(products_only):
    """The first pass does not compute it. It is counted all the same."""
    model, x = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(6))), batch()
    opt = build(model, x, cut=CUT)
    steps = operations(plain_loop, model, x, opt)
    whole = PASS - LAYER  # the batch needs no gradient
    aware = TOTAL - opt.schedule.first
    assert sum(steps) == pytest.approx(opt.choice.cost * TOTAL * whole - aware * LAYER, rel=1e-12)


def test_one_more_step_would_miss_the_budget(products_only):
    model, x = network(), batch()
    opt = build(model, x, cut=CUT)
    more = build(model, x, cut=CUT, fraction=opt.choice.fraction + 1 / TOTAL)
    assert opt.choice.cost <= BUDGET < more.choice.cost


@pytest.mark.parametrize("way", WAYS)
def test_whole_passes_keep_the_budget_in_every_way_to_step(products_only, way):
    model, x = network(), batch()
    opt = build(model, x, whole_passes=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps = operations(WAYS[way], model, x, opt)
    count = math.floor((BUDGET - 1) * TOTAL)
    assert steps == [PASS] * (TOTAL - count) + [2 * PASS] * count
    assert sum(steps) == pytest.approx(opt.choice.cost * TOTAL * PASS, rel=1e-12)
    assert all(m.all() for m in opt.masks())


@pytest.mark.parametrize("way", IN_FULL)
def test_a_warning_says_what_the_rest_of_the_run_costs(products_only, way):
    """And the fraction that it names keeps the budget."""
    model, x = network(), batch()
    opt = build(model, x, cut=CUT)
    with pytest.warns(UserWarning, match="the second pass is computed in full") as caught:
        steps = operations(IN_FULL[way], model, x, opt)
    (text,) = {str(w.message) for w in caught}
    costs = re.search(
        r"Each sharpness-aware step of the rest of the run then costs (\S+) base steps, where thrifty counted (\S+)\. ",
        text,
    )
    assert [float(cost) for cost in costs.groups()] == [2.0, 1.5]
    assert set(steps[opt.schedule.first :]) == {2 * PASS}
    assert sum(steps) > opt.choice.cost * TOTAL * PASS
    fraction = float(re.search(r"whole_passes=True, or fraction=(\S+)$", text)[1])

    model, cost = network(), opt.choice.cost
    opt = build(model, x, cut=CUT, fraction=fraction)
    with pytest.warns(UserWarning, match="the second pass is computed in full"):
        steps = operations(IN_FULL[way], model, x, opt)
    assert sum(steps) <= cost * TOTAL * PASS < sum(steps) + PASS


def test_a_measured_cost_grows_in_whole_passes_by_what_is_skipped(products_only):
    """Half of a pass is, at the cut in the middle."""
    model, x = network(), batch()
    opt = build(model, x, cut=CUT, step_cost=1.7)
    with pytest.warns(UserWarning, match=r"then costs 2\.20 base steps, where step_cost says 1\.70\. "):
        operations(two_steps, model, x, opt)


def one_trainer_step(model, x, opt) -> None:
    run_passes(opt, lambda: model(x).square().mean().backward())
    opt.step()


def first_step_always(model, x, opt) -> None:
    for half in (opt.first_step, opt.second_step):
        opt.zero_grad()
        model(x).square().mean().backward()
        half()


@pytest.mark.parametrize("take", [one_trainer_step, first_step_always])
def test_a_loop_that_is_seen_to_step_without_a_closure_is_warned_before_the_budget_is_spent(take):
    model, x = network(), batch()
    opt = build(model, x, cut=CUT)
    with pytest.warns(
        UserWarning,
        match=r"only step\(closure\) .* Each sharpness-aware step of the rest of the run then costs 1\.93 base",
    ):
        take(model, x, opt)
    assert opt.steps == 1 < opt.schedule.first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(TOTAL - 1):
            take(model, x, opt)


def train_in_rank(rank: int, kind: str, whole_passes: bool) -> tuple:
    from torch.distributed.fsdp import fully_shard

    counting.ELEMENT = 0  # this process ends with the training
    model, x = network(), batch(rank)
    if kind == "sharded":
        for block in (*model, model):
            fully_shard(block)
    else:
        model = DistributedDataParallel(model, static_graph=kind == "static graph")
    opt = build(model, x, whole_passes=whole_passes, cut=None if whole_passes else CUT)
    before = [p.grad for p in model.parameters()]
    return tuple(opt.choice), operations(plain_loop, model, x, opt), before


DISTRIBUTED = {
    "replicas": ("replicas", False),
    "replicas, whole passes": ("replicas", True),
    "static graph, whole passes": ("static graph", True),
    "sharded, whole passes": ("sharded", True),
}


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_each_rank_computes_what_the_choice_says(name):
    (one, steps, grads), (other, others, _) = in_ranks(train_in_rank, *DISTRIBUTED[name])
    assert one == other
    cost = one[4]
    assert sum(steps) == sum(others) == pytest.approx(cost * TOTAL * PASS, rel=1e-12)
    assert 1.25 < cost <= BUDGET
    assert all(grad is None for grad in grads)


def static_graph_in_rank(rank: int) -> str:
    try:
        build(DistributedDataParallel(network(), static_graph=True), batch(rank))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
def test_a_static_graph_wants_whole_passes():
    for message in in_ranks(static_graph_in_rank, world_size=1):
        assert re.match(
            r"model must not be a DistributedDataParallel with static_graph=True, .* whole_passes=True", message
        )
