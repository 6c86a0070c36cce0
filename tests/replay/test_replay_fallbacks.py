"""What cannot be replayed is computed in full: exact all the same, and one warning says why."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import replay_models as nets
import torch
from replay_models import BASE, RHO, Batch, Chain, Closure, Plain, closure_of, differences, loss_of, snapshot, vectors
from torch import Tensor, nn

from sparsam import SAM, FriendlyAscent, GradientAscent, RandomMask, SuffixMask
from sparsam.errors import CaptureError

# torch.compile looks at the gradients of a block's inputs, and torch says so once in each process.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

STEPS = 4
BEFORE = ("stem.", "blocks.0.")  # of a Chain that is cut at blocks.1

Builder = Callable[[Any, Closure, Batch], Closure]


# ---------------------------------------------------------------------------------------------------- closures


def micro_batches(model: Any, zero_grad: Closure, batch: Batch) -> Closure:
    def closure() -> float:
        zero_grad()
        losses = [loss_of(model(x), y) / 2 for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True)]
        return sum(loss.backward() or loss.item() for loss in losses)

    return closure


def micro_batches_one_by_one(model: Any, zero_grad: Closure, batch: Batch) -> Closure:
    def closure() -> None:
        zero_grad()
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            (loss_of(model(x), y) / 2).backward()

    return closure


def new_batches(model: Any, zero_grad: Closure, batch: Batch) -> Closure:
    factors = itertools.count(1)

    def closure() -> Tensor:
        return closure_of(model, zero_grad, (batch[0] * next(factors), batch[1]))()

    return closure


def copies(model: Any, zero_grad: Closure, batch: Batch) -> Closure:
    return lambda: closure_of(model, zero_grad, (batch[0].clone(), batch[1]))()


def noise(model: Any, zero_grad: Closure, batch: Batch) -> Closure:
    return lambda: closure_of(model, zero_grad, (batch[0] + torch.randn_like(batch[0]), batch[1]))()


def returning(what: Callable[[Tensor], Any]) -> Builder:
    def build(model: Any, zero_grad: Closure, batch: Batch) -> Closure:
        return lambda: what(closure_of(model, zero_grad, batch)())

    return build


def zeros_kept(model: Any, zero_grad: Any, batch: Batch) -> Closure:
    return closure_of(model, lambda: zero_grad(set_to_none=False), batch)


def called_compiled(model: nn.Module, zero_grad: Closure, batch: Batch) -> Closure:
    return closure_of(torch.compile(model, backend="eager"), zero_grad, batch)


def l2_before_forward(model: nn.Module, zero_grad: Closure, batch: Batch) -> Closure:
    def closure() -> Tensor:
        zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        loss = 0.1 * penalty + loss_of(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return closure


def other_scales(model: Any, zero_grad: Closure, batch: Batch) -> Closure:
    scales = itertools.cycle([1.0, 0.5])
    return lambda: closure_of(lambda x: model(x, next(scales)), zero_grad, batch)()


def toggling(model: Any, zero_grad: Closure, batch: Batch) -> Closure:
    """Tells the model in every second call to take a detour."""
    flags = itertools.cycle([False, True])

    def closure() -> Tensor:
        flag = next(flags)
        model.takes = lambda call: flag
        return closure_of(model, zero_grad, batch)()

    return closure


def input_gradient(model: Any, zero_grad: Closure, batch: Batch) -> Closure:
    x = batch[0].clone().requires_grad_()

    def closure() -> Tensor:
        zero_grad()
        loss = loss_of(model(x), batch[1])
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + g.square().sum()
        loss.backward()
        return loss

    return closure


def parts_one_by_one(model: Any, zero_grad: Closure, batch: Batch) -> Closure:
    """Never calls the model itself, and keeps the loss for itself."""

    def closure() -> None:
        zero_grad()
        h = features = model.stem(batch[0])
        for block in model.blocks:
            h = block(h)
        loss_of(model.head(h + features), batch[1]).backward()

    return closure


def features_from_hooks(what: Callable[[Tensor], Any]) -> Builder:
    """Adds a term of the stem's output to the loss."""

    def build(model: nn.Module, zero_grad: Closure, batch: Batch) -> Closure:
        features: list[Tensor] = []
        model.stem.register_forward_hook(lambda module, args, output: features.append(output))

        def closure() -> Any:
            zero_grad()
            features.clear()
            loss = loss_of(model(batch[0]), batch[1])
            loss = loss + features[0].square().mean()
            loss.backward()
            return what(loss)

        return closure

    return build


# -------------------------------------------------------------------------------------------------- situations


class Situation(NamedTuple):
    make: Callable[[], nn.Module] = Chain
    reason: str | None = None
    """What the warning says; None: the step is replayed, without a warning."""
    closure: Builder = closure_of
    cut: str = "blocks.1"
    before: tuple[str, ...] = BEFORE
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    """What the library gets in place of the model."""
    calls: int = 1
    """How often a replayed step computes the block before the cut."""


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def blocks_compiled(model: nn.Module) -> nn.Module:
    model.stem = torch.compile(model.stem, backend="eager")
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="eager")
    return model


def blocks_compiled_in_place(model: nn.Module) -> nn.Module:
    for module in (model.stem, *model.blocks):
        module.compile(backend="eager")
    return model


def frozen(*names: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Chain()
        for name in names:
            model.get_submodule(name).requires_grad_(False)
        return model

    return make


ANOTHER_WAY = "what is computed before 'blocks.1' is used after it, and not through its input"

SITUATIONS = {
    "replayed": Situation(),
    # ---- what a model does
    "its input is changed in place": Situation(
        nets.ChangesItsInput, "the input of 'blocks.1' is changed in place after the cut"
    ),
    "a skip around the cut": Situation(
        nets.UNet,
        "what is computed before 'bottom' is used after it, and not through",
        cut="bottom",
        before=("inner.", "down."),
    ),
    "a skip in later steps": Situation(lambda: nets.LateSkip(4), ANOTHER_WAY),
    "a skip in the first step only": Situation(lambda: nets.LateSkip(-1), ANOTHER_WAY),
    "a branch beside the cut": Situation(
        nets.Branches,
        "what is computed before 'block' is used after it, and not through",
        cut="block",
        before=("stem.", "other."),
    ),
    "another way in the second pass": Situation(
        lambda: nets.Detour(lambda call: call % 2 == 1),
        "it calls 'extra' where the first pass did not",
        before=(*BEFORE, "extra."),
    ),
    "another way in the first pass": Situation(
        lambda: nets.Detour(lambda call: call % 2 == 0),
        "it does not call 'extra' where the first pass did|it calls 'blocks.0' where the first pass did not",
        before=(*BEFORE, "extra."),
    ),
    "another way in every third call": Situation(
        lambda: nets.Detour(lambda call: call % 3 == 0),
        "where the first pass did",
        before=(*BEFORE, "extra."),
    ),
    "both passes go another way in later steps": Situation(
        lambda: nets.Detour(lambda call: call % 4 > 1), before=(*BEFORE, "extra."), calls=1
    ),
    "one block on both sides": Situation(nets.Shared, before=(*BEFORE, "shared.")),
    "one block again and again": Situation(nets.Repeated, cut="blocks.0", before=("stem.",), calls=6),
    "a block repeated before the cut": Situation(nets.Repeated, calls=3),
    "called twice with the same input": Situation(nets.Repeated, cut="head", before=("stem.", "blocks."), calls=3),
    "angles and a mask for all blocks": Situation(nets.RotaryChain),
    "angles and a mask changed in place": Situation(
        lambda: nets.RotaryChain(in_place=True), "changed in place"
    ),
    "frozen features changed in place": Situation(nets.FrozenFeatures, "changed in place"),
    "an input that cannot be looked into": Situation(nets.Opaque, "."),
    "a list, which is never called": Situation(
        reason="the first pass did not call 'blocks' where it can be seen", cut="blocks", before=("stem.",)
    ),
    # ---- what is trained
    "a frozen prefix": Situation(frozen("stem", "blocks.0")),
    "a prefix frozen in part": Situation(frozen("stem.0")),
    "a frozen suffix": Situation(frozen("blocks.1.mlp.0", "head")),
    # ---- what a closure does
    "several micro-batches": Situation(reason="the closure ran the model 2 times", closure=micro_batches),
    "micro-batches one by one": Situation(reason="the closure ran the model 2 times", closure=micro_batches_one_by_one),
    "a new batch in every call": Situation(
        reason="the closure gave the model another batch in its second call", closure=new_batches
    ),
    "a flag toggled in every call": Situation(
        lambda: nets.Detour(lambda call: False),
        "it calls 'extra' where the first pass did not",
        closure=toggling,
        before=(*BEFORE, "extra."),
    ),
    "another argument in every call": Situation(nets.Switched, ".", closure=other_scales),
    "an input made anew": Situation(closure=copies),
    "an augmentation in the closure": Situation(closure=noise),
    "a loss that is a number": Situation(closure=returning(Tensor.item)),
    "no loss": Situation(closure=returning(lambda loss: None)),
    "gradients set to zero": Situation(closure=zeros_kept),
    "a penalty computed before the model is called": Situation(closure=l2_before_forward),
    "a gradient of the input": Situation(reason=".", closure=input_gradient),
    "parts called one by one": Situation(reason=".", closure=parts_one_by_one),
    "features from hooks": Situation(reason=ANOTHER_WAY, closure=features_from_hooks(lambda loss: loss)),
    "features from hooks, no loss": Situation(reason=ANOTHER_WAY, closure=features_from_hooks(lambda loss: None)),
    # ---- compiling
    "compiled as a whole": Situation(reason="the model is compiled as a whole", prepare=compiled),
    "compiled in place": Situation(reason="the model is compiled as a whole", prepare=compiled_in_place),
    "called compiled": Situation(
        reason="the first pass did not call 'blocks.1' where it can be seen", closure=called_compiled
    ),
    "blocks compiled": Situation(prepare=blocks_compiled),
    "blocks compiled in place": Situation(prepare=blocks_compiled_in_place),
    # ---- checkpointing
    "checkpointed at the cut": Situation(lambda: nets.Checkpointed((1,), reentrant=False)),
    # The gradient that comes through the cut in the second pass computes the checkpointed block once more.
    "all blocks checkpointed": Situation(lambda: nets.Checkpointed((0, 1, 2), reentrant=False), calls=2),
    "checkpointed inside what is cut, reentrant": Situation(nets.Staged),
    "a cut inside what is checkpointed": Situation(
        lambda: nets.Checkpointed((-1,), reentrant=False), "checkpoint", cut="stem.1", before=("stem.0.",)
    ),
    "checkpointed at the cut, reentrant": Situation(
        lambda: nets.Checkpointed((1,), reentrant=True), "gradients were off where 'blocks.1' was called"
    ),
}  # fmt: skip


def build(situation: Situation) -> nn.Module:
    torch.manual_seed(0)
    return situation.make().double()


def batch_of(situation: Situation) -> Batch:
    return nets.images() if situation.make is nets.UNet else vectors()


def run_plain(situation: Situation, **options: Any) -> list[dict[str, Tensor]]:
    model = build(situation)
    plain = Plain(model, situation.before)
    closure = situation.closure(model, plain.zero_grad, batch_of(situation))
    torch.manual_seed(1)
    return [snapshot(model, plain.step(closure, **options)) for _ in range(STEPS)]


def run_replayed(
    situation: Situation, calls: list[str] | None = None, *, proves: bool = False, **options: Any
) -> list[dict[str, Tensor]]:
    """Take steps; without the proof, so that it is the other rules that notice what does not fit."""
    model = build(situation)
    if calls is not None:
        for name in ("stem.0", "blocks.0"):
            model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    prepared = situation.prepare(model)
    mask = SuffixMask(prepared, situation.cut, **options)
    opt = SAM(prepared.parameters(), torch.optim.SGD, rho=RHO, mask=mask, **BASE)
    opt._passes.replay.proves = proves
    closure = situation.closure(prepared, opt.zero_grad, batch_of(situation))
    torch.manual_seed(1)
    results = []
    for _ in range(STEPS):
        if calls is not None:
            calls.clear()  # those of the last step count: a first one may find out
        results.append(snapshot(prepared, opt.step(closure)))
    return results


def assert_same(results: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert [differences(a, b) for a, b in zip(results, expected, strict=True)] == [[]] * STEPS


@pytest.mark.parametrize("name", SITUATIONS)
def test_it_is_exact_and_one_warning_says_why_it_is_slow(name):
    situation = SITUATIONS[name]
    expected = run_plain(situation)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run_replayed(situation)
    said = [str(w.message) for w in caught]
    assert_same(results, expected)
    assert len(said) == (situation.reason is not None), said
    for text in said:
        how = "(exact but slower: |and which parameters follow)"
        assert re.search(f"the second pass is computed in full, {how}.*({situation.reason})", text)


COUNTING = [
    "a skip in later steps",
    "another way in the second pass",
    "another way in the first pass",
    "another way in every third call",
    "both passes go another way in later steps",
    "a new batch in every call",
    "a flag toggled in every call",
    "another argument in every call",
]


@pytest.mark.parametrize("name", [name for name in SITUATIONS if name not in COUNTING])
def test_with_the_proof_it_is_exact_too(name):
    """All but those in which the model or the closure does something else by the number of its calls."""
    situation = SITUATIONS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        results = run_replayed(situation, proves=True)
    assert_same(results, run_plain(situation))


@pytest.mark.parametrize("name", [name for name, s in SITUATIONS.items() if s.reason is None])
def test_what_gives_no_warning_saves_work(name):
    situation, calls = SITUATIONS[name], []
    run_replayed(situation, calls)
    assert calls.count("blocks.0") == situation.calls


# ---------------------------------------------------------------------------------------------- one by one


def chain() -> tuple[nn.Module, SAM, Closure]:
    model = build(Situation())
    opt = SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=SuffixMask(model, "blocks.1"), **BASE)
    return model, opt, closure_of(model, opt.zero_grad, vectors())


def two_step(opt: SAM, closure: Closure) -> None:
    closure()
    opt.first_step()
    closure()
    opt.second_step()


def context(opt: SAM, closure: Closure) -> None:
    closure()
    with opt.perturbed():
        closure()
    opt.step()


@pytest.mark.parametrize("way", [two_step, context])
def test_two_step_use_is_exact_and_says_that_it_saves_nothing(way):
    model, opt, closure = chain()
    expected = run_plain(Situation())
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=r"only step\(closure\) sees which modules are called") as caught:
        for state in expected:
            way(opt, closure)
            assert [name for name in differences(snapshot(model), state) if name != "loss"] == []
    assert len(caught) == 1


def test_two_step_use_and_closures_may_take_turns():
    model, opt, closure = chain()
    expected = run_plain(Situation())
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="only step"):
        for state, way in zip(expected, [SAM.step, two_step, SAM.step, context], strict=True):
            way(opt, closure)
            assert [name for name in differences(snapshot(model), state) if name != "loss"] == []


@pytest.mark.parametrize("failing", [1, 2], ids=["first pass", "second pass"])
def test_an_exception_leaves_weights_and_model_as_they_were(failing):
    model, opt, closure = chain()
    calls = itertools.count(1)

    def fails() -> Tensor:
        loss = closure()
        if next(calls) >= failing:
            raise ZeroDivisionError
        return loss

    opt.step(closure)
    attributes = [sorted(module.__dict__) for module in model.modules()]
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ZeroDivisionError):
        opt.step(fails)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert [sorted(module.__dict__) for module in model.modules()] == attributes

    twin, twin_opt, twin_closure = chain()
    twin.load_state_dict(model.state_dict())
    twin_opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    torch.manual_seed(2)
    expected = snapshot(twin, twin_opt.step(twin_closure))
    torch.manual_seed(2)
    assert differences(snapshot(model, opt.step(closure)), expected) == []


def test_an_exception_in_the_first_pass_keeps_no_activations():
    model, opt, closure = chain()
    activations = []
    model.stem.register_forward_hook(lambda module, args, output: activations.append(weakref.ref(output)))

    def fails() -> None:
        closure()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        opt.step(fails)
    gc.collect()
    assert [activation() for activation in activations] == [None]


@pytest.mark.parametrize("consumed", [False, True], ids=["kept", "consumed"])
def test_another_way_after_a_change_in_place_never_gives_wrong_numbers(consumed):
    """The second pass has no values to go on with: it must compute them, or refuse."""
    situation = Situation(lambda: nets.InPlaceThenDetour(consumed=consumed), before=(*BEFORE, "extra."))
    expected = run_plain(situation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            results = run_replayed(situation)
        except RuntimeError as error:
            assert "the second pass cannot be completed" in str(error)
            return
    assert_same(results, expected)


def test_parts_that_are_called_by_their_owner_s_owner_are_not_computed_twice():
    situation, calls = Situation(nets.Borrowed), []
    assert_same(run_replayed(situation, calls), run_plain(situation))
    assert calls.count("stem.0") == 1


def test_reentrant_checkpointing_before_the_cut():
    """The parameters inside are not in the graph, but before the cut all the same."""
    situation = Situation(lambda: nets.Checkpointed((0,), reentrant=True))
    model = build(situation)
    opt = SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=SuffixMask(model, situation.cut), **BASE)
    closure = closure_of(model, opt.zero_grad, vectors())
    for _ in range(2):
        opt.step(closure)
        assert perturbed_names(model, opt) == {"blocks.1", "blocks.2", "head"}


def test_batch_norm_in_checkpointed_blocks():
    """Its statistics before the cut are left out: in two whole passes they move twice, by torch's checkpointing."""
    situation = Situation(lambda: nets.Checkpointed((0, 1, 2), reentrant=False, batch_norm=True))
    for result, expected in zip(run_replayed(situation), run_plain(situation), strict=True):
        assert not [name for name in differences(result, expected) if not re.match("blocks.0.*(running|num)", name)]


NOTHING_BEHIND = {
    "no parameters": Situation(lambda: nn.Sequential(Chain(), nn.Identity()), cut="1"),
    "frozen parameters": Situation(frozen("blocks.1", "blocks.2", "head")),
}


@pytest.mark.filterwarnings("ignore:the second pass is computed in full")
@pytest.mark.parametrize("name", NOTHING_BEHIND)
def test_a_cut_with_nothing_behind_it_is_the_base_optimizer(name):
    situation = NOTHING_BEHIND[name]
    model = build(situation)
    sgd = torch.optim.SGD(model.parameters(), **BASE)
    torch.manual_seed(1)
    expected = []
    for _ in range(STEPS):
        loss = closure_of(model, sgd.zero_grad, vectors())()
        sgd.step()
        expected.append(snapshot(model, loss))
    assert_same(run_replayed(situation), expected)


@pytest.mark.parametrize("late_group", [False, True], ids=["unfrozen", "a group added"])
def test_a_prefix_that_is_trained_later_stays_unperturbed(late_group):
    model = build(Situation())
    prefix = [p for name, p in model.named_parameters() if name.startswith(BEFORE)]
    suffix = [p for name, p in model.named_parameters() if not name.startswith(BEFORE)]
    for p in prefix:
        p.requires_grad_(False)
    params = suffix if late_group else list(model.parameters())
    mask = SuffixMask(model, "blocks.1", inner=RandomMask(0.5))
    opt = SAM(params, torch.optim.SGD, rho=RHO, mask=mask, **BASE)
    closure = closure_of(model, opt.zero_grad, vectors())
    count = round(0.5 * sum(p.numel() for p in suffix))
    for step in range(4):
        if step == 2:
            for p in prefix:
                p.requires_grad_(True)
            if late_group:
                opt.add_param_group({"params": prefix})
        opt.step(closure)
        assert perturbed_names(model, opt) == {"blocks.1", "blocks.2", "head"}
        assert sum(int(m.sum()) for m in opt.masks()) == count


def perturbed_names(model: nn.Module, opt: SAM) -> set[str]:
    """The outermost modules of which something was perturbed."""
    names = {p: name for name, p in model.named_parameters()}
    params = [p for group in opt.param_groups for p in group["params"]]
    chosen = [names[p] for p, m in zip(params, opt.masks(), strict=True) if m.any()]
    return {".".join(name.split(".")[: 2 if name.startswith("blocks") else 1]) for name in chosen}


@pytest.mark.parametrize("how", ["as a whole", "called compiled", "by blocks", "by blocks in place"])
def test_nothing_is_compiled_again_in_every_step(how):
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model, opt, closure = chain()
    if how == "as a whole":
        model.compile(backend=backend)
    elif how == "called compiled":
        closure = closure_of(torch.compile(model, backend=backend), opt.zero_grad, vectors())
    for block in model.blocks if how == "by blocks in place" else []:
        block.compile(backend=backend)
    if how == "by blocks":
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            opt.step(closure)
        compiled = len(graphs)
        for _ in range(3):
            opt.step(closure)
    assert len(graphs) == compiled > 0


class DetachedAcross(nn.Module):
    """Uses a value behind the cut that code before it has changed in place, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.a(x))
        scale = h.detach().abs().mean()
        return self.c(self.b(h).relu()) / scale


def test_values_that_were_not_kept_are_noticed_in_the_first_step():
    torch.manual_seed(0)
    model = DetachedAcross().double()
    plain = Plain(copy.deepcopy(model), ("a.", "b."))
    opt = SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=SuffixMask(model, "c"), **BASE)
    with pytest.warns(
        UserWarning, match="the output of 'a' is changed in place after it, by code between the modules$"
    ) as record:
        for _ in range(3):
            result = snapshot(model, opt.step(closure_of(model, opt.zero_grad, vectors())))
            expected = plain.step(closure_of(plain.model, plain.zero_grad, vectors()))
            assert differences(result, snapshot(plain.model, expected)) == []
    assert len(record) == 1
    assert record[0].filename == __file__  # the user's line


def test_a_norm_inside_modules_on_both_sides_moves_as_in_two_whole_passes():
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), norm), nn.Sequential(nn.ReLU(), norm), nn.Linear(8, 3)
    ).double()
    opt = SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=SuffixMask(model, "1"), **BASE)
    opt.step(closure_of(model, opt.zero_grad, vectors()))
    assert norm.num_batches_tracked == 2  # twice in one forward pass


def test_a_suffix_that_is_frozen_later():
    model = Chain().double()
    opt = SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=SuffixMask(model, "blocks.1"), **BASE)
    closure = closure_of(model, opt.zero_grad, vectors())
    opt.step(closure)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(BEFORE))
    with pytest.warns(UserWarning, match="nothing after 'blocks.1' is trained"):
        opt.step(closure)


def test_an_error_between_the_passes_leaves_nothing_behind():
    model = Chain().double()
    opt = SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=SuffixMask(model, "blocks.1"), **BASE)

    def without_backward():
        opt.zero_grad()
        return loss_of(model(vectors()[0]), vectors()[1])

    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        opt.step(without_backward)
    assert opt._passes.replay.recording is None


def test_without_a_closure_a_cut_may_be_a_module_without_weights():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    opt = SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=SuffixMask(model, "1"), **BASE)
    loss_of(model(vectors()[0]), vectors()[1]).backward()
    with pytest.warns(UserWarning, match="only step"), opt.perturbed():
        assert [bool(m.all()) for m in opt.masks()] == [False, False, True, True]


# ---------------------------------------------------------------------------------------------------- CUDA graphs


class Switched(Chain):
    """Takes an argument that is no tensor, so that each of its values is a path."""

    def forward(self, x: Tensor, way: int = 0) -> Tensor:
        return super().forward(x) * (1 + way)


def saved(opt: SAM) -> bytes:
    """Return all state of an optimizer, to be compared."""
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("ways", "captured"),
    [
        ([], False),  # nothing is proven yet
        ([0], False),
        ([0, 0], True),
        ([0, 0, 1], False),  # what was proven before the latest step
        ([1, 1, 1], False),  # a path that was never taken
        ([1, 1, 0], False),  # one that is half proven
        ([1, 0, 0], True),
    ],
)
@pytest.mark.parametrize("ascent", [GradientAscent(), FriendlyAscent()], ids=repr)
def test_only_a_step_on_the_proven_path_of_the_latest_steps_is_captured(monkeypatch, ways, captured, ascent):
    """A captured step must not look at values, and repeats its path for ever. Here a flag says that it is captured."""
    torch.manual_seed(0)
    model, way, (x, y) = Switched().double(), [0], vectors()
    mask = SuffixMask(model, "blocks.1")
    opt = SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=mask, ascent=ascent, **BASE)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = loss_of(model(x, way[0]), y)
        loss.backward()
        return loss

    for way[0] in ways:
        opt.step(closure)
    way[0] = 0
    before, state = {name: p.detach().clone() for name, p in model.named_parameters()}, saved(opt)
    monkeypatch.setattr("sparsam.replay.passes.is_capturing", lambda: True)
    if captured:
        opt.step(closure)
        return
    message = (
        "a step that is captured in a CUDA graph must take the path to 'blocks.1' that the two steps before it took"
    )
    with pytest.raises(CaptureError, match=message):
        opt.step(closure)
    assert differences(before, dict(model.named_parameters())) == []
    assert saved(opt) == state
    monkeypatch.undo()
    if not isinstance(ascent, GradientAscent):
        return
    plain = Plain(copy.deepcopy(model), BEFORE)
    plain.sgd.load_state_dict(copy.deepcopy(opt.base_optimizer.state_dict()))
    torch.manual_seed(1)
    opt.step(closure)
    torch.manual_seed(1)
    plain.step(closure_of(plain.model, plain.zero_grad, (x, y)))
    assert differences(snapshot(model), snapshot(plain.model)) == []
