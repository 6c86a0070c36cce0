"""Where a model can be cut, which cut a budget takes, and what a BudgetMask refuses."""

from __future__ import annotations

import copy
import io
import math
import re
from collections import Counter

import pytest
import torch
from replay_models import (
    BASE,
    CASES,
    RHO,
    Branches,
    Case,
    Chain,
    ChangesItsInput,
    Checkpointed,
    Plain,
    Shared,
    Uncuttable,
    UNet,
    closure_of,
    differences,
    images,
    loss_of,
    snapshot,
    vectors,
)
from torch import nn

import sparsam.replay.costs
from sparsam import SAM, BudgetMask, RandomMask
from sparsam.masks.budget import choose_cut
from sparsam.replay.cuts import Cut, find_cuts

# ------------------------------------------------------------------------------------------------------- found

OTHERS = {
    "chain": Case(Chain, vectors, {}),
    "unet": Case(UNet, images, {}),
    "branches": Case(Branches, vectors, {}),
    "shared": Case(Shared, vectors, {}),
    "input changed in place": Case(ChangesItsInput, vectors, {}),
    "checkpointed": Case(lambda: Checkpointed((0, 1, 2), reentrant=False), vectors, {}),
    "stem checkpointed": Case(lambda: Checkpointed((-1,), reentrant=False), vectors, {}),
    "checkpointed, reentrant": Case(lambda: Checkpointed((0,), reentrant=True), vectors, {}),
    "uncuttable": Case(Uncuttable, vectors, {}),
}
NETWORKS = {**CASES, **OTHERS}

# The parameters before each cut, by how their names begin, are those of the cut before and these.
FOUND = {
    "resnet18": {
        "stem": (),
        "stem.1": ("stem.0.",),
        "layer1": ("stem.1.",),
        "layer1.1": ("layer1.0.",),
        "layer2": ("layer1.1.",),
        "layer2.1": ("layer2.0.",),
        "layer3": ("layer2.1.",),
        "layer3.1": ("layer3.0.",),
        "layer4": ("layer3.1.",),
        "layer4.1": ("layer4.0.",),
        "head.2": ("layer4.1.",),
    },
    "resnet": {
        "stem": (),
        "stem.1": ("stem.0.",),
        "layer1": ("stem.1.",),
        "layer2": ("layer1.",),
        "layer3": ("layer2.",),
        "head.2": ("layer3.",),
    },
    "wrn-10-2": {
        "stem": (),
        "layer1": ("stem.",),
        "layer2": ("layer1.",),
        "layer3": ("layer2.",),
        "head": ("layer3.",),
        "head.4": ("head.0.",),
    },
    "vgg": {
        "0": (),
        "1": ("0.",),
        "4": ("1.",),
        "5": ("4.",),
        "8": ("5.",),
        "9": ("8.",),
        "13": ("9.",),
        "16": ("13.",),
    },
    "vit": {
        "patches": (),
        "blocks.0": ("cls", "position", "patches."),
        "blocks.1": ("blocks.0.",),
        "blocks.2": ("blocks.1.",),
        "norm": ("blocks.2.",),
        "head": ("norm.",),
    },
    "encoder": {
        "embedding": (),
        "layers.0": ("embedding.",),
        "layers.0.norm1": ("layers.0.self_attn.",),
        "layers.0.norm2": ("layers.0.norm1.", "layers.0.linear1.", "layers.0.linear2."),
        "layers.1": ("layers.0.norm2.",),
        "layers.1.norm1": ("layers.1.self_attn.",),
        "layers.1.norm2": ("layers.1.norm1.", "layers.1.linear1.", "layers.1.linear2."),
        "layers.2": ("layers.1.norm2.",),
        "layers.2.norm1": ("layers.2.self_attn.",),
        "layers.2.norm2": ("layers.2.norm1.", "layers.2.linear1.", "layers.2.linear2."),
        "head": ("layers.2.norm2.",),
    },
    "gpt": {  # the head is the embedding: nothing of its own lies behind the norm
        "embedding": (),
        "blocks.0": ("embedding.", "position."),
        "blocks.1": ("blocks.0.",),
        "blocks.2": ("blocks.1.",),
        "norm": ("blocks.2.",),
    },
    "chain": {
        "stem": (),
        "stem.1": ("stem.0.",),
        "blocks.0": ("stem.1.",),
        "blocks.1": ("blocks.0.",),
        "blocks.2": ("blocks.1.",),
        "head": ("blocks.2.",),
    },
    "unet": {"inner": (), "up": ("inner.", "down.", "bottom."), "head.2": ("up.",)},
    "branches": {"stem": (), "head": ("stem.", "other.", "block.")},
    "shared": {
        "stem": (),
        "stem.1": ("stem.0.",),
        "shared": ("stem.1.",),
        "blocks.0": ("shared.",),
        "blocks.1": ("blocks.0.",),
        "blocks.2": ("blocks.1.",),
        "head": ("blocks.2.",),
    },
    "input changed in place": {
        "stem": (),
        "stem.1": ("stem.0.",),
        "blocks.0": ("stem.1.",),
        "blocks.1.residual": ("blocks.0.", "blocks.1.position"),
        "blocks.2": ("blocks.1.residual.",),
        "head": ("blocks.2.",),
    },
    "checkpointed": {
        "stem": (),
        "stem.1": ("stem.0.",),
        "blocks.0": ("stem.1.",),
        "blocks.1": ("blocks.0.",),
        "blocks.2": ("blocks.1.",),
        "head": ("blocks.2.",),
    },
    "stem checkpointed": {  # what is computed twice anyhow has no cut inside
        "stem": (),
        "blocks.0": ("stem.",),
        "blocks.1": ("blocks.0.",),
        "blocks.2": ("blocks.1.",),
        "head": ("blocks.2.",),
    },
    "checkpointed, reentrant": {
        "stem": (),
        "stem.1": ("stem.0.",),
        "stem.3": ("stem.1.",),  # blocks.0 is called with gradients off, and cannot be the cut itself
        "blocks.1": ("blocks.0.",),
        "blocks.2": ("blocks.1.",),
        "head": ("blocks.2.",),
    },
    "uncuttable": {},
}
every_network = pytest.mark.parametrize("name", FOUND)


def find(name: str, passes: int = 0) -> list[Cut]:
    model = NETWORKS[name].model()
    return find_cuts(model, closure_of(model, model.zero_grad, NETWORKS[name].batch()), passes=passes)


@every_network
def test_the_cuts_of_a_network_and_the_weights_behind_them(name):
    model = NETWORKS[name].model()
    total = behind = sum(p.numel() for p in model.parameters())
    expected = []
    for cut, passed in FOUND[name].items():
        behind -= sum(p.numel() for n, p in model.named_parameters() if passed and n.startswith(passed))
        expected.append((cut, pytest.approx(behind / total, rel=1e-12)))
    assert [(cut.name, cut.weights) for cut in find(name)] == expected


@pytest.mark.parametrize("name", [name for name in FOUND if name != "resnet18"])
def test_every_cut_that_is_found_can_be_replayed(name):
    model, batch = NETWORKS[name].model(), NETWORKS[name].batch()
    before: tuple[str, ...] = ()
    for cut, passed in FOUND[name].items():
        before += passed
        twins = copy.deepcopy(model), copy.deepcopy(model)
        plain = Plain(twins[0], before or ("no parameter",))
        opt = budget(twins[1], cut=cut)
        for step in range(2):
            torch.manual_seed(step)
            expected = snapshot(twins[0], plain.step(closure_of(twins[0], plain.zero_grad, batch)))
            torch.manual_seed(step)
            result = snapshot(twins[1], opt.step(closure_of(twins[1], opt.zero_grad, batch)))
            assert differences(result, expected) == [], cut


def with_penalty(model, batch, *, first):
    """A loss with an L2 term, computed before the model is called or after it."""

    def penalty():
        return sum(p.square().sum() for p in model.parameters())

    def run():
        early = penalty() if first else 0.0
        loss = loss_of(model(batch[0]), batch[1])
        loss = loss + 0.1 * (early if first else penalty())
        loss.backward()
        return loss

    return run


@pytest.mark.parametrize("first", [False, True])
def test_a_penalty_on_all_weights(first):
    """Weights that are used before the cut, if only in a penalty, count as lying before it: the careful answer."""
    model, batch = NETWORKS["chain"].model(), vectors()
    found = [cut.name for cut in find_cuts(model, with_penalty(model, batch, first=first), passes=0)]
    assert found == ([] if first else list(FOUND["chain"]))


@pytest.mark.parametrize("name", ["vgg", "gpt"])
@pytest.mark.parametrize("passes", [0, 1])
def test_finding_leaves_no_trace(name, passes):
    case = CASES[name]
    model = case.model()
    torch.manual_seed(4)
    before, attributes = snapshot(model), [sorted(m.__dict__) for m in model.modules()]
    find_cuts(model, closure_of(model, model.zero_grad, case.batch()), passes=passes)
    after = snapshot(model)
    assert [key for key in differences(before, after) if "gradient" not in key] == []
    assert [sorted(m.__dict__) for m in model.modules()] == attributes


@pytest.mark.parametrize("name", ["vgg", "encoder", "gpt", "unet"])
def test_each_cut_has_a_measured_share_of_the_step(name):
    cuts = find(name, passes=1)
    assert [cut.name for cut in cuts] == list(FOUND[name])
    assert all(0 < cut.step <= 1 for cut in cuts)


# ------------------------------------------------------------------------------------------------------ chosen

COSTS = {"a": 1.9, "b": 1.5, "c": 1.2, "d": 1.05}
UNEVEN = {"a": 1.3, "b": 1.4, "c": 1.2}

CHOICES = [
    (COSTS, 9.0, 0.0, "a"),
    (COSTS, 1.9, 0.0, "a"),
    (COSTS, 1.89, 0.0, "b"),
    (COSTS, 1.5, 0.0, "b"),
    (COSTS, 1.2, 0.0, "c"),
    (COSTS, 1.05, 0.0, "d"),
    (COSTS, 1.95, 0.5, "a"),  # (1.9 + 2) / 2
    (COSTS, 1.94, 0.5, "b"),
    (COSTS, 1.6, 0.5, "c"),
    (COSTS, 1.53, 0.5, "d"),
    (COSTS, 2.0, 1.0, "a"),  # all steps are full ones
    (UNEVEN, 1.35, 0.0, "a"),
    (UNEVEN, 1.25, 0.0, "c"),
]


@pytest.mark.parametrize(("costs", "allowed", "full", "cut"), CHOICES)
def test_the_earliest_cut_that_fits_is_chosen(costs, allowed, full, cut):
    assert choose_cut(costs, allowed, full) == cut


@pytest.mark.parametrize(
    ("costs", "allowed", "full", "message"),
    [
        (COSTS, 1.01, 0.0, "budget must be at least 1.05, the mean step's cost at the cheapest cut, 'd', but is 1.01"),
        (COSTS, 1.51, 0.5, "budget must be at least 1.525, the mean step's cost at the cheapest cut, 'd', with full=0.5, but is 1.51"),
        ({"a": 1.1, "b": 1.4}, 1.05, 0.0, "budget must be at least 1.1, the mean step's cost at the cheapest cut, 'a', but is 1.05"),
        ({}, 1.9, 0.0, "the model has no cut that can be seen: nothing of a step could be left out (is it compiled as a whole? then compile its blocks instead; does the closure run another model than the mask's?)"),
    ],
)  # fmt: skip
def test_what_is_said_when_nothing_fits(costs, allowed, full, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        choose_cut(costs, allowed, full)


@pytest.mark.parametrize("cost", [1.0, 1.00049, 1.23456789, 1.1999999, 1.999])
@pytest.mark.parametrize("full", [0.0, 0.1, 1 / 3])
def test_the_budget_that_the_error_names_is_enough(cost, full):
    with pytest.raises(ValueError, match="budget must be at least") as error:
        choose_cut({"a": cost}, 0.9, full)
    named = float(re.search(r"at least ([\d.]+)", str(error.value))[1])
    assert choose_cut({"a": cost}, named, full) == "a"


# ---------------------------------------------------------------------------------------------------- measured


def budget(model: nn.Module, **options) -> SAM:
    return SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=BudgetMask(model, **options), **BASE)


@pytest.fixture
def measured(monkeypatch):
    """What is measured of a VGG, without a clock: 1.632, 1.2 and 1.048 base steps."""
    asked = []

    def found(model, run, **options):
        asked.append(model)
        return [Cut("4", 0.9, 0.7), Cut("8", 0.5, 0.2), Cut("16", 0.1, 0.05)]

    seconds = {"_perturbing": 0.1, "step": 0.25, "closure": 1.0, "_two_passes": 1.05}

    def time(self, work):
        return next(s for name, s in seconds.items() if name in work.__qualname__)

    monkeypatch.setattr(sparsam.replay.costs, "find_cuts", found)
    monkeypatch.setattr(sparsam.replay.costs.Clock, "time", time)
    return asked


@pytest.mark.parametrize(
    ("options", "cut"),
    [
        ({"budget": 1.64}, "4"),  # 1 + (0.7 + 0.9 * 0.1) / 1.25
        ({"budget": 1.63}, "4"),  # so near that the step itself is timed: (1.05 + 0.25) / 1.25 = 1.04
        ({"budget": 1.5}, "8"),
        ({"budget": 1.21}, "8"),
        ({"budget": 1.14}, "16"),
        ({"budget": 1.37, "full": 0.2}, "8"),  # 0.8 * 1.2 + 0.2 * 2
        ({"budget": 1.35, "full": 0.2}, "8"),  # (1.35 - 0.2 * 2) / 0.8 = 1.1875 is near to 1.2, and 1.04 is measured
        ({"budget": 1.3, "full": 0.2}, "16"),
    ],
)
def test_the_first_step_measures_and_chooses(measured, options, cut):
    model, batch = CASES["vgg"].model(), CASES["vgg"].batch()
    opt = budget(model, **options)
    assert opt.mask.cut is None
    for _ in range(3):
        opt.step(closure_of(model, opt.zero_grad, batch))
        assert opt.mask.cut == cut
    assert measured == [model]


def test_a_chosen_cut_is_as_good_as_a_named_one(measured):
    model, batch = CASES["vgg"].model(), CASES["vgg"].batch()
    plain, opt = Plain(copy.deepcopy(model), CASES["vgg"].cuts["8"]), budget(model, budget=1.3)
    for step in range(3):
        torch.manual_seed(step)
        expected = snapshot(plain.model, plain.step(closure_of(plain.model, plain.zero_grad, batch)))
        torch.manual_seed(step)
        assert differences(snapshot(model, opt.step(closure_of(model, opt.zero_grad, batch))), expected) == []


def test_measuring_with_a_clock_changes_nothing_but_the_number_of_calls():
    model, batch = CASES["vgg"].model(), CASES["vgg"].batch()
    plain, opt = Plain(copy.deepcopy(model), ("no parameter",)), budget(model, budget=1e6)  # the earliest cut fits
    calls = Counter()
    for step in range(3):
        torch.manual_seed(step)
        expected = snapshot(plain.model, plain.step(closure_of(plain.model, plain.zero_grad, batch)))

        def closure(step=step):
            calls[step] += 1
            return closure_of(model, opt.zero_grad, batch)()

        torch.manual_seed(step)
        assert differences(snapshot(model, opt.step(closure)), expected) == []
    assert opt.mask.cut == "0"
    assert calls[0] > 2
    assert calls[1] == calls[2] == 2


def test_a_budget_that_nothing_fits_changes_nothing(measured):
    model, batch = CASES["vgg"].model(), CASES["vgg"].batch()
    opt, before = budget(model, budget=1.01), snapshot(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"budget must be at least 1\.04, .* '16', but is 1\.01"):
            opt.step(closure_of(model, opt.zero_grad, batch))
    assert [key for key in differences(snapshot(model), before) if "gradient" not in key] == []


def test_a_resumed_run_keeps_the_cut_and_does_not_measure_again(measured, monkeypatch):
    case = CASES["vgg"]
    model, batch = case.model(), case.batch()
    opt = budget(model, budget=1.3)
    for _ in range(2):
        opt.step(closure_of(model, opt.zero_grad, batch))
    file = io.BytesIO()
    torch.save((model.state_dict(), opt.state_dict()), file)
    file.seek(0)
    saved_model, saved = torch.load(file, weights_only=True)

    def not_again(*args, **options):
        raise AssertionError("measured again")

    monkeypatch.setattr(sparsam.replay.costs, "find_cuts", not_again)
    resumed = case.model(seed=9)
    resumed.load_state_dict(saved_model)
    second = budget(resumed, budget=1.3)
    second.load_state_dict(saved)
    assert second.mask.cut == "8"
    calls = []

    def closure():
        calls.append(1)
        return closure_of(resumed, second.zero_grad, batch)()

    for step in range(3):
        torch.manual_seed(step)
        expected = snapshot(model, opt.step(closure_of(model, opt.zero_grad, batch)))
        torch.manual_seed(step)
        assert differences(snapshot(resumed, second.step(closure)), expected) == []
    assert len(calls) == 6


# ----------------------------------------------------------------------------------------------------- refused

ABOVE_ONE = "budget must be a number above 1, what the base step alone costs, but is "

REFUSED = {
    "a budget of one": ({"budget": 1}, ABOVE_ONE + "1$"),
    "a budget below one": ({"budget": 0.5}, ABOVE_ONE + "0.5$"),
    "no number": ({"budget": "1.2"}, ABOVE_ONE + "'1.2'$"),
    "not a number": ({"budget": math.nan}, ABOVE_ONE + "nan$"),
    "no bound": ({"budget": math.inf}, ABOVE_ONE + "inf$"),
    "true": ({"budget": True}, ABOVE_ONE + "True$"),
    "a misspelt cut": (
        {"cut": "block.1"},
        "cut must be the name of a module, such as .*'blocks.1'.*, but is 'block.1'; find_cuts",
    ),
    "another cut": ({"cut": "conv"}, "cut must be the name of a module, such as 'stem', .*, but is 'conv'; find_cuts"),
    "a cut by its number": ({"cut": 1}, "cut must be the name of a module, such as .*, but is 1; find_cuts"),
    "full steps of more than all": ({"full": 1.5}, r"full must be a number in \[0, 1\], but is 1.5$"),
    "full steps of less than none": ({"full": -0.1}, r"full must be a number in \[0, 1\], but is -0.1$"),
    "full steps, not a number": ({"full": math.nan}, r"full must be a number in \[0, 1\], but is nan$"),
    "more full steps than fit": (
        {"full": 0.5},
        r"budget must be above 1 \+ full, for full steps cost 2 base steps, but is 1.25 with full=0.5$",
    ),
    "a negative radius": ({"full_rho": -1.0}, "full_rho must be a finite number >= 0, but is -1.0$"),
    "a norm": ({"norm": "hole"}, "norm must be one of 'perturbed', 'whole', but is 'hole'$"),
    "a mask within by name": ({"within": "fisher"}, "within must be a mask of another kind, but is a str$"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_by_name(name):
    options, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        BudgetMask(Chain(), **options)


def test_a_budget_within_a_budget_is_refused():
    model = Chain()
    with pytest.raises(TypeError, match=r"^within must be a mask of another kind, but is a BudgetMask"):
        BudgetMask(model, within=BudgetMask(model))


@pytest.mark.parametrize("model", [None, [nn.Linear(2, 2)], nn.Linear])
def test_a_model_that_is_none_is_refused(model):
    with pytest.raises(TypeError, match=r"^model must be a module, but is "):
        BudgetMask(model)


@pytest.mark.parametrize("options", [{"budget": 1.5}, {"cut": "blocks.1", "full": 1.0}, {"within": RandomMask(0.5)}])
def test_good_arguments_are_taken(options):
    assert BudgetMask(Chain(), **options).settings()["kind"] == "BudgetMask"
