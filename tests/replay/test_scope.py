"""Which weights follow the cut: also where a closure runs the model twice, and where nothing is replayed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sparsam import SAM, SuffixMask


class Net(nn.Module):
    """Adds a parameter of its own before its blocks, as a ViT does; registers its head first."""

    def __init__(self, *, checkpointed: bool = False, skip: bool = False) -> None:
        super().__init__()
        self.head, self.stem = nn.Linear(6, 4), nn.Linear(3, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.pos = nn.Parameter(torch.full((6,), 0.1))
        self.checkpointed, self.skip = checkpointed, skip
        self.double()

    def forward(self, x):
        stem = self.stem(x)
        h = stem + self.pos
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.checkpointed else block(h)
        return self.head(h + stem if self.skip else h)


SUFFIX = ["blocks.1", "blocks.2", "head"]


def build(**options):
    torch.manual_seed(0)
    net = Net(**options)
    opt = SAM(net.parameters(), rho=0.5, mask=SuffixMask(net, "blocks.1"), lr=0.1)
    batch = torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 4
    return net, opt, batch


def closure_of(net, opt, batch, *, before=lambda: None, chunks=1):
    x, y = batch

    def closure():
        opt.zero_grad()
        before()
        rows = zip(x.chunk(chunks), y.chunk(chunks), strict=True)
        loss = sum(F.cross_entropy(net(a), b) for a, b in rows) / chunks
        loss.backward()
        return loss

    return closure


def moved(net, opt):
    """Return the modules, or parameters of the model itself, that the latest step has perturbed."""
    names = [name for (name, _), m in zip(net.named_parameters(), opt.masks(), strict=True) if m.any()]
    return sorted({name.removesuffix(".weight").removesuffix(".bias").removesuffix(".0") for name in names})


def plain_step(net, batch, suffix):
    """Take the step of masked SAM by hand; return the weights that it leads to."""
    x, y = batch
    params, net = dict(net.named_parameters()), Net()  # not checkpointed: that would read weights in the backward pass
    w = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    loss = F.cross_entropy(torch.func.functional_call(net, w, (x,)), y)
    grads = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
    chosen = [name for name in w if name.startswith(tuple(suffix))]
    norm = torch.stack([grads[name].square().sum() for name in chosen]).sum().sqrt()
    there = {
        name: (p + 0.5 * grads[name] / norm if name in chosen else p).detach().requires_grad_() for name, p in w.items()
    }
    loss = F.cross_entropy(torch.func.functional_call(net, there, (x,)), y)
    grads = torch.autograd.grad(loss, list(there.values()))
    return [(p - 0.1 * g).detach() for p, g in zip(w.values(), grads, strict=True)]


@pytest.mark.filterwarnings("ignore:the second pass is computed in full, exact but slower. gradients were off")
def test_a_pass_without_gradients_hides_nothing_that_is_used_before_the_cut():
    """As a closure makes it that takes pseudo-labels, or a metric."""
    net, opt, batch = build()

    def look():
        with torch.no_grad():
            net(batch[0])

    closure = closure_of(net, opt, batch, before=look)
    for _ in range(3):
        expected = plain_step(net, batch, SUFFIX)
        opt.step(closure)
        assert moved(net, opt) == SUFFIX
        torch.testing.assert_close([p.detach() for p in net.parameters()], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("first", [3, 0], ids=["later", "from the start"])
def test_micro_batches_of_a_model_that_is_checkpointed_at_the_cut(first):
    net, opt, batch = build(checkpointed=True)
    for _ in range(first):
        opt.step(closure_of(net, opt, batch))
    for _ in range(2):
        expected = plain_step(net, batch, SUFFIX)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt.step(closure_of(net, opt, batch, chunks=2))
        assert all("the closure ran the model 2 times" in str(w.message) for w in caught)
        torch.testing.assert_close([p.detach() for p in net.parameters()], expected, rtol=1e-12, atol=1e-12)


def test_weights_that_are_trained_later_are_seen_where_nothing_is_replayed():
    net, opt, batch = build(skip=True)
    net.pos.requires_grad_(False)
    with pytest.warns(UserWarning, match="exact but slower: what is computed before 'blocks.1' is used after it"):
        for step in range(3):
            net.pos.requires_grad_(step == 2)
            opt.step(closure_of(net, opt, batch))
            assert moved(net, opt) == SUFFIX


NOT_SEEN = (
    "the second pass is computed in full, and which parameters follow 'blocks.1' is not seen: those of modules that "
    "were registered from it on are perturbed, which may be others. The reason: "
)


def without_closure(net, opt, batch):
    closure = closure_of(net, opt, batch)
    closure()
    with opt.perturbed():
        closure()
    opt.step()


def compiled(net, opt, batch):
    net.compile(backend="eager")
    opt.step(closure_of(net, opt, batch))


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (without_closure, "only step(closure) sees which modules are called, first_step() and perturbed() do not"),
        (compiled, "the model is compiled as a whole; compile its blocks instead"),
    ],
)
def test_a_warning_says_where_the_order_of_the_modules_has_to_do(way, reason):
    net, opt, batch = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            way(net, opt, batch)
    assert [str(w.message) for w in caught] == [NOT_SEEN + reason]
    assert moved(net, opt) == ["blocks.1", "blocks.2"]  # the head was registered before them


@pytest.mark.filterwarnings("ignore:the second pass is computed in full")
@pytest.mark.parametrize("way", ["closure", "without a closure"])
def test_a_weight_that_is_used_on_both_sides_stays(way):
    net, opt, batch = build()
    net.blocks[1][0].weight = net.blocks[0][0].weight
    opt = SAM(net.parameters(), rho=0.5, mask=SuffixMask(net, "blocks.1"), lr=0.1)
    if way == "closure":
        opt.step(closure_of(net, opt, batch))
    else:
        without_closure(net, opt, batch)
    names = [name for (name, _), m in zip(net.named_parameters(), opt.masks(), strict=True) if m.any()]
    assert "blocks.0.0.weight" not in names
    assert "blocks.1.0.bias" in names


class Part(nn.Module):
    """Uses a parameter of its own between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.second = nn.Linear(6, 6), nn.Parameter(torch.ones(6)), nn.Linear(6, 6)

    def forward(self, x):
        return self.second((self.first(x) * self.scale).tanh())


class Around(nn.Module):
    """Checkpoints a part that holds the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.part, self.head = nn.Linear(3, 6), Part(), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(checkpoint(self.part, self.stem(x), use_reentrant=True))


@pytest.mark.filterwarnings("ignore:the second pass is computed in full")
def test_what_reentrant_checkpointing_computes_without_a_graph_is_seen_when_it_is_computed_again():
    torch.manual_seed(0)
    net = Around()
    opt = SAM(net.parameters(), rho=0.5, mask=SuffixMask(net, "part.second"), lr=0.1)
    closure = closure_of(net, opt, (torch.randn(8, 3), torch.arange(8) % 4))
    for _ in range(2):
        opt.step(closure)
        assert moved(net, opt) == ["head", "part.second"]


class WithStatistic(Net):
    """Returns a number of an early layer too, which no loss uses."""

    def forward(self, x):
        h = self.blocks[0](self.stem(x) + self.pos)
        return self.head(self.blocks[2](self.blocks[1](h))), h.mean()


def test_an_output_that_the_loss_does_not_use_does_not_stop_replay():
    torch.manual_seed(0)
    net = WithStatistic()
    opt = SAM(net.parameters(), rho=0.5, mask=SuffixMask(net, "blocks.2"), lr=0.1)
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 4
    calls = []
    net.stem.register_forward_hook(lambda *_: calls.append(1))

    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(net(x)[0], y)
        loss.backward()
        return loss

    for _ in range(3):
        calls.clear()
        expected = plain_step(net, (x, y), ["blocks.2", "head"])
        opt.step(closure)
        torch.testing.assert_close([p.detach() for p in net.parameters()], expected, rtol=1e-12, atol=1e-12)
    assert len(calls) == 1  # once a step
