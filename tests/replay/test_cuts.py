"""Where a model can be cut."""

from __future__ import annotations

import copy

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

from sparsam import SAM, Cut, SuffixMask, find_cuts

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
@pytest.mark.filterwarnings("ignore:the second pass .* is changed in place after it, by code between the modules")
def test_every_cut_that_is_found_can_be_replayed(name):
    model, batch = NETWORKS[name].model(), NETWORKS[name].batch()
    before: tuple[str, ...] = ()
    for cut, passed in FOUND[name].items():
        before += passed
        twins = copy.deepcopy(model), copy.deepcopy(model)
        plain = Plain(twins[0], before or ("no parameter",))
        opt = SAM(twins[1].parameters(), torch.optim.SGD, rho=RHO, mask=SuffixMask(twins[1], cut), **BASE)
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


@pytest.mark.parametrize("passes", ["a", 1.5, -1])
def test_passes_that_cannot_be_counted(passes):
    with pytest.raises(ValueError, match=f"passes must be a whole number >= 0, but is {passes!r}"):
        find("chain", passes=passes)


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


def test_a_model_without_weights_has_no_cut():
    assert find_cuts(torch.nn.Sequential(torch.nn.ReLU()), lambda: None) == []


def test_what_runs_a_pass_must_be_a_function():
    with pytest.raises(TypeError, match=r"run must be a function that computes the loss .*, but is a Tensor"):
        find_cuts(torch.nn.Linear(2, 2), torch.ones(1, 2))
