"""torch.distributed.checkpoint: a run that goes on in fewer processes is the run that was not interrupted."""

from __future__ import annotations

import warnings

import pytest
import torch
from ranks import in_ranks
from sharded import apart, batch, closure, network, optimizer, whole
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import same
from sparsam import SAM, Ascent, FriendlyAscent, LastSteps, MomentumAscent, RandomMask, SAMState, SuffixMask

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"),
    pytest.mark.filterwarnings("ignore:the second pass is computed in full:UserWarning"),
]
STEPS = 3  # in each number of processes; masks are made every two
CASES = {
    "dynamic-adamw": lambda m: {},
    "random-friendly": lambda m: {},
    "dense": lambda m: {"momentum": 0.0},
    "suffix": lambda m: {"mask": SuffixMask(m, "up", inner=RandomMask(0.5, interval=2)), "ascent": FriendlyAscent()},
    "last-steps": lambda m: {"schedule": LastSteps(0.5, 3 * STEPS, before=MomentumAscent(0.3))},
}


def build(case: str) -> tuple[nn.Module, SAM]:
    model = network()
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.up)
        fully_shard(model)
    return model, optimizer(model, case, **CASES[case](model))


def state(model: nn.Module, opt: SAM) -> dict:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return {"model": get_model_state_dict(model), "optimizer": SAMState(model, opt)}


def load(model: nn.Module, opt: SAM, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    loaded = state(model, opt)
    dcp.load(loaded, checkpoint_id=folder)
    set_model_state_dict(model, loaded["model"])


def go_on(rank: int, case: str, source: str | None, target: str | None, steps: int = STEPS) -> dict:
    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore", "the second pass is computed in full", UserWarning)
    world = dist.get_world_size() if dist.is_initialized() else 1
    model, opt = build(case)
    if source is None:
        opt.param_groups[0]["rho"] = 0.2  # not what the optimizer is built with
    else:
        load(model, opt, source)
    loaded = whole(opt.masks()) if opt.steps else []
    x, y = (t[rank::world] for t in batch())
    for _ in range(steps):
        opt.step(closure(opt, model, x, y))
    if target is not None:
        dcp.save(state(model, opt), checkpoint_id=target)
    return {"weights": whole(model.parameters()), "loaded": loaded, "masks": whole(opt.masks()) if opt.steps else []}


def all_go_on(rank: int, source: str | None, target: str) -> dict:
    return {case: go_on(rank, case, source and f"{source}/{case}", f"{target}/{case}") for case in CASES}


@pytest.fixture(scope="module")
def fewer(tmp_path_factory):
    """What four processes leave, and the two that go on after them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    four = in_ranks(all_go_on, None, f"{folder}/four", world_size=4)
    return four, in_ranks(all_go_on, f"{folder}/four", f"{folder}/two"), folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_four_processes_then_two_then_one(fewer, case):
    four, two, folder = fewer
    one = go_on(0, case, f"{folder}/two/{case}", None)
    whole_run = go_on(0, case, None, None, steps=3 * STEPS)
    assert apart(one["weights"], whole_run["weights"]) < 1e-12
    assert same(one["masks"], whole_run["masks"])
    assert all(same(four[0][case]["masks"], result[case]["loaded"]) for result in two)
    assert same(two[0][case]["masks"], one["loaded"])


@pytest.mark.slow
def test_one_process_then_two(tmp_path):
    go_on(0, "dynamic-adamw", None, f"{tmp_path}/one")
    two = in_ranks(go_on, "dynamic-adamw", f"{tmp_path}/one", None)
    whole_run = go_on(0, "dynamic-adamw", None, None, steps=2 * STEPS)
    assert apart(two[0]["weights"], whole_run["weights"]) < 1e-12
    assert same(two[0]["masks"], whole_run["masks"])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("before", [0, STEPS])
def test_one_process_goes_on_bit_for_bit(case, before, tmp_path):
    go_on(0, case, None, str(tmp_path), steps=before)
    again = go_on(0, case, str(tmp_path), None)
    whole_run = go_on(0, case, None, None, steps=before + STEPS)
    assert same(again["weights"], whole_run["weights"])
    assert same(again["masks"], whole_run["masks"])


def test_saving_changes_nothing(tmp_path):
    model, opt = build("dynamic-adamw")
    x, y = batch()
    closure(opt, model, x, y)()
    grads = [p.grad for p in model.parameters()]
    SAMState(model, opt).state_dict()  # before the first step
    assert not opt.state
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))


def test_a_state_with_other_settings_is_refused(tmp_path):
    go_on(0, "random-friendly", None, str(tmp_path))
    model = network()
    opt = optimizer(model, "random-friendly", ascent=FriendlyAscent(0.25, 0.9))
    with pytest.raises(
        ValueError, match=r"state_dict is of a run with other settings: ascent.sigma was 0.5 and is 0.25"
    ):
        load(model, opt, str(tmp_path))
    assert not opt.state and opt.steps == 0 and opt.param_groups[0]["rho"] == 0.1


class Forgetful(FriendlyAscent):
    """Remembers, and does not say what."""

    def start(self, params, memory) -> None:
        if any(p.grad is not None for p in params):
            super().start(params, memory)


def test_an_ascent_that_remembers_must_say_what(tmp_path):
    import torch.distributed.checkpoint as dcp

    model = network()
    opt = optimizer(model, "dense", ascent=Forgetful())
    opt.step(closure(opt, model, *batch()))
    dcp.save(state(model, opt), checkpoint_id=str(tmp_path))
    model = network()
    opt = optimizer(model, "dense", ascent=Forgetful())
    with pytest.raises(
        ValueError, match=r"^the checkpoint holds 'mean', which an ascent remembers of parameter 0, and "
    ):
        load(model, opt, str(tmp_path))


@pytest.mark.parametrize("case", ["dynamic-adamw", "last-steps", "dense"])
def test_torchs_helpers_change_nothing(case):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model, opt = build(case)
    rates = [group["lr"] for group in opt.param_groups]
    before = [p.detach().clone() for p in model.parameters()]
    state = get_optimizer_state_dict(model, opt)
    with pytest.raises(
        ValueError, match=r"^state_dict must come from SAM.*: save sparsam.SAMState\(model, optimizer\)"
    ):
        set_optimizer_state_dict(model, opt, state)
    assert opt.steps == 0 and not opt.state and [group["lr"] for group in opt.param_groups] == rates
    assert same(before, [p.detach() for p in model.parameters()])


def test_a_first_step_without_learning_rate_counts():
    model = network()
    opt = optimizer(model, "last-steps", schedule=LastSteps(0.5, 8), lr=0.0)
    closure(opt, model, *batch())()
    assert not opt.needs_second_pass
    opt.step()
    assert opt.steps == 1


def test_other_optimizers_are_refused():
    model = network()
    with pytest.raises(TypeError, match=r"^optimizer must be a sparsam.SAM, but is a SGD$"):
        SAMState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"^model must be a module, but is a NoneType"):
        SAMState(None, optimizer(model, "dense"))


def save_local(rank: int) -> str:
    model = DistributedDataParallel(nn.Linear(2, 2))
    opt = SAM(model.parameters(), ascent=FriendlyAscent(), perturbation="local", model=model, lr=0.1)
    try:
        SAMState(model, opt)
    except TypeError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_what_differs_between_ranks_is_refused():
    for message in in_ranks(save_local):
        assert message.startswith("optimizer must not have perturbation='local' with FriendlyAscent, which remembers")


def test_ascents_without_memory_start_with_none():
    memory = {}
    Ascent.start(FriendlyAscent(), [torch.ones(2)], memory)
    assert not memory
