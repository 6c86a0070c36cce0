"""Models that change between steps, and weights that somebody else trains: each step against masked SAM by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsam import SAM, SuffixMask

RHO, LR, CUT = 0.5, 0.1, "c"


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)).double()


class Net(nn.Module):
    """Four stages, which can be cut before the third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = block(), block(), block(), nn.Linear(8, 3).double()

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))))


class Sum(nn.Module):
    """Two modules side by side, as an adapter beside a layer."""

    def __init__(self, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.one, self.two = one, two

    def forward(self, x):
        return self.one(x) + self.two(x)


def adapter(stage: str):
    def change(model, opt):
        new = nn.Linear(8, 8, bias=False).double()
        getattr(model, stage)[0] = Sum(getattr(model, stage)[0], new)
        opt.add_param_group({"params": list(new.parameters())})

    return change


def frozen_with_adapter(model, opt):
    model.a.requires_grad_(False)
    adapter("a")(model, opt)


def new_stage(model, opt):
    model.b = block()
    opt.add_param_group({"params": list(model.b.parameters())})


def new_cut(model, opt):
    model.c = block()
    opt.add_param_group({"params": list(model.c.parameters())})


def other_statistics(model, opt):
    model.c[1] = nn.BatchNorm1d(8, affine=False).double()


def suffix_module_in_the_prefix(model, opt):
    model.b[0] = model.c[0]


def suffix_weight_in_the_prefix(model, opt):
    model.b[0].weight = model.c[0].weight


CHANGES = {
    "adapter before the cut": adapter("a"),
    "adapter after the cut": adapter("c"),
    "frozen, with an adapter": frozen_with_adapter,
    "stage replaced": new_stage,
    "cut replaced": new_cut,
    "BatchNorm replaced": other_statistics,
    "module shared across the cut": suffix_module_in_the_prefix,
    "weight shared across the cut": suffix_weight_in_the_prefix,
}


def gradients(model, batch, random):
    torch.set_rng_state(random)
    params = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), params, allow_unused=True)
    return {name: next((g for p, g in zip(params, found, strict=True) if p is q), None) for name, q in named(model)}


def named(model):
    return model.named_parameters()


def by_hand(model, batch, random):
    """Return the weights after a step of SGD at w + eps, eps on what is used after the cut alone."""
    before = {id(p) for stage in (model.a, model.b) for p in stage.parameters()}
    scope = [name for name, p in named(model) if id(p) not in before]
    twin, moved = copy.deepcopy(model), copy.deepcopy(model)
    g = gradients(twin, batch, random)
    norm = torch.stack([g[name].norm() for name in scope if g[name] is not None]).norm()
    with torch.no_grad():
        for name, p in named(moved):
            if name in scope and g[name] is not None:
                p += RHO * g[name] / norm
    at = gradients(moved, batch, random)
    return {name: p.detach() - (0 if at[name] is None else LR * at[name]) for name, p in named(model)}


@pytest.mark.parametrize("when", [0, 4])
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_on_a_changed_model_is_proven_and_exact(change, when):
    torch.manual_seed(0)
    model = Net()
    opt = SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=SuffixMask(model, CUT), lr=LR)
    batch, calls = (torch.randn(16, 8).double(), torch.randint(3, (16,))), []

    def closure():
        calls[-1] += 1
        opt.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    for step in range(when + 4):
        if step == when:
            CHANGES[change](model, opt)
        torch.manual_seed(100 + step)
        expected = by_hand(model, batch, torch.get_rng_state())
        torch.manual_seed(100 + step)
        calls.append(0)
        opt.step(closure)
        trained = {p for group in opt.param_groups for p in group["params"]}
        for name, p in named(model):
            if p in trained:
                torch.testing.assert_close(p.detach(), expected[name], rtol=0, atol=1e-13, msg=f"{name}, step {step}")
    assert calls[when:] == [3, 3, 2, 2]  # proven anew, then replayed; a warning would be an error here


@pytest.mark.parametrize("cleared", ["never", "by the closure", "before the step"])
@pytest.mark.parametrize("own", [("c", "d"), ("d",), ("c",), ("a", "d")])
def test_gradients_of_weights_that_the_optimizer_does_not_have_do_not_stop_replay(own, cleared):
    torch.manual_seed(0)
    model = Net()
    mine = [p for name in own for p in getattr(model, name).parameters()]
    opt = SAM(mine, torch.optim.SGD, rho=RHO, mask=SuffixMask(model, CUT), lr=LR)
    x, y, calls = torch.randn(16, 8).double(), torch.randint(3, (16,)), []

    def closure():
        calls[-1] += 1
        opt.zero_grad()
        if cleared == "by the closure":
            model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(5):
        if cleared == "before the step":
            model.zero_grad()
        calls.append(0)
        opt.step(closure)
    assert calls == [3, 3, 2, 2, 2]


def test_a_buffer_that_requires_a_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].register_buffer("scale", torch.ones(3, requires_grad=True))
    opt = SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=SuffixMask(model, "1"), lr=LR)
    calls = []

    def closure():
        calls[-1] += 1
        opt.zero_grad()
        loss = (model(torch.ones(2, 4)) * model[2].scale).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        calls.append(0)
        opt.step(closure)
    assert calls == [3, 3, 2, 2]
