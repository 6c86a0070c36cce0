"""Every refusal: which argument, what was given, what is allowed; and nothing has changed."""

from __future__ import annotations

import copy
import math
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from cases import magnitude, optimizer, same, task, weights
from sparsam import (
    SAM,
    CosineRho,
    DynamicMask,
    EveryNth,
    FisherMask,
    FriendlyAscent,
    InverseSqrtRho,
    Mask,
    NMMask,
    NormMask,
    ProportionalRho,
    RampRho,
    RandomMask,
    SuffixMask,
    TopKMask,
    diagonal_fisher,
)

SGD = torch.optim.SGD


def w():
    return nn.Parameter(torch.ones(3))


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


def doubled_in_one_group():
    p = w()
    return SAM([p, p], SGD, lr=0.1)


def doubled_over_groups():
    p = w()
    return SAM([{"params": [p]}, {"params": [p]}], SGD, lr=0.1)


def wrapped(cls, **arguments):
    return SAM.wrap(cls([w()], **arguments))


DATA = TensorDataset(torch.randn(5, 3), torch.zeros(5, dtype=torch.long))
LINEAR = nn.Linear(3, 2)
DYNAMIC = {"interval": 1, "total_steps": 5}

CONSTRUCTION = [
    # rho
    (lambda: SAM([w()], SGD, rho=-0.1, lr=0.1), ValueError, "rho must be a finite number >= 0, but is -0.1"),
    (lambda: SAM([w()], SGD, rho=math.nan, lr=0.1), ValueError, "rho must be a finite number >= 0, but is nan"),
    (lambda: SAM([w()], SGD, rho=math.inf, lr=0.1), ValueError, "rho must be a finite number >= 0, but is inf"),
    (lambda: SAM([w()], SGD, rho="big", lr=0.1), ValueError, "rho must be a finite number >= 0, but is 'big'"),
    (lambda: SAM([{"params": [w()], "rho": -1}], SGD, lr=0.1), ValueError, "rho of parameter group 0 must be a finite"),
    (lambda: SAM.wrap(SGD([w()], lr=0.1), rho=-2), ValueError, "rho must be a finite number >= 0, but is -2"),
    # adaptive
    (lambda: SAM([w()], SGD, adaptive="no", lr=0.1), TypeError, "adaptive must be True or False, but is 'no'"),
    (lambda: SAM([w()], SGD, adaptive=None, lr=0.1), TypeError, "adaptive must be True or False, but is None"),
    # misspelled arguments
    (
        lambda: SAM([w()], SGD, rh=0.1, lr=0.1),
        TypeError,
        "'rh' is an argument neither of SAM nor of SGD: did you mean rho? SAM has base_optimizer, rho, mask, ascent, "
        "schedule, adaptive, model, perturbation, process_group, share; all others go to SGD",
    ),
    (
        lambda: SAM([w()], torch.optim.AdamW, lr=0.1, weight_deccay=0.1),
        TypeError,
        "'weight_deccay' is an argument neither of SAM nor of AdamW: did you mean weight_decay? SAM has",
    ),
    (
        lambda: SAM([w()], SGD, lr=0.1, colour=1),
        TypeError,
        "'colour' is an argument neither of SAM nor of SGD: SAM has",
    ),
    # sparsity and the other settings of masks
    (lambda: RandomMask(1.1), ValueError, "sparsity must be a number in [0, 1], but is 1.1"),
    (lambda: RandomMask(-0.1), ValueError, "sparsity must be a number in [0, 1], but is -0.1"),
    (lambda: RandomMask(math.nan), ValueError, "sparsity must be a number in [0, 1], but is nan"),
    (lambda: TopKMask(2, magnitude), ValueError, "sparsity must be a number in [0, 1], but is 2"),
    (lambda: DynamicMask(2, **DYNAMIC), ValueError, "sparsity must be a number in [0, 1], but is 2"),
    (
        lambda: FisherMask(50, LINEAR, F.cross_entropy, DATA),  # which also has fewer items than samples
        ValueError,
        "sparsity must be a number in [0, 1], but is 50",
    ),
    (
        lambda: FisherMask(0.5, LINEAR, F.cross_entropy, DATA, interval=2.5),
        ValueError,
        "interval must be a whole number of steps >= 1, or None for a mask made once, but is 2.5",
    ),
    (
        lambda: RandomMask(0.5, interval=0),
        ValueError,
        "interval must be a whole number of steps >= 1, or None for a mask made once, but is 0",
    ),
    (lambda: RandomMask(0.5, interval=1.5), ValueError, "interval must be a whole number of steps >= 1"),
    (lambda: RandomMask(0.5, seed=-1), ValueError, "seed must be a whole number >= 0, but is -1"),
    (lambda: TopKMask(0.5, [torch.ones(3)]), TypeError, "scores must be a function of a list of parameters"),
    (
        lambda: DynamicMask(0.5, interval=1, total_steps=0),
        ValueError,
        "total_steps must be a whole number >= 1, but is 0",
    ),
    (lambda: DynamicMask(0.5, drop=1.5, **DYNAMIC), ValueError, "drop must be a number in [0, 1], but is 1.5"),
    (
        lambda: DynamicMask(0.5, criterion="best", **DYNAMIC),
        ValueError,
        "criterion must be one of 'flattest', 'sharpest', 'random', but is 'best'",
    ),
    (
        lambda: FisherMask(0.5, LINEAR, F.cross_entropy, DATA),
        ValueError,
        "samples must be at most the size of the dataset, 5, but is 128",
    ),
    (
        lambda: FisherMask(0.5, LINEAR, F.cross_entropy, DATA, samples=0),
        ValueError,
        "samples must be a whole number >= 1, but is 0",
    ),
    (
        lambda: FisherMask(0.5, LINEAR, F.cross_entropy, DATA, samples=2, method="fast"),
        ValueError,
        "method must be one of 'exact', 'signs', but is 'fast'",
    ),
    (
        lambda: FisherMask(0.5, LINEAR, F.cross_entropy, Stream()),
        TypeError,
        "dataset must be map-style, with __len__ and __getitem__, but Stream has no",
    ),
    (
        lambda: FisherMask(0.5, LINEAR, nn.CrossEntropyLoss, DATA, samples=2),
        TypeError,
        "loss_fn must be a function of outputs and targets, but is the class CrossEntropyLoss; pass CrossEntropyLoss()",
    ),
    (
        lambda: FisherMask(0.5, LINEAR, "nll", DATA, samples=2),
        TypeError,
        "loss_fn must be a function of outputs and targets, but is a str",
    ),
    (lambda: NormMask(LINEAR), ValueError, "model has no normalisation layer with parameters"),
    (lambda: NMMask(3, 2, magnitude), ValueError, "n must be at most m, but n is 3 and m is 2"),
    (lambda: NMMask(0, 4, magnitude), ValueError, "n must be a whole number >= 1, but is 0"),
    (lambda: SAM([w()], SGD, mask=0.5, lr=0.1), TypeError, "mask must be a sparsam mask or None, but is 0.5"),
    # parameters
    (lambda: SAM([], SGD, lr=0.1), ValueError, "empty parameter list"),
    (lambda: SAM([{"params": []}], SGD, lr=0.1), ValueError, "params must hold at least one parameter, but is empty"),
    (doubled_in_one_group, ValueError, "parameters 0 and 1 are the same tensor of shape (3,)"),
    (doubled_over_groups, ValueError, "more than one parameter group"),
    (
        lambda: SAM([nn.Parameter(torch.ones(2, dtype=torch.cfloat))], SGD, lr=0.1),
        ValueError,
        "parameter 0 is torch.complex64",
    ),
    # base optimizers
    (
        lambda: SAM([w()], torch.optim.LBFGS),
        TypeError,
        "base_optimizer must step without a closure, but LBFGS needs one",
    ),
    (lambda: wrapped(torch.optim.LBFGS), TypeError, "base_optimizer must step without a closure, but LBFGS needs one"),
    (
        lambda: SAM([w()], torch.optim.Adadelta),
        ValueError,
        "must not have a group option named 'rho', which is SAM's radius, but Adadelta",
    ),
    (lambda: wrapped(torch.optim.Adadelta), ValueError, "but Adadelta has one"),
    (
        lambda: SAM([w()], torch.optim.SparseAdam),
        TypeError,
        "base_optimizer must take dense gradients, but SparseAdam takes sparse ones only; use Adam, and build "
        "embeddings with sparse=False",
    ),
    (lambda: wrapped(torch.optim.SparseAdam), TypeError, "but SparseAdam takes sparse ones only"),
    (
        lambda: SAM([w()], SGD, lr=0.1, maximize=True),
        ValueError,
        "maximize must be False, but is True in parameter group 0",
    ),
    (lambda: SAM([w()], SGD([w()], lr=0.1)), TypeError, "SAM.wrap(base_optimizer) takes an instance"),
    (lambda: SAM([w()], "sgd"), TypeError, "base_optimizer must be a class such as torch.optim.SGD, but is 'sgd'"),
    (
        lambda: SAM(LINEAR, SGD),
        TypeError,
        "params must be parameters or parameter groups, but is a module; pass model.parameters()",
    ),
    (lambda: SAM.wrap(SAM([w()], SGD, lr=0.1)), TypeError, "SAM is a SAM itself"),
    (
        lambda: SAM([w()], lambda params: "no optimizer"),
        TypeError,
        "base_optimizer must make a torch.optim.Optimizer, but made str",
    ),
    # schedules
    (
        lambda: InverseSqrtRho(SGD([w()], lr=0.1)),
        ValueError,
        "optimizer must be a SAM, but its parameter group 0 has no 'rho'",
    ),
    (lambda: CosineRho(SAM([w()], SGD, lr=0.1), total_steps=0), ValueError, "total_steps must be a whole number >= 1"),
    (
        lambda: CosineRho(SAM([w()], SGD, lr=0.1), 5, final=-1),
        ValueError,
        "final must be a finite number >= 0, but is -1",
    ),
    (
        lambda: RampRho(SGD([w()], lr=0.1), steps=5),
        ValueError,
        "optimizer must be a SAM, but its parameter group 0 has no 'rho'",
    ),
    (lambda: RampRho(SAM([w()], SGD, lr=0.1), steps=0), ValueError, "steps must be a whole number >= 1, but is 0"),
    (lambda: RampRho(SAM([w()], SGD, lr=0.1), 2.5), ValueError, "steps must be a whole number >= 1, but is 2.5"),
    (lambda: RampRho(SAM([w()], SGD, lr=0.1), 5, -1), ValueError, "start must be a whole number >= 0, but is -1"),
    (lambda: RampRho(SAM([w()], SGD, lr=0.1), 5, None), ValueError, "start must be a whole number >= 0, but is None"),
    (lambda: RampRho(SAM([w()], SGD, lr=0.1), 5).go_to(0), ValueError, "t must be a whole number >= 1, but is 0"),
    # Fisher
    (
        lambda: diagonal_fisher(LINEAR, F.cross_entropy, torch.ones(4, 3), torch.zeros(3).long()),
        ValueError,
        "same, positive number of samples, but have 3, 4",
    ),
    (
        lambda: diagonal_fisher(LINEAR, F.cross_entropy, torch.ones(0, 3), torch.zeros(0).long()),
        ValueError,
        "same, positive number of samples, but have 0",
    ),
    (
        lambda: diagonal_fisher(LINEAR, nn.NLLLoss, torch.ones(4, 3), torch.zeros(4).long()),
        TypeError,
        "loss_fn must be a function of outputs and targets, but is the class NLLLoss; pass NLLLoss()",
    ),
    (
        lambda: diagonal_fisher(LINEAR, F.cross_entropy, torch.ones(4, 3), torch.zeros(4).long(), method="x"),
        ValueError,
        "method must be one of 'exact', 'signs'",
    ),
    (
        lambda: diagonal_fisher(LINEAR, F.cross_entropy, torch.ones(4, 3), torch.zeros(4).long(), chunk_size=0),
        ValueError,
        "chunk_size must be a whole number >= 1, or None, but is 0",
    ),
    (
        lambda: diagonal_fisher(nn.ReLU(), F.cross_entropy, torch.ones(4, 3), torch.zeros(4).long()),
        ValueError,
        "model has no parameter that requires a gradient",
    ),
    (
        lambda: diagonal_fisher(
            nn.Sequential(LINEAR, nn.Flatten(0)), F.mse_loss, torch.ones(4, 3), torch.ones(4, 2), method="signs"
        ),
        ValueError,
        "one output row for each sample, but 4 samples gave an output of shape (8,)",
    ),
]


@pytest.mark.parametrize(("build", "kind", "message"), CONSTRUCTION, ids=[c[2][:60] for c in CONSTRUCTION])
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_construction(build, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        build()


def test_a_base_optimizer_may_take_any_name():
    given = {}

    def base(params, **arguments):
        given.update(arguments)
        return SGD(params, lr=0.1)

    SAM([w()], base, rh=0.3)
    assert given == {"rh": 0.3}


def test_a_refused_base_optimizer_is_left_as_it_was():
    base = SGD([w()], lr=0.1)
    with pytest.raises(ValueError, match="rho"):
        SAM.wrap(base, rho=-1)
    assert "rho" not in base.param_groups[0]


def backward(t, opt):
    opt.zero_grad()
    t.loss().backward()


PROTOCOL = [
    (lambda t, opt: opt.step(), "step() without closure ends a step that first_step() or perturbed() began, but the optimizer is between two steps"),
    (lambda t, opt: opt.second_step(), "second_step() needs first_step() before it, but the optimizer is between two steps"),
    (lambda t, opt: opt.first_step(), "no parameter has a gradient: call backward() first"),
    (lambda t, opt: opt.masks(), "there is no mask before the first step"),
    (lambda t, opt: opt.step(lambda: opt.first_step()), "first_step() or perturbed() cannot be called while the optimizer is inside the closure's first pass"),
    (lambda t, opt: opt.step(lambda: opt.state_dict()), "state_dict() cannot be called while the optimizer is inside the closure's first pass"),
    (lambda t, opt: opt.step(lambda: opt.step()), "but the optimizer is inside the closure's first pass"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), PROTOCOL, ids=[c[1][:40] for c in PROTOCOL])
def test_protocol(call, message):
    t = task()
    opt = optimizer(t)
    before = weights(t.model)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        call(t, opt)
    assert same(weights(t.model), before)
    opt.step(t.closure(opt))


WHILE_PERTURBED = {
    "first_step() or perturbed()": lambda t, opt: opt.first_step(),
    "first_step() or perturbed() ": lambda t, opt: opt.perturbed().__enter__(),
    "step(closure)": lambda t, opt: opt.step(t.closure(opt)),
    "state_dict()": lambda t, opt: opt.state_dict(),
    "load_state_dict()": lambda t, opt: opt.load_state_dict({}),
    "add_param_group": lambda t, opt: opt.add_param_group({"params": [w()]}),
    "copying or pickling": lambda t, opt: copy.copy(opt),
}


@pytest.mark.parametrize("what", WHILE_PERTURBED)
def test_what_cannot_be_done_at_the_perturbed_weights(what):
    t = task()
    opt = optimizer(t)
    backward(t, opt)
    before = weights(t.model)
    with opt.perturbed():
        perturbed = weights(t.model)
        with pytest.raises(
            RuntimeError,
            match=re.escape(f"{what.strip()} cannot be called while the optimizer is at the perturbed weights; end"),
        ):
            WHILE_PERTURBED[what](t, opt)
        assert same(weights(t.model), perturbed)
    assert same(weights(t.model), before)


def test_sparse_gradients():
    embedding = nn.Embedding(4, 2, sparse=True)
    opt = SAM(embedding.parameters(), SGD, lr=0.1)
    before = weights(embedding)
    with pytest.raises(RuntimeError, match="gradients must be dense, but that of parameter 0 has the layout"):
        opt.step(lambda: embedding(torch.tensor([1])).sum().backward())
    assert same(weights(embedding), before)


def test_rho_that_a_schedule_has_spoiled():
    t = task()
    opt = optimizer(t)
    opt.param_groups[0]["rho"] = math.nan
    before = [p.detach().clone() for p in t.model.parameters()]
    with pytest.raises(ValueError, match="rho of parameter group 0 must be a finite number >= 0, but is nan"):
        opt.step(t.closure(opt))
    assert same([p.detach() for p in t.model.parameters()], before)


def test_a_group_that_is_refused_is_not_added():
    t = task()
    opt = optimizer(t)
    p = w()
    for group, message in [
        ({"params": [w()], "rho": -1}, "rho of parameter group 1"),
        ({"params": [p, p]}, "are the same tensor"),
        ({"params": [next(t.model.parameters())]}, "more than one parameter group"),
        ({"params": [w()], "maximize": True}, "maximize must be False, but is True in parameter group 1"),
    ]:
        with pytest.raises(ValueError, match=message), pytest.warns() if "same" in message else nullcontext():
            opt.add_param_group(group)
        assert len(opt.param_groups) == 1


SCORES = [
    (lambda params: [p.abs() for p in params][:-1], "one tensor for each of the 10 parameters that require a gradient, but returned 9"),
    (lambda params: [p.abs().flatten() for p in params], "scores[0] must have the shape (4, 1, 3, 3) of its parameter, but has (36,)"),
    (lambda params: [1.0] * len(params), "scores[0] must have the shape (4, 1, 3, 3) of its parameter, but has float"),
    (lambda params: [p.abs() if p.dim() < 2 else p * math.nan for p in params], "scores[0] holds NaN"),
    (lambda params: {p: p.abs() for p in params[1:]}, "scores has no entry for parameter 0 of shape (4, 1, 3, 3)"),
]  # fmt: skip


@pytest.mark.parametrize(("scores", "message"), SCORES, ids=[c[1][:40] for c in SCORES])
@pytest.mark.parametrize("make", [lambda s: TopKMask(0.5, s), lambda s: NMMask(2, 4, s)], ids=["TopK", "NM"])
def test_scores(scores, message, make):
    t = task()
    opt = SAM(t.model.parameters(), SGD, mask=make(scores), lr=0.1)
    before = [p.detach().clone() for p in t.model.parameters()]
    with pytest.raises(ValueError, match=re.escape(message)):
        opt.step(t.closure(opt))
    assert same([p.detach() for p in t.model.parameters()], before)


def test_fisher_mask_and_parameters_that_are_not_the_models():
    t = task()
    extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    mask = FisherMask(0.5, t.model, F.cross_entropy, t.dataset, samples=4)
    opt = SAM([*t.model.parameters(), extra], SGD, mask=mask, lr=0.1)
    with pytest.raises(ValueError, match=re.escape("scores has no entry for parameter 10 of shape (3,)")):
        opt.step(t.closure(opt))


@pytest.mark.parametrize("mask", [NormMask, partial(SuffixMask, cut="2")])
def test_the_mask_of_a_copied_model(mask):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with pytest.raises(
        ValueError,
        match=r"^mask must be of the model that is trained, but none of its model's parameters is in params; was the "
        r"model copied, or built anew\? Build the mask of the model whose parameters the optimizer has$",
    ):
        SAM(model.parameters(), SGD, mask=mask(copy.deepcopy(model)), lr=0.1)


def test_a_copied_model():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for other in (copy.deepcopy(model), averaged):
        with pytest.raises(
            ValueError,
            match=r"^model must be the one that is trained, but none of its parameters is in params; was it copied, or "
            r"built anew\? Give the model whose parameters the optimizer has$",
        ):
            SAM(model.parameters(), SGD, model=other, lr=0.1)
    SAM(model[2].parameters(), SGD, model=nn.DataParallel(model), lr=0.1)  # some of them are enough


def test_a_loss_in_place_of_a_closure():
    t = task()
    opt = optimizer(t)
    loss = t.loss()
    loss.backward()
    message = "^closure must be a function that computes the loss and its gradient, but is a Tensor$"
    with pytest.raises(TypeError, match=message):
        opt.step(loss)
    opt.step(t.closure(opt))  # it can go on


def test_params_that_are_an_optimizer():
    with pytest.raises(TypeError, match=r"but is an optimizer; SAM\.wrap\(optimizer\) is built around it$"):
        SAM(SGD([w()], lr=0.1), SGD, lr=0.1)


def test_norm_mask_of_layers_that_the_optimizer_does_not_have():
    t = task()
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(3))
    network[0].weight = next(p for p in t.model.parameters() if p.dim() == 2)
    opt = SAM(t.model.parameters(), SGD, mask=NormMask(network), lr=0.1)
    with pytest.raises(
        ValueError,
        match=r"^NormMask finds no trainable normalisation layer of its model among the optimizer's parameters",
    ):
        opt.step(t.closure(opt))


def test_a_ramp_to_rho_zero():
    with pytest.raises(ValueError, match="rho of some group must be > 0 when RampRho is built, but is 0 in all"):
        RampRho(SAM([w()], SGD, rho=0.0, lr=0.1), steps=10)
    RampRho(SAM([{"params": [w()], "rho": 0.0}, {"params": [w()]}], SGD, rho=0.1, lr=0.1), steps=10)
    resumed = RampRho(SAM([w()], SGD, rho=0.0, lr=0.1), steps=10, start=5)  # whose own state may still be loaded
    with pytest.raises(
        ValueError, match="build RampRho before the optimizer's state is loaded, or load RampRho's state"
    ):
        resumed.go_to(6)


def test_proportional_rho_at_lr_zero():
    with pytest.raises(ValueError, match="lr of each group must be > 0 when ProportionalRho is built"):
        ProportionalRho(SAM([w()], SGD, lr=0.0))


def test_fisher_mask_and_a_dataset_without_targets():
    t = task()
    mask = FisherMask(0.5, t.model, F.cross_entropy, TensorDataset(t.x), samples=4)
    opt = SAM(t.model.parameters(), SGD, mask=mask, lr=0.1)
    with pytest.raises(ValueError, match=re.escape("dataset must hold (input, target) pairs")):
        opt.step(t.closure(opt))


def test_fisher_mask_and_items_of_different_lengths():
    t = task()
    dataset = [(torch.ones(3 + i), 0) for i in range(4)]
    opt = SAM(t.model.parameters(), SGD, mask=FisherMask(0.5, t.model, F.cross_entropy, dataset, samples=4), lr=0.1)
    with pytest.raises(
        ValueError,
        match=r"^dataset must hold tensors or numbers that are alike in every item, so that they can be stacked, but "
        r"default_collate of 4 items raised RuntimeError: stack expects each tensor .*; pad tensors to one shape$",
    ):
        opt.step(t.closure(opt))


class Broken(Mask):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def select(self, params, step, previous):
        return self.answer(params)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda params: [True], "a mask must say something of each of 10 tensors, but has 1"),
        (
            lambda params: [torch.ones_like(p) for p in params],
            "a bool tensor of shape (4, 1, 3, 3), but is torch.float64",
        ),
        (lambda params: [torch.ones(1, dtype=torch.bool)] * 10, "but is torch.bool of shape (1,) for parameter 0"),
    ],
)
def test_masks_of_your_own(answer, message):
    t = task()
    opt = SAM(t.model.parameters(), SGD, mask=Broken(answer), lr=0.1)
    with pytest.raises(ValueError, match=re.escape(message)):
        opt.step(t.closure(opt))


def two_layers():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def stepped(model, **options):
    opt = SAM(model.parameters(), SGD, lr=0.1, momentum=0.9, **options)
    opt.step(lambda: (opt.zero_grad(), model(torch.ones(2, 3)).square().sum().backward()))
    return opt


def sam_around_adam(model):
    return SAM(model.parameters(), torch.optim.Adam, mask=RandomMask(0.5, interval=2))


OTHER_STATES = [
    (lambda: SGD(two_layers().parameters(), lr=0.1), "has no entry 'sparsam'"),
    (lambda: stepped(nn.Sequential(nn.Linear(3, 4))), "another model: it has 2 parameters, this optimizer 4"),
    (lambda: stepped(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))), "another model: parameter 2 has shape (5, 4) there and (2, 4) here"),
    (lambda: sam_around_adam(two_layers()), "base was 'Adam' and is 'SGD'"),
    (lambda: stepped(two_layers()), "mask.type was 'DenseMask' and is 'RandomMask'"),
    (lambda: stepped(two_layers(), mask=RandomMask(0.8, interval=2)), "mask.sparsity was 0.8 and is 0.5"),
    (lambda: stepped(two_layers(), mask=RandomMask(0.5, interval=3)), "mask.interval was 3 and is 2"),
    (lambda: stepped(two_layers(), mask=RandomMask(0.5, interval=2), adaptive=True), "adaptive was True and is False"),
    (lambda: stepped(two_layers(), mask=RandomMask(0.5, interval=2), ascent=FriendlyAscent()), "ascent.type was 'FriendlyAscent' and is 'GradientAscent'"),
    (lambda: stepped(two_layers(), mask=RandomMask(0.5, interval=2), schedule=EveryNth(2)), "schedule.n was 2 and is None"),
]  # fmt: skip


@pytest.mark.parametrize(("other", "message"), OTHER_STATES, ids=[c[1][:40] for c in OTHER_STATES])
def test_the_state_of_something_else(other, message):
    opt = stepped(two_layers(), mask=RandomMask(0.5, interval=2))
    before, masks = copy.deepcopy(opt.state_dict()), opt.masks()
    with pytest.raises(ValueError, match=re.escape(message)):
        opt.load_state_dict(other().state_dict())
    after = opt.state_dict()
    assert same(opt.masks(), masks)
    assert same(
        [s["momentum_buffer"] for s in after["state"].values()],
        [s["momentum_buffer"] for s in before["state"].values()],
    )
    assert repr(after["sparsam"]) == repr(before["sparsam"])


def test_other_settings_of_a_dynamic_mask():
    t = task()
    saved = SAM(t.model.parameters(), SGD, mask=DynamicMask(0.5, interval=2, total_steps=9), lr=0.1)
    opt = SAM(t.model.parameters(), SGD, mask=DynamicMask(0.5, interval=2, total_steps=9, drop=0.25), lr=0.1)
    with pytest.raises(
        ValueError, match=re.escape("mask.drop was 0.5 and is 0.25. Build the optimizer and its policies")
    ):
        opt.load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    ("name", "value"), [("mask", RandomMask(0.9)), ("ascent", None), ("schedule", EveryNth(2)), ("adaptive", True)]
)
def test_policies_cannot_be_assigned(name, value):
    """A step would not see it, and a saved state would be one of other policies."""
    opt = SAM([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(AttributeError, match=f"property '{name}' of 'SAM' object has no setter"):
        setattr(opt, name, value)
