"""A step that starts its second pass at a cut equals, bit for bit, the same step in two whole passes."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import weakref
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import in_ranks
from replay_models import BASE, CASES, EVERY_CUT, RHO, Plain, Shared, closure_of, differences, snapshot, vectors
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from cases import task
from reference import SuffixReference, check_step, suffix_masks
from sparsam import SAM, DynamicMask, FisherMask, RandomMask, SuffixMask, find_cuts

CLIP = 0.05
PROOF = 2  # steps in which a new path is proven, with one further call of the closure
every_cut = pytest.mark.parametrize(("name", "cut"), EVERY_CUT)
small_cuts = pytest.mark.parametrize(("name", "cut"), [c for c in EVERY_CUT if c[0] != "resnet18"])


def sam(model: nn.Module, cut: str, *, adaptive: bool = False, perturbation: str = "global", **options) -> SAM:
    mask = SuffixMask(model, cut, **options)
    policy = {"mask": mask, "adaptive": adaptive, "perturbation": perturbation}
    return SAM(model.parameters(), torch.optim.SGD, rho=RHO, **policy, **BASE)


def clipped(closure, model, clip=CLIP):
    def clipping():
        loss = closure()
        assert nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
        return loss

    return clipping


def run_both(name, cut, *, before=None, clip=None, steps=3, seed=1, adaptive=False):
    """Yield what each step leaves, replayed and in two whole passes."""
    case = CASES[name]
    model, batch = case.model(seed), case.batch()
    plain = Plain(copy.deepcopy(model), before or case.cuts[cut], adaptive=adaptive)
    opt = sam(model, cut, adaptive=adaptive)
    expected_closure = closure_of(plain.model, plain.zero_grad, batch)
    closure = closure_of(model, opt.zero_grad, batch)
    if clip is not None:
        closure = clipped(closure, model, clip)
    numbers = expected_numbers = torch.Generator().manual_seed(seed).get_state()
    for _ in range(steps):
        torch.set_rng_state(expected_numbers)
        expected = snapshot(plain.model, plain.step(expected_closure, clip=clip))
        torch.set_rng_state(numbers)
        result = snapshot(model, opt.step(closure))
        numbers, expected_numbers = result["random numbers"], expected["random numbers"]
        yield result, expected


# ------------------------------------------------------------------------------------------------------- exact


@every_cut
def test_every_step_equals_that_of_two_whole_passes(name, cut):
    for result, expected in run_both(name, cut, steps=2 if name == "resnet18" else 4):
        assert differences(result, expected) == []


@small_cuts
def test_with_clipping_inside_the_closure(name, cut):
    """A first pass that ends at the cut clips the gradient of the suffix, a whole one all of it: other last bits."""
    for result, expected in run_both(name, cut, clip=CLIP, steps=4):
        for key in expected:
            torch.testing.assert_close(result[key], expected[key], rtol=1e-10, atol=1e-12)


@small_cuts
def test_adaptive(name, cut):
    for result, expected in run_both(name, cut, adaptive=True):
        assert differences(result, expected) == []


@functools.cache
def found_cuts(name: str) -> list[str]:
    model = CASES[name].model()
    return [cut.name for cut in find_cuts(model, closure_of(model, model.zero_grad, CASES[name].batch()), passes=0)]


@pytest.mark.parametrize("name", ["vgg", "gpt", "wrn-10-2"])
@given(data=st.data(), seed=st.integers(0, 2**31), adaptive=st.booleans())
@settings(max_examples=15)
def test_any_cut_any_seed(name, data, seed, adaptive):
    cut = data.draw(st.sampled_from(found_cuts(name)))
    names = [n for n, _ in CASES[name].model().named_parameters()]  # registered in the order of their use
    first = next(i for i, n in enumerate(names) if n.startswith(f"{cut}."))
    before = tuple(names[:first]) or ("no parameter",)
    for result, expected in run_both(name, cut, before=before, steps=2, seed=seed, adaptive=adaptive):
        assert differences(result, expected) == []


@pytest.mark.parametrize("cut", ["3", "4", "8"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_it_equals_the_slow_reference(cut, adaptive):
    t = task(dropout=0.25)
    twin = copy.deepcopy(t.model)
    reference = SuffixReference(
        twin,
        lambda model, k: F.cross_entropy(model(t.x), t.y),
        rho=RHO,
        adaptive=adaptive,
        suffix=suffix_masks(twin, int(cut)),
        **BASE,
    )
    opt = sam(t.model, cut, adaptive=adaptive)
    for step in range(20):
        check_step(reference, t.model, lambda: opt.step(t.closure(opt)), seed=step)


# ------------------------------------------------------------------------------------------- an inner mask

INNER = {
    "fisher": lambda model, batch, s: FisherMask(
        s, model, F.cross_entropy, TensorDataset(*batch), samples=4, interval=2
    ),
    "dynamic": lambda model, batch, s: DynamicMask(s, interval=2, total_steps=8),
    "random": lambda model, batch, s: RandomMask(s, interval=2),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("sparsity", [0.0, 0.37, 0.9, 1.0])
def test_an_inner_mask_selects_exactly_its_share_of_the_suffix(inner, sparsity):
    case, cut = CASES["vgg"], "8"
    model, batch = case.model(), case.batch()
    plain = Plain(copy.deepcopy(model), case.cuts[cut])
    opt = sam(model, cut, inner=INNER[inner](model, batch, sparsity))
    total, seen = sum(p.numel() for p in plain.suffix), set()
    for step in range(5):
        torch.manual_seed(step)
        loss = opt.step(closure_of(model, opt.zero_grad, batch))
        result = snapshot(model, loss)
        masks = dict(zip(plain.model.parameters(), opt.masks(), strict=True))
        seen.add(pickle.dumps([m.tolist() for m in masks.values()]))
        assert not any(masks[p].any() for p in plain.before)
        assert sum(int(masks[p].sum()) for p in plain.suffix) == round((1 - sparsity) * total)
        torch.manual_seed(step)
        loss = plain.step(closure_of(plain.model, plain.zero_grad, batch), masks=masks)
        assert differences(result, snapshot(plain.model, loss)) == []
    assert len(seen) == (1 if sparsity in (0, 1) else 3)  # made in steps 0, 2 and 4


# ------------------------------------------------------------------------------------------------ work saved


def count_calls(model: nn.Module) -> Counter[str]:
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    return calls


@every_cut
def test_nothing_before_the_cut_is_computed_twice(name, cut):
    case = CASES[name]
    model, batch, steps = case.model(), case.batch(), 2
    opt, calls, closures = sam(model, cut), count_calls(model), Counter()

    def closure():
        closures.update(["closure"])
        return closure_of(model, opt.zero_grad, batch)()

    for _ in range(PROOF):
        opt.step(closure)
    assert closures["closure"] == 3 * PROOF
    closures.clear()
    calls.clear()
    for _ in range(steps):
        opt.step(closure)
    assert closures["closure"] == 2 * steps
    owners = {module: n for n, module in model.named_modules()}
    before = {n for n, p in model.named_parameters() if n.startswith(case.cuts[cut])}
    for module, owner in owners.items():
        own = {f"{owner}.{n}" for n, _ in module.named_parameters(recurse=False)}
        if own and owner in calls:
            # A tied head is computed behind the cut, though its weight lies before it.
            assert calls[owner] == steps * (1 if own <= before else 2), owner


# ------------------------------------------------------------------------------------------ no trace between steps


def traces(model: nn.Module) -> list[object]:
    return [
        (name, sorted(module.__dict__), [len(v) for k, v in sorted(module.__dict__.items()) if "hooks" in k])
        for name, module in model.named_modules()
    ]


@small_cuts
def test_a_step_leaves_no_trace_in_the_model(name, cut):
    model, batch = CASES[name].model(), CASES[name].batch()
    opt, before = sam(model, cut), traces(model)
    for _ in range(2):
        opt.step(closure_of(model, opt.zero_grad, batch))
        assert traces(model) == before
        assert not any("_compiled_call_impl" in module.__dict__ for module in model.modules())
    copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))


DUPLICATES = {
    "deepcopy": lambda opt, model: copy.deepcopy((opt, model)),
    "deepcopy of the optimizer": lambda opt, model: (twin := copy.deepcopy(opt), twin.mask.scope.model),
    "pickle": lambda opt, model: pickle.loads(pickle.dumps((opt, model))),
}


@pytest.mark.parametrize("duplicate", DUPLICATES)
def test_copies_continue_alike(duplicate):
    case = CASES["vgg"]
    model, batch = case.model(), case.batch()
    opt = sam(model, "8")
    for _ in range(2):
        opt.step(closure_of(model, opt.zero_grad, batch))
    pairs = [(opt, model), DUPLICATES[duplicate](opt, model)]
    results = []
    for o, m in pairs:
        torch.manual_seed(3)
        results.append([snapshot(m, o.step(closure_of(m, o.zero_grad, batch))) for _ in range(4)])
    assert [differences(a, b) for a, b in zip(*results, strict=True)] == [[]] * 4


@pytest.mark.parametrize("name", ["vgg", "vit", "gpt"])
def test_activations_are_freed_after_the_step(name):
    case = CASES[name]
    model, batch = case.model(), case.batch()
    activations = []

    def note(module, args, output):
        activations.extend(weakref.ref(t) for t in tree_leaves(output) if isinstance(t, torch.Tensor))

    for module in model.modules():
        module.register_forward_hook(note)
    opt = sam(model, list(case.cuts)[1])
    for _ in range(2):
        loss = opt.step(closure_of(model, opt.zero_grad, batch))
        del loss
        gc.collect()
        assert activations
        assert all(activation() is None for activation in activations)


# ---------------------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("around", ["the forward pass", "the step"])
@pytest.mark.parametrize(("name", "cut"), [("vgg", "8"), ("vit", "blocks.1"), ("gpt", "blocks.1"), ("encoder", "head")])
def test_autocast(name, cut, around):
    case = CASES[name]
    x, y = case.batch()
    batch = (x.float() if x.is_floating_point() else x, y)
    model = case.model().float()
    plain = Plain(copy.deepcopy(model), case.cuts[cut])
    opt = sam(model, cut)
    inner, outer = torch.autocast("cpu", torch.bfloat16), contextlib.nullcontext()
    if around == "the step":
        inner, outer = outer, inner

    def forward(network):
        def run(x):
            with inner:
                return network(x)

        return run

    for step in range(3):
        torch.manual_seed(step)
        with outer:
            result = snapshot(model, opt.step(closure_of(forward(model), opt.zero_grad, batch)))
        torch.manual_seed(step)

        def expected_closure():
            with outer:  # apart for each pass: the cache of casts holds those of w
                return closure_of(forward(plain.model), plain.zero_grad, batch)()

        assert differences(result, snapshot(plain.model, plain.step(expected_closure))) == []


def test_autocast_of_a_weight_on_both_sides_of_the_cut():
    """Two whole passes share one cast and add the weight's two gradients in bf16; from the cut on it is cast anew."""
    torch.manual_seed(0)
    model, (x, y) = Shared(), vectors()
    plain, opt = Plain(copy.deepcopy(model), ("stem.", "blocks.0.", "shared.")), sam(model, "blocks.1")

    def closure_under_autocast(model, zero_grad):
        return closure_of(torch.autocast("cpu", torch.bfloat16)(model.forward), zero_grad, (x.float(), y))

    torch.manual_seed(1)
    result = snapshot(model, opt.step(closure_under_autocast(model, opt.zero_grad)))
    torch.manual_seed(1)
    expected = snapshot(plain.model, plain.step(closure_under_autocast(plain.model, plain.zero_grad)))
    assert all(name.startswith("shared.") for name in differences(result, expected))
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=0.02, atol=0.002)


# ------------------------------------------------------------------------------------------------- distributed

DDP_STEPS = 4
DDP_OPTIONS = {
    "plain": {},
    "finding unused parameters": {"find_unused_parameters": True},
    "gradients in buckets": {"gradient_as_bucket_view": True},
}
distributed = pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")


def share_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = CASES["vgg"].batch()
    return x[rank::2], y[rank::2]


def train_rank(rank: int) -> dict:
    results = {}
    for name, options in DDP_OPTIONS.items():
        model = CASES["vgg"].model()
        replica = DistributedDataParallel(model, **options)
        calls, opt = count_calls(model), sam(replica, "8", perturbation="local")
        torch.manual_seed(rank)
        closure = closure_of(replica, opt.zero_grad, share_of(rank))
        results[name] = [snapshot(model, opt.step(closure)) for _ in range(DDP_STEPS)], calls
    return results


@pytest.fixture(scope="module")
def ranks():
    return in_ranks(train_rank)


@pytest.mark.slow
@distributed
@pytest.mark.parametrize("options", DDP_OPTIONS)
def test_distributed_ranks_agree_and_average_the_second_gradient(ranks, options):
    replicas = [Plain(CASES["vgg"].model(), CASES["vgg"].cuts["8"]) for _ in ranks]
    numbers = [torch.Generator().manual_seed(rank).get_state() for rank in range(2)]
    states = [results[options][0] for results in ranks]
    for step in range(DDP_STEPS):
        for rank, replica in enumerate(replicas):
            torch.set_rng_state(numbers[rank])
            replica.passes(closure_of(replica.model, replica.zero_grad, share_of(rank)))
            numbers[rank] = torch.get_rng_state()
        for p, q in zip(*(replica.model.parameters() for replica in replicas), strict=True):
            p.grad = q.grad = p.grad / 2 + q.grad / 2
        for rank, replica in enumerate(replicas):
            replica.sgd.step()
            for name, p in replica.model.named_parameters():
                assert torch.equal(states[0][step][name], states[1][step][name])
                torch.testing.assert_close(states[rank][step][name], p.detach(), rtol=1e-12, atol=1e-14)
                torch.testing.assert_close(states[rank][step][f"{name}, gradient"], p.grad, rtol=1e-12, atol=1e-14)
    for results in ranks:
        calls = results[options][1]
        proof = 2 + 2  # a whole pass and a shorter one, without other processes; ...
        assert calls["0"] == DDP_STEPS + PROOF + proof - 1  # ... the second of the shorter ones leaves the prefix out
        assert calls["8"] == 2 * DDP_STEPS + proof


def test_parameters_outside_of_the_model_that_is_cut_move_too():
    """A proof puts the gradients of all parameters of the optimizer back."""
    torch.manual_seed(0)
    first, model = nn.Linear(6, 6).double(), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = vectors()
    opt = SAM([*first.parameters(), *model.parameters()], torch.optim.SGD, rho=RHO, mask=SuffixMask(model, "2"), **BASE)
    for _ in range(4):
        before = first.weight.detach().clone()
        opt.step(closure_of(lambda x: model(first(x)), opt.zero_grad, (x, y)))
        assert not torch.equal(first.weight, before)


def test_a_resumed_run_proves_its_paths_again():
    case = CASES["vgg"]
    model, batch = case.model(), case.batch()
    opt, calls = sam(model, "8"), []

    def closure():
        calls.append(1)
        return closure_of(model, opt.zero_grad, batch)()

    for _ in range(3):
        opt.step(closure)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    for _ in range(3):
        opt.step(closure)
    assert len(calls) == 2 * (3 + 3 + 2)
