"""Fused kernels: the same losses in float64, with the weights that the model has now; and what is left as it is."""

from __future__ import annotations

import pytest
import torch
from norm_networks import Block, Branches, Odd, Remembers, as_trained, hooked, networks
from torch import nn
from torch.fx.proxy import TraceError
from torch.nn import functional as F

from cases import same, weights
from sparsam.analysis.fusion import Fused, FusedForward, checked, fastest, fused
from sparsam.analysis.objective import Objective


def objective_of(model):
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    return Objective(model, F.cross_entropy, (x.to(next(model.parameters())), torch.randint(0, 3, (3,))), batch_size=2)


# How many convolutions lie right before a BatchNorm that only they feed, counted by hand.
COUNTS = {"resnet-small": 9, "resnet50": 53, "vgg11-bn": 8, "wrn-10-2": 4, "odd": 3, "twice": 1}


LARGE = ("resnet50", "vgg11-bn")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in COUNTS])
def test_fused_losses_are_the_losses_wherever_the_weights_go(name):
    model = networks(name)
    objective = objective_of(model)
    fast = FusedForward(model, torch.float64)
    assert len(fast.fused) == COUNTS[name]
    before = weights(model)
    for _ in range(3):
        fast.refresh()
        torch.testing.assert_close(objective.loss(fast), objective.loss(), rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
    assert not same(weights(model), before)
    assert model.training


def add_relu(whole_only):
    def convolution_add_relu(x, weight, z, alpha, bias, *how):
        h = F.conv2d(x, weight, bias, *how)
        assert z.shape == h.shape
        whole_only.append(tuple(z.shape))
        return F.relu(h + alpha * z)

    return convolution_add_relu


HOW = [{}, {"stride": 2}, {"padding": (2, 0)}, {"stride": (1, 3), "dilation": (2, 1), "padding": 1}]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("broadcast", [(), (1,), (2, 3), (0, 2, 3)], ids=str)
def test_only_whole_shortcuts_are_handed_to_cudnn(monkeypatch, how, broadcast):
    """Which is not here: a reference takes its place."""
    part = Fused(nn.Conv2d(8, 5, 3, **how), nn.BatchNorm2d(5), relu=True, dtype=torch.float32).eval()
    part.refresh()
    part.cudnn, seen = True, []
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", add_relu(seen))
    x = torch.randn(4, 8, 9, 11)
    expected = part.parts[1].eval()(part.parts[0](x))
    shape = [1 if i in broadcast else n for i, n in enumerate(expected.shape)]
    shortcut = torch.randn(shape)
    torch.testing.assert_close(part(x, shortcut), F.relu(expected + shortcut), rtol=1e-4, atol=1e-5)
    assert seen == ([] if broadcast else [tuple(expected.shape)])


def test_it_has_no_weights_of_its_own():
    model = networks("resnet-small").to(memory_format=torch.channels_last)
    before = weights(model)
    module = fused(model.eval(), torch.float64)
    FusedForward(model, torch.float64).refresh()
    assert same(weights(model), before)
    assert {id(p) for p in module.parameters()} <= {id(p) for p in model.parameters()}
    assert any(isinstance(part, Fused) for part in module.modules())
    assert not any(isinstance(part, Fused) for part in model.modules())


@pytest.mark.parametrize("name", COUNTS)
def test_inputs_are_prepared_once_where_the_first_convolution_alone_reads_them(name):
    fast = FusedForward(networks(name), torch.float64)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    ready = fast.prepare(x)
    if name == "twice":  # whose first convolution is not fused
        assert ready is x
        return
    assert ready.shape == (2, 32, 32, 32)
    assert torch.equal(ready[:, :27].flatten(2), F.unfold(x, 3, padding=1))  # all that an output sees
    assert not ready[:, 27:].any()
    assert torch.equal(fast(ready), fast(x))
    assert fast.prepare(ready) is ready


FEW_INPUTS = [  # of a convolution, its kernel, how, and how many channels it gets
    (3, (3, 3), {"padding": 1}, 32),
    (3, (3, 3), {"stride": (2, 1), "padding": (0, 2)}, 32),
    (1, (5, 5), {"bias": False}, 32),
    (2, (4, 4), {"stride": 3}, 32),
    (5, (1, 1), {"stride": 2}, 32),
    (3, (2, 5), {"padding": 1}, 32),
    (3, (3, 3), {"dilation": 2}, 32),  # the rest is padded
    (3, (7, 7), {"stride": 2, "padding": 3}, 32),
    (12, (3, 3), {}, 32),
    (20, (1, 1), {"stride": 2}, 32),
    (31, (1, 1), {"padding": 2}, 32),
    (33, (1, 1), {"stride": (2, 3)}, 40),
]


@pytest.mark.parametrize("size", [(9, 11), (8, 8), (7, 12)], ids=str)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("inputs", "kernel", "how", "channels"), FEW_INPUTS, ids=str)
def test_few_inputs_are_widened(inputs, kernel, how, channels, relu, size):
    model = as_trained(nn.Sequential(nn.Conv2d(inputs, 6, kernel, **how), nn.BatchNorm2d(6))).eval()
    part = Fused(*model, relu=relu, dtype=torch.float64)
    part.refresh()
    x = torch.randn(3, inputs, *size, dtype=torch.float64)
    assert part.prepare(x).shape[1] == channels
    expected = F.relu(model(x)) if relu else model(x)
    torch.testing.assert_close(part(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(part(part.prepare(x)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stride", [1, 2, (2, 3)])
@pytest.mark.parametrize("shape", [(3, 1, 1), (3, 1, 5), (3, 5, 1), (0, 4, 4), (2, 7, 8)], ids=str)
def test_pointwise_convolutions_of_any_map(stride, shape):
    model = as_trained(nn.Sequential(nn.Conv2d(8, 6, 1, stride=stride), nn.BatchNorm2d(6))).eval()
    part = Fused(*model, relu=False, dtype=torch.float64)
    part.refresh()
    x = torch.randn(shape[0], 8, *shape[1:], dtype=torch.float64)
    torch.testing.assert_close(part(x), model(x), rtol=1e-12, atol=1e-12)


def test_inputs_that_are_read_twice_stay():
    class Skip(Odd):
        def forward(self, x):
            return super().forward(x) + x.mean()

    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    fast = FusedForward(as_trained(Skip()), torch.float64)
    assert len(fast.fused) == 3
    assert fast.prepare(x) is x


def test_nothing_is_fused_on_a_cpu():
    assert fastest(objective_of(networks("resnet-small"))) is None


LEFT_ALONE = {  # an input that is written into after the convolution has read it, or a sum that is not plain
    "in place by a method": lambda b, x: F.relu(b.bn(b.conv(x)) + x.relu_()),
    "in place by a module": lambda b, x: F.relu(b.bn(b.conv(x)) + b.relu(x)),
    "in place by a function": lambda b, x: F.relu(b.bn(b.conv(x)) + F.relu(x, True)),
}


PLAIN = {  # fused, at least in part
    "with a factor": lambda b, x: F.relu(torch.add(b.bn(b.conv(x)), x, alpha=2)),
    "the other way round": lambda b, x: F.relu(x + b.bn(b.conv(x))),
    "without a ReLU": lambda b, x: b.bn(b.conv(x)) + x,
    "with a number": lambda b, x: F.relu(b.bn(b.conv(x)) + 1.5),
    "the size of the batch": lambda b, x: F.relu(b.bn(b.conv(x)) + x.size(0)),
    "a product, and a ReLU in place": lambda b, x: b.relu(b.bn(b.conv(x)) * x.mean() + x),
    "a constant": lambda b, x: F.relu(b.bn(b.conv(x - torch.tensor([[[0.5]]]))) + x),
    "as keywords": lambda b, x: F.relu(b.bn(b.conv(input=x))),
}


@pytest.mark.parametrize("name", [*LEFT_ALONE, *PLAIN])
def test_additions_and_writing_in_place(name):
    model = Block({**LEFT_ALONE, **PLAIN}[name]).double()
    objective = objective_of(model)
    fast = FusedForward(model, torch.float64)
    assert (fast.module is model) == (name in LEFT_ALONE)
    torch.testing.assert_close(objective.loss(fast), objective.loss(), rtol=1e-12, atol=1e-12)


def into_input(block, x):
    kept = x
    x += block.bn(block.conv(x))
    return F.relu(x) + kept


def test_what_a_trace_does_not_see_is_found_by_its_loss():
    assert checked(objective_of(networks("resnet-small").float()))
    assert checked(objective_of(Block(into_input))) is None
    assert checked(objective_of(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4)))) is None  # nothing to fuse


def test_what_cannot_be_fused_on_a_gpu_is_told():
    objective = objective_of(Branches())
    objective.device = torch.device("cuda")  # what it would be told of there
    with pytest.warns(UserWarning, match="convolutions are not fused, which takes longer: symbolically traced"):
        assert fastest(objective) is None


def set_first(block, x):
    h = block.bn(block.conv(x))
    x[0] = 1.0
    return F.relu(h + x)


@pytest.mark.parametrize("model", [Branches(), Block(set_first)], ids=["branches", "index"])
def test_what_cannot_be_traced(model):
    with pytest.raises((TypeError, TraceError)):
        FusedForward(model, torch.float64)


def patched(model):
    model[0].forward = lambda x: x


def without_statistics(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = module.running_var = None


@pytest.mark.parametrize("spoil", [patched, hooked, without_statistics])
def test_what_cannot_be_fused_runs_as_it_is(spoil):
    model = networks("resnet-small")
    spoil(model)
    objective, fast = objective_of(model), FusedForward(model, torch.float64)
    assert not fast.fused
    if spoil is not patched:  # which does not fit the rest
        torch.testing.assert_close(objective.loss(fast), objective.loss(), rtol=1e-12, atol=1e-12)


def test_tracing_leaves_nothing_in_the_model():
    model = Remembers().double()
    last = model.last
    fast = FusedForward(model, torch.float64)
    assert len(fast.fused) == 1
    assert model.features is None
    assert model.last is last
    objective = objective_of(model)
    torch.testing.assert_close(objective.loss(fast), objective.loss(), rtol=1e-12, atol=1e-12)
