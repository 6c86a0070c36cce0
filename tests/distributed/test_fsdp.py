"""FSDP2: a sharded run is that of one process on the joined batch, weights and masks alike."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from ranks import in_ranks
from sharded import POLICIES, Traffic, apart, batch, closure, network, optimizer, train, whole
from torch import distributed as dist
from torch.nn import functional as F

from cases import same
from sparsam import SAM, CapturedStep, MomentumAscent, NMMask, RandomMask, diagonal_fisher, thrifty
from sparsam.errors import UserError
from sparsam.masks import SparseMask

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
QUICK = ["dense", "topk-tied", "fisher", "random-friendly"]
SHARED = ["dense", "random-friendly", "dynamic-adamw", "last-steps"]  # policies with a share of the batch
FOUR = [*QUICK, "random", "dynamic", "suffix", "adaptive", "last-steps", "dynamic-adamw"]  # policies for four processes


def shard(model, **options):
    from torch.distributed.fsdp import fully_shard

    for part in (model.stem, model.up, model.down):
        fully_shard(part, **options)
    return fully_shard(model, **options)


def my_batch(rank: int):
    x, y = batch()
    world = dist.get_world_size()
    return x[rank::world], y[rank::world]


def run(rank: int, policies: list[str], **options) -> dict:
    results = {}
    for policy in policies:
        model = shard(network())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt = train(model, policy, *my_batch(rank), **options)
        masks = opt.masks()
        results[policy] = {
            "weights": whole(model.parameters()),
            "masks": whole(masks),
            "sharded alike": all(
                m.placements == p.placements and m.to_local().shape == p.to_local().shape
                for m, p in zip(masks, model.parameters(), strict=True)
            ),
            "warnings": [str(w.message) for w in caught if w.category is UserWarning],
        }
    return results


@pytest.fixture(scope="module")
def inside():
    return in_ranks(look_inside)


@pytest.fixture(scope="module")
def ranks(inside):
    """Results by the number of processes and the policy, made when they are asked for."""
    made = {(2, name): [result["runs"][name] for result in inside] for name in QUICK}

    def get(world: int, policy: str) -> list[dict]:
        if (world, policy) not in made:
            policies = [name for name in (POLICIES if world == 2 else FOUR) if (world, name) not in made]
            results = in_ranks(run, policies, world_size=world)
            made.update({(world, name): [result[name] for result in results] for name in policies})
        return made[world, policy]

    return get


CASES = [pytest.param(2, name, marks=() if name in QUICK else pytest.mark.slow) for name in POLICIES]
CASES += [pytest.param(4, name, marks=pytest.mark.slow) for name in FOUR]


@pytest.mark.parametrize(("world", "policy"), CASES)
def test_a_sharded_run_is_that_of_one_process(ranks, world, policy):
    model = network()
    opt = train(model, policy, *batch())
    for result in ranks(world, policy):
        assert apart(result["weights"], model.parameters()) < 1e-10
        assert same(result["masks"], opt.masks())
        assert result["sharded alike"]
    if "mask" in POLICIES[policy](model) and policy != "norm":
        assert 0 < sum(m.sum() for m in opt.masks()) < sum(m.numel() for m in opt.masks())


@pytest.fixture(scope="module")
def shared(inside):
    """Results with a share of the batch by the number of processes."""
    return lambda world: inside if world == 2 else in_ranks(look_at_shares, world_size=4)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_sharded_run_with_a_share_is_that_of_one_process(shared, world):
    """Each process has every second or fourth row, so the first rows of all are the first of the batch."""
    results = shared(world)
    for policy in SHARED:
        model = network()
        opt = train(model, policy, *batch(), share=0.5)
        for result in results:
            assert apart(result["shares"][policy]["weights"], model.parameters()) < 1e-10
            assert same(result["shares"][policy]["masks"], opt.masks())


@pytest.mark.slow
def test_a_cut_falls_back_to_two_whole_passes_with_one_warning(ranks):
    for result in ranks(2, "suffix"):
        (warning,) = result["warnings"]
        assert warning.startswith("the second pass is computed in full, exact but slower: the model is sharded (fully_")
        assert warning.endswith("with DistributedDataParallel the second pass starts at the cut")
    assert not ranks(2, "dense")[0]["warnings"]


# ------------------------------------------------------------------------------------------------ a step from inside


def local_weights(model) -> list[torch.Tensor]:
    return [p.to_local().detach().clone() for p in model.parameters()]


def look_inside(rank: int) -> dict:
    x, y = my_batch(rank)
    return {
        "runs": run(rank, QUICK),
        "eps": perturbation(x, y),
        "restored": restoring(x, y),
        "stale": stale_copies(x, y),
        "traffic": traffic(x, y),
        "low precision": low_precision(x, y),
        "scaled": scaled(x, y),
        "one bad number": one_bad_number(x, y, rank),
        "resumed": resume(x, y),
        "resumed share": resume(x, y, share=0.5),
        **look_at_shares(rank),
        "different sizes": different_sizes(rank),
        "fisher": fisher(),
        "refused": refusals(x, y),
        "fsdp1": fsdp1(),
    }


def look_at_shares(rank: int) -> dict:
    return {"shares": run(rank, SHARED, share=0.5)}


def perturbation(x, y) -> tuple[float, list, list]:
    model = shard(network())
    opt = optimizer(model, "dense")
    before = whole(model.parameters())
    F.cross_entropy(model(x), y).backward()
    grads = whole(p.grad for p in model.parameters())
    with opt.perturbed():
        eps = [a - b for a, b in zip(whole(model.parameters()), before, strict=True)]
    return eps, grads


def restoring(x, y) -> list[bool]:
    model = shard(network())
    opt = optimizer(model, "random-adaptive")
    before = local_weights(model)
    F.cross_entropy(model(x), y).backward()
    opt.first_step()
    moved = not same(local_weights(model), before)
    opt.restore()
    restored = same(local_weights(model), before)
    try:
        with opt.perturbed():
            raise KeyError
    except KeyError:
        pass
    return [
        moved or all(not p.to_local().numel() for p in model.parameters()),
        restored,
        same(local_weights(model), before),
    ]


def stale_copies(x, y) -> dict[str, list]:
    """Look at the loss without a backward pass where FSDP keeps what it has gathered."""
    results = {}
    for name, model in (("sharded", shard(network())), ("one process", network())):
        x, y = (x, y) if name == "sharded" else batch()
        opt = optimizer(model, "momentum")
        losses = []
        for _ in range(3):
            with torch.no_grad():
                model(x)  # the root module's weights stay gathered
            opt.step(closure(opt, model, x, y))
            with opt.perturbed(), torch.no_grad():
                losses.append(mean(F.cross_entropy(model(x), y)))
            opt.restore()
            losses.append(mean(F.cross_entropy(model(x), y)))
        results[name] = losses
    return results


def mean(loss: torch.Tensor) -> float:
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def traffic(x, y) -> dict[str, list]:
    results = {}
    for policy in ("dense", "friendly", "random", "topk", "topk-tied"):
        model = shard(network())
        opt = optimizer(model, policy, mask=RandomMask(0.5)) if policy == "random" else optimizer(model, policy)
        opt.step(closure(opt, model, x, y))
        with Traffic() as sharp:
            opt.step(closure(opt, model, x, y))
        results[policy] = sharp.sent
        if "topk" in policy:
            with Traffic() as sharp:
                opt.step(closure(opt, model, x, y))
            results[f"{policy}, a new mask"] = sharp.sent
    model = shard(network())
    opt = optimizer(model, "dense", share=0.5)
    opt.step(closure(opt, model, x, y))
    with Traffic() as of_share:
        opt.step(closure(opt, model, x, y))
    model = shard(network())
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with Traffic() as plain:
        closure(base, model, x, y)()
        base.step()
    return {**results, "share": of_share.sent, "two plain passes": 2 * plain.sent, "three plain passes": 3 * plain.sent}


def low_precision(x, y) -> dict[str, float]:
    """Compare steps in bf16 with the same steps by whole gradients, written out."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policies = {
        "policy": (torch.float32, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
        "bf16": (torch.bfloat16, {}),
    }
    results = {}
    for name, (dtype, options) in policies.items():
        data = x.to(dtype), y
        model, other = (shard(network(dtype), **options) for _ in range(2))
        opt = optimizer(model, "dense", momentum=0.0, weight_decay=0.0)
        base = torch.optim.SGD(other.parameters(), lr=0.1)
        for _ in range(3):
            opt.step(closure(opt, model, *data))
            closure(base, other, *data)()
            before, grads = local_weights(other), whole(p.grad for p in other.parameters())
            norm = torch.stack([g.double().norm() for g in grads]).norm()
            with torch.no_grad():
                for p in other.parameters():
                    part = p.to_local()
                    part.copy_(part.float() + (0.1 / norm).float() * p.grad.to_local().float())
            closure(base, other, *data)()
            for p, w in zip(other.parameters(), before, strict=True):
                p.detach().to_local().copy_(w)
            base.step()
        results[name] = apart(whole(model.parameters()), whole(other.parameters()))
        results[f"{name}, moved"] = apart(whole(model.parameters()), network(dtype).parameters())
        results[f"{name}, dtype"] = str(next(model.parameters()).grad.dtype)
    return results


def scaled(x, y) -> float:
    """Take F-SAM's steps with a scaled loss, and without."""
    models = []
    for scale in (None, torch.tensor(8.0)):
        model = shard(network())
        opt = optimizer(model, "random-friendly")
        for _ in range(3):
            opt.zero_grad()
            (F.cross_entropy(model(x), y) * (1 if scale is None else scale)).backward()
            opt.first_step(zero_grad=True, scale=scale)
            F.cross_entropy(model(x), y).backward()
            opt.second_step()
        models.append(whole(model.parameters()))
    return apart(*models)


def one_bad_number(x, y, rank: int) -> list[bool]:
    """Let one process have a gradient that is not finite, in a step that would update the mask."""
    model = shard(network())
    opt = train(model, "dynamic", x, y, steps=2)
    masks, weights = whole(opt.masks()), local_weights(model)
    closure(opt, model, x, y)()
    if rank == 0:
        model.stem.weight.grad.to_local()[0, 0] = torch.nan
    opt.first_step()
    return [same(masks, whole(opt.masks())), same(weights, local_weights(model))]


def resume(x, y, **options) -> tuple[bool, bool]:
    """Save in the middle, load into a new optimizer; compare with the run that went on."""
    one = shard(network())
    opt = train(one, "dynamic-adamw", x, y, steps=3, **options)
    other = shard(network())
    other.load_state_dict(one.state_dict())
    again = optimizer(other, "dynamic-adamw", **options)
    saved = io.BytesIO()
    torch.save(opt.state_dict(), saved)
    saved.seek(0)
    again.load_state_dict(torch.load(saved, weights_only=True))
    for model, optim in ((one, opt), (other, again)):
        for _ in range(3):
            optim.step(closure(optim, model, x, y))
    return same(local_weights(one), local_weights(other)), same(whole(opt.masks()), whole(again.masks()))


def mean_of_shares(opt: SAM, model, parts, first: int) -> None:
    """Take a step without a closure: the mean over parts of the batch, of each of which the first rows are a share."""

    def backward(rows: slice, weight) -> None:
        losses = [F.cross_entropy(model(x[rows]), y[rows]) * weight(len(x)) for x, y in parts]
        (sum(losses) / len(parts)).backward()

    opt.zero_grad()
    backward(slice(0, first), lambda total: 1)
    with opt.perturbed():
        opt.zero_grad()
        backward(slice(0, first), lambda total: first / total)
    backward(slice(first, None), lambda total: 1 - first / total)
    opt.step()


def unequal_parts() -> list:
    x, y = batch()
    return [(x[:5], y[:5]), (x[5:], y[5:])]


def different_sizes(rank: int) -> list[list[torch.Tensor]]:
    """Train without a closure, where each process weighs its own loss, and with one, where all weigh alike."""
    by_hand, closed = shard(network()), shard(network())
    opt, own = optimizer(by_hand, "dense"), optimizer(closed, "dense", share=0.4)
    for _ in range(3):
        mean_of_shares(opt, by_hand, [unequal_parts()[rank]], first=2)
        own.step(closure(own, closed, *unequal_parts()[rank]))
    return [whole(model.parameters()) for model in (by_hand, closed)]


def step_of_unequal_shares(opt: SAM, model) -> None:
    """Take the step of such closures: 2 of 5 rows and 1 of 3, weighed by the mean of both fractions."""
    parts, counts = unequal_parts(), (2, 1)
    weight = sum(n / len(x) for n, (x, _) in zip(counts, parts, strict=True)) / 2

    def backward(factor: float, rest: bool = False) -> None:
        for n, (x, y) in zip(counts, parts, strict=True):
            rows = slice(n, None) if rest else slice(0, n)
            (factor / 2 * F.cross_entropy(model(x[rows]), y[rows])).backward()

    opt.zero_grad()
    backward(1)
    with opt.perturbed():
        opt.zero_grad()
        backward(weight)
    backward(1 - weight, rest=True)
    opt.step()


def fisher() -> list:
    model = shard(network())
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    before = [p.grad for p in model.parameters()]
    values = whole(diagonal_fisher(model, F.cross_entropy, x, y))
    kept = all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
    return [values, kept]


def message(function) -> str:
    try:
        function()
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Unaware(SparseMask):
    """Scores weights that this process does not hold."""

    def flat_scores(self, params, step, previous):
        return torch.rand(sum(p.numel() for p in params))


def refusals(x, y) -> dict[str, str]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.tensor import Shard

    model = shard(network())
    by_inputs = shard(network(), shard_placement_fn=lambda p: Shard(p.dim() - 1))
    split = SAM(by_inputs.parameters(), torch.optim.SGD, mask=NMMask(2, 4, lambda ps: ps), model=by_inputs, lr=0.1)
    opt = train(model, "random", x, y, steps=1)
    state = get_optimizer_state_dict(model, opt)

    def not_clearing():
        F.cross_entropy(model(x), y).backward()

    def too_late():
        late = network()
        own = SAM(late.parameters(), torch.optim.SGD, ascent=MomentumAscent(), model=late, lr=0.1, momentum=0.9)
        shard(late)
        own.step(closure(own, late, x, y))

    def beside(**options):
        """A weight of the loss, which no model holds."""
        inside, scale = shard(network()), torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        own = SAM([scale, *inside.parameters()], torch.optim.SGD, model=inside, lr=0.1, foreach=False, **options)

        def scaled(rows=lambda batch: batch):
            own.zero_grad()
            loss = F.cross_entropy(inside(rows(x)) * scale, rows(y))
            loss.backward()
            return loss

        own.step(scaled)

    unaware = optimizer(model, "random", mask=Unaware(0.5))
    nan = optimizer(model, "topk")
    nan.mask.scores = lambda params: [torch.full(p.shape, torch.nan) for p in params]
    return {
        "no model": message(lambda: SAM(model.parameters(), torch.optim.SGD, lr=0.1)),
        "half a model": message(lambda: SAM(model.parameters(), torch.optim.SGD, model=model.stem, lr=0.1)),
        "chunk": message(lambda: diagonal_fisher(model, F.cross_entropy, x, y, chunk_size=2)),
        "too late": message(too_late),
        "beside": message(beside),
        "beside, with a share": message(lambda: beside(share=0.5)),
        "samples": message(lambda: diagonal_fisher(model, F.cross_entropy, x + dist.get_rank(), y)),
        "split": message(lambda: split.step(closure(split, by_inputs, x, y))),
        "nan": message(lambda: nan.step(closure(nan, model, x, y))),
        "helper": message(lambda: set_optimizer_state_dict(model, opt, state)),
        "thrifty": message(lambda: thrifty(model, torch.optim.SGD, x, total_steps=9, lr=0.1)),
        "captured": message(lambda: CapturedStep(opt, lambda: None)),
        "all scores": message(lambda: unaware.step(closure(unaware, model, x, y))),
        "not cleared": message(lambda: (opt.zero_grad(), opt.step(not_clearing))),
    }


def fsdp1() -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    messages = []
    for own_parameters in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = FullyShardedDataParallel(network(), use_orig_params=own_parameters, device_id=torch.device("cpu"))
        messages.append(message(lambda model=model: SAM(model.parameters(), torch.optim.SGD, model=model, lr=0.1)))
    return messages


def test_the_norm_is_that_of_the_whole_gradient(inside):
    for result in inside:
        eps, grads = result["eps"]
        length = torch.stack([g.norm() for g in grads]).norm()
        assert torch.stack([e.norm() for e in eps]).norm().item() == pytest.approx(0.1, abs=1e-12)
        assert apart(eps, [0.1 * g / length for g in grads]) < 1e-14


def test_weights_come_back_bit_for_bit(inside):
    assert all(all(result["restored"]) for result in inside)


def test_gathered_weights_are_gathered_again(inside):
    for result in inside:
        assert result["stale"]["sharded"] == pytest.approx(result["stale"]["one process"], abs=1e-10)
        at_eps, at_w = result["stale"]["sharded"][-2:]
        assert abs(at_eps - at_w) > 1e-4


def test_a_step_sends_8_bytes_more_than_two_plain_passes(inside):
    for result in inside:
        plain = sorted(result["traffic"]["two plain passes"])
        for policy in ("dense", "friendly", "random", "topk"):
            more = sorted(result["traffic"][policy])
            more.remove(("allreduce_", 8))
            assert more == plain
        of_share = sorted(result["traffic"]["share"])
        of_share.remove(("allreduce_", 8))
        of_share.remove(("allreduce_", 16))
        assert of_share == sorted(result["traffic"]["three plain passes"])


@pytest.mark.parametrize(("policy", "rounds"), [("topk", 8), ("topk-tied", 16)])
def test_a_new_mask_sends_counts_and_no_scores(inside, policy, rounds):
    for result in inside:
        sent = list(result["traffic"][f"{policy}, a new mask"])
        for operation in [*result["traffic"]["two plain passes"], ("allreduce_", 8)]:
            sent.remove(operation)
        # Rounds of 256 counts: eight for the score, eight for the flat index of ties. Two sums over tensors.
        tensors = len(list(network().parameters()))
        assert sent == [("allreduce_", 8 * tensors), *[("allreduce_", 8 * 256)] * rounds, ("allreduce_", 8 * tensors)]


def test_steps_in_low_precision(inside):
    for result in inside:
        apart = result["low precision"]
        assert apart["policy"] < 1e-7 < 1e-3 < apart["policy, moved"]
        assert apart["bf16"] == 0 < 1e-3 < apart["bf16, moved"]
        assert (apart["policy, dtype"], apart["bf16, dtype"]) == ("torch.float32", "torch.bfloat16")


def test_a_scaled_loss_gives_the_same_steps(inside):
    assert all(result["scaled"] < 1e-12 for result in inside)


def test_a_gradient_that_is_not_finite_in_one_process_moves_nothing_in_any(inside):
    assert [result["one bad number"] for result in inside] == [[True, True]] * 2


def test_a_sharded_run_resumes_bit_for_bit(inside):
    assert [result["resumed"] for result in inside] == [(True, True)] * 2
    assert [result["resumed share"] for result in inside] == [(True, True)] * 2


def test_without_a_closure_processes_may_have_shares_of_batches_of_different_sizes(inside):
    """The mean is that of the processes' mean losses, as always in FSDP."""
    model = network()
    opt = optimizer(model, "dense")
    for _ in range(3):
        mean_of_shares(opt, model, unequal_parts(), first=2)
    for result in inside:
        assert apart(result["different sizes"][0], model.parameters()) < 1e-10


def test_closures_of_batches_of_different_sizes_weigh_alike(inside):
    model = network()
    opt = optimizer(model, "dense")
    for _ in range(3):
        step_of_unequal_shares(opt, model)
    for result in inside:
        assert apart(result["different sizes"][1], model.parameters()) < 1e-10


def test_the_diagonal_fisher_is_that_of_one_process(inside):
    expected = diagonal_fisher(network(), F.cross_entropy, *batch())
    for result in inside:
        values, kept = result["fisher"]
        assert apart(values, expected) < 1e-14
        assert kept


MESSAGES = {
    "no model": "UserTypeError: model must be given where parameters are sharded (DTensors), but is None",
    "half a model": "UserValueError: model must hold all sharded parameters, but one of shape (8,) is not in it",
    "chunk": "UserValueError: chunk_size must be None for method='exact' where parameters are sharded (DTensors)",
    "too late": "UserRuntimeError: params must be those of the sharded model, but one of shape ",
    "samples": "UserValueError: inputs and targets (of FisherMask: the data set) must be the same in all processes where parameters are sharded",
    "split": "UserValueError: NMMask needs every 4 weights along the input dimension in one process, but parameter ",
    "nan": "UserValueError: scores[0] holds NaN",
    "helper": "UserValueError: state_dict must come from SAM.state_dict(), but has no entry 'sparsam'",
    "thrifty": "UserValueError: model must not be sharded (fully_shard, tensor parallelism), because both passes of a step then run in full",
    "captured": "UserRuntimeError: CapturedStep needs whole parameters, but some are sharded; call opt.step(closure)",
    "all scores": "UserValueError: scores must be those of the ",
    "not cleared": "UserRuntimeError: the closure must clear the gradients",
}


@pytest.mark.parametrize("what", MESSAGES)
def test_what_cannot_be_is_refused_on_every_rank(inside, what):
    for result in inside:
        assert result["refused"][what].startswith(MESSAGES[what])


def test_parameters_beside_the_model_are_not_refused(inside):
    for result in inside:
        assert result["refused"]["beside"] == result["refused"]["beside, with a share"] == ""


def test_fsdp1_is_refused(inside):
    expected = (
        "UserTypeError: params must be tensors or DTensors, but parameter 0 is a piece of FullyShardedDataParallel; "
        "shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
    )
    assert [result["fsdp1"] for result in inside] == [[expected, expected]] * 2
