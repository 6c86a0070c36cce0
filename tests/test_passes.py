"""What both passes share: every buffer moves once a step, whatever keeps it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from sparsam import SAM, LastSteps, SuffixMask
from sparsam.passes import SMALL


class Means(nn.Module):
    """A running mean of its own, and a count that is replaced, not changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.count = self.count + 1
        return x - self.mean


def linear(out: int = 6) -> nn.Module:
    return nn.Linear(6, out)


MODELS = {
    "batch norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(6), linear(3)),
    "batch norm, cumulative": lambda: nn.Sequential(linear(), nn.BatchNorm1d(6, momentum=None), linear(3)),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), linear(3)
    ),
    "spectral norm": lambda: nn.Sequential(
        parametrizations.spectral_norm(linear()), nn.Tanh(), parametrizations.spectral_norm(linear(3))
    ),
    "means of one's own": lambda: nn.Sequential(linear(), Means(), linear(3)),
    "all of them": lambda: nn.Sequential(
        parametrizations.spectral_norm(linear()), nn.BatchNorm1d(6), Means(), parametrizations.spectral_norm(linear(3))
    ),
}


def pass_of(model, x):
    model.zero_grad()
    model(x).square().mean().backward()


# A prefix whose buffers change what it computes is another function in the second pass, and cannot be replayed.
@pytest.mark.filterwarnings("ignore:the second pass .* is not equal to a whole one")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["closure", "two steps", "base step", "suffix"])
def test_every_buffer_moves_once_a_step(name, way):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x = torch.randn(8, 6, dtype=torch.float64)
    mask = SuffixMask(model, str(len(model) - 1)) if way == "suffix" else None
    schedule = LastSteps(0.01, 1000) if way == "base step" else None
    opt = SAM(model.parameters(), torch.optim.SGD, rho=0.5, lr=0.1, model=model, mask=mask, schedule=schedule)

    def closure():
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        once = copy.deepcopy(model)
        pass_of(once, x)
        if way == "two steps":
            pass_of(model, x)
            opt.first_step(zero_grad=True)
            model(x).square().mean().backward()
            opt.second_step()
        else:
            opt.step(closure)
        for (key, buffer), (_, expected) in zip(model.named_buffers(), once.named_buffers(), strict=True):
            assert torch.equal(buffer, expected), key


class OwnForward(nn.BatchNorm1d):
    """Which cannot be told to track no statistics."""

    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize("kind", ["torch's own", "own forward", "compiled"])
def test_statistics_of_a_wide_batch_norm_move_once(kind):
    """torch counts no versions of them."""
    features = SMALL + 1
    norm = OwnForward(features) if kind == "own forward" else nn.BatchNorm1d(features)
    model, x = nn.Sequential(norm), torch.linspace(-1, 1, 4 * features).reshape(4, features).sin()
    plain = copy.deepcopy(model)
    if kind == "compiled":
        model.compile(backend="aot_eager")
    opt = SAM(model.parameters(), torch.optim.SGD, rho=0.5, lr=0.0, model=model)

    def closure():
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure)
        plain(x)
    torch.testing.assert_close(norm.running_var, plain[0].running_var)
    torch.testing.assert_close(norm.running_mean, plain[0].running_mean)


def test_constant_buffers_are_not_copied():
    """A causal mask of many megabytes, say: after the first step only buffers that have moved are kept."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model.register_buffer("constant", torch.ones(SMALL + 1))
    opt = SAM(model.parameters(), torch.optim.SGD, rho=0.5, lr=0.1, model=model)
    kept = []
    for _ in range(3):
        opt.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        with opt.perturbed():
            kept.append([place.name for saved in opt._passes._buffers for place in saved.places])
        opt.step()
    assert kept == [["constant"], [], []]


class ThroughData(nn.Module):
    """Counts without leaving a version."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(size))

    def forward(self, x):
        self.count.data.add_(1)
        return x


class Late(nn.Module):
    """Has no buffer before it is called."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("count", None)

    def forward(self, x):
        if self.count is None:
            self.count = torch.zeros(self.size)
        self.count.add_(1)
        return x


class SecondPassOnly(ThroughData):
    """Moves in every second call, as a codebook that is updated now and then: never in a first pass."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x if self.calls % 2 else super().forward(x)


def step_of(model, cut=None):
    """Return what takes a step of SAM, or of SSAM-C."""
    policy = {"mask": SuffixMask(model, cut)} if cut else {"model": model}
    opt = SAM(model.parameters(), torch.optim.SGD, rho=0.5, lr=0.1, **policy)

    def closure():
        opt.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    return lambda: opt.step(closure)


@pytest.mark.parametrize(("kind", "moves"), [(ThroughData, 5), (Late, 5), (SecondPassOnly, 0)])
@pytest.mark.parametrize("size", [1, SMALL + 1])
def test_a_buffer_whose_moves_leave_no_version_moves_once(kind, moves, size):
    model = nn.Sequential(nn.Linear(4, 4), kind(size), nn.Linear(4, 2))
    step = step_of(model)
    for _ in range(5):
        step()
    assert (model[1].count == moves).all()


def test_a_large_buffer_of_a_module_that_comes_later_moves_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 2))
    step = step_of(model)
    step()
    model[1] = ThroughData(SMALL + 1)
    for _ in range(3):
        step()
    assert (model[1].count == 3).all()


def expanded():
    return torch.full((1,), 2.0).expand(4)


def of_inference_mode():
    with torch.inference_mode():
        return torch.full((4,), 2.0)


def conjugated():
    return torch.full((2**16 + 4,), 2.0 + 1j).conj()


def test_a_large_conjugated_buffer_stays():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_buffer("fixed", conjugated())
    step = step_of(model, None)
    for _ in range(2):
        step()
    assert torch.equal(model.fixed, conjugated())
    assert int(model[1].num_batches_tracked) == 2


def test_a_conjugated_buffer_moves_once_a_step():
    class Counting(nn.Linear):
        def forward(self, x):
            self.count.add_(1)
            return super().forward(x)

    model = nn.Sequential(Counting(4, 4), nn.Linear(4, 2))
    model[0].register_buffer("count", torch.zeros(3, dtype=torch.complex64).conj())
    step = step_of(model, None)
    for _ in range(3):
        step()
    assert model[0].count.is_conj()
    assert model[0].count.tolist() == [3, 3, 3]


@pytest.mark.parametrize("make", [expanded, of_inference_mode])
@pytest.mark.parametrize("cut", [None, "2"])
def test_a_buffer_that_torch_cannot_write_into_stays(make, cut):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model.register_buffer("fixed", make())
    fixed = model.fixed
    step = step_of(model, cut)
    for _ in range(4):
        step()
    assert model.fixed is fixed
    assert fixed.tolist() == [2.0] * 4


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("cut", [None, "2"])
def test_statistics_of_a_scripted_norm_move_once(cut):
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(4), nn.BatchNorm1d(4)]
    model = nn.Sequential(nn.Linear(4, 4), norms[0], nn.Linear(4, 4), norms[1], nn.Linear(4, 2))
    scripted = copy.deepcopy(model)
    scripted[1], scripted[3] = torch.jit.script(scripted[1]), torch.jit.script(scripted[3])
    for network in (model, scripted):
        step = step_of(network, cut)
        for _ in range(4):
            step()
    expected = model.state_dict()
    for name, value in scripted.state_dict().items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("way", ["closure", "exception", "suffix"])
def test_a_buffer_in_the_memory_of_weights_leaves_no_perturbation_in_them(way):
    """Weights that a module also keeps as a buffer, without a copy: they were kept at w + eps, and put back last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model.register_buffer("alias", model[2].weight.data)
    policy = {"mask": SuffixMask(model, "2")} if way == "suffix" else {"model": model}
    opt = SAM(model.parameters(), torch.optim.SGD, rho=0.5, lr=0.0, **policy)
    before, calls = copy.deepcopy(model.state_dict()), []

    def closure():
        calls.append(model[2].weight.detach().clone())
        opt.zero_grad()
        loss = model(torch.ones(2, 4).double()).square().sum()
        loss.backward()
        if way == "exception" and len(calls) % 2 == 0:
            raise KeyboardInterrupt
        return loss

    for _ in range(4):
        try:
            opt.step(closure)
        except KeyboardInterrupt:
            assert way == "exception"
        assert not torch.equal(calls[-1], before["2.weight"])
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
