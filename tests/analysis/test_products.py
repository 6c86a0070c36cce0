"""Hessian products: both modes of automatic differentiation, and which of them serves for which model."""

from __future__ import annotations

import pytest
import torch
from norm_networks import Block, Branches, Odd, Remembers, as_trained, hooked, networks
from small_models import CASES, conv, mlp, tied
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cases import same
from sparsam.analysis.fusion import Folded
from sparsam.analysis.hessian import top_eigenvalues
from sparsam.analysis.objective import Objective

# torch.func's forward mode compiles its formulas with torch's own, old compiler.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


class Detaching(nn.Module):
    """A part under no_grad: reverse mode takes it for a constant, forward mode does not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 6).double(), nn.Linear(6, 3).double()

    def forward(self, x):
        h = torch.tanh(self.first(x))
        with torch.no_grad():
            scale = h.abs().mean()
        return self.second(h / scale)


class Words(nn.Module):
    """An embedding whose padding has no gradient, and a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 4, padding_idx=0).double()
        self.lstm, self.head = nn.LSTM(4, 3, batch_first=True).double(), nn.Linear(3, 3).double()
        nn.init.normal_(self.words.weight)  # that of the padding too

    def forward(self, x):
        return self.head(self.lstm(self.words(x))[0][:, -1])


def detaching():
    return Detaching(), F.cross_entropy, torch.randn(8, 5, dtype=torch.float64), torch.randint(0, 3, (8,))


def words():
    return Words(), F.cross_entropy, torch.randint(0, 7, (8, 5)), torch.randint(0, 3, (8,))


def recurrent():
    model, *rest = words()
    model.words.padding_idx = None
    return model, *rest


REVERSE = [tied, detaching, words]  # products in reverse mode only; tied: torch adds to a zero tensor


def first_product(model, loss_fn, x, y):
    """H v from both forms of the product, and which one the objective chose."""
    objective = Objective(model, loss_fn, (x, y))
    vector = [torch.randn_like(p) for p in objective.params]
    found = objective.hessian_product(vector)
    forward = objective.product.forward_mode
    objective.product.forward_mode = False
    return found, objective.hessian_product(vector), forward


@pytest.mark.parametrize("case", dict.fromkeys([*CASES, recurrent, *REVERSE]))
def test_forward_and_reverse_mode_agree(case):
    found, reverse, forward = first_product(*case())
    assert forward == (case not in REVERSE)
    torch.testing.assert_close(found, reverse, rtol=1e-10, atol=1e-12)


class Blocks(nn.Module):
    """A convolution with a bias, BatchNorm without weights, a sum, a kernel of one pixel, one layer called twice."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False, groups=2), nn.BatchNorm2d(4, affine=False)
        self.conv3, self.bn3 = nn.Conv2d(4, 3, 1, stride=2, bias=False), nn.BatchNorm2d(3)

    def forward(self, x, scale=None):
        h = F.relu(self.bn1(self.conv1(x)))
        for _ in range(2):
            h = F.relu(self.bn2(self.conv2(h)) + h)
        return self.bn3(self.conv3(h)).flatten(2).mean(2)


def partly_frozen():
    model = Blocks()
    model.bn1.weight.requires_grad_(False)
    model.conv2.requires_grad_(False)
    return model


def images_for(model):
    x = torch.randn(4, 3, 8, 8).to(next(model.parameters()).dtype)
    return model, F.cross_entropy, x, torch.randint(0, 3, (4,))


FOLDED = {  # and how many BatchNorms are, of as many calls
    "resnet": (lambda: networks("resnet-small"), 9),
    "wide resnet": (lambda: networks("wrn-10-2"), 4),
    "blocks": (Blocks, 4),
    "frozen": (partly_frozen, 4),
    "remembers": (Remembers, 1),
}


@pytest.mark.parametrize("name", FOLDED)
def test_folded_batch_norm_has_the_same_products(name):
    make, count = FOLDED[name]
    model, loss_fn, x, y = images_for(as_trained(make()))
    objective, reverse = (Objective(model, loss_fn, (x, y), batch_size=3) for _ in range(2))
    reverse.product.forward_mode = False
    vector, buffers = [torch.randn_like(p) for p in objective.params], list(model.buffers())
    for _ in range(2):
        found = objective.hessian_product(vector)
        assert objective.product.forward_mode
        assert sum(isinstance(part, Folded) for part in objective.product.folded.modules()) == count
        torch.testing.assert_close(found, reverse.hessian_product(vector), rtol=1e-10, atol=1e-12)
        assert model.training
        assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
        as_trained(model)  # other weights and statistics for the second time
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)


def test_folded_products_in_float32():
    """Rounding moves activations over the kinks of ReLUs, which is not another function."""
    torch.manual_seed(0)
    found, reverse, forward = first_product(*images_for(networks("resnet-small").float()))
    assert forward
    distance = torch.cat([(a - b).flatten() for a, b in zip(found, reverse, strict=True)]).norm()
    assert distance < 1e-2 * torch.cat([t.flatten() for t in reverse]).norm()


class PartlyDetaching(Blocks):
    """A trace does not show what runs under no_grad."""

    def forward(self, x):
        with torch.no_grad():
            scale = self.bn1(self.conv1(x)).abs().mean()
        return super().forward(x / scale)


def added_in_place(block, x):
    """Nor that the sum is written into another variable too."""
    h = kept = 2 * x
    h += block.bn(block.conv(x))
    return F.relu(h) + kept


def hooked_blocks():
    model = nn.Sequential(Blocks())
    hooked(model)
    return model


NOT_FOLDED = {  # and whether forward mode serves
    "untraceable": (Branches, True),
    "hooks": (hooked_blocks, True),
    "a weight of its own": (Odd, True),
    "added in place": (lambda: Block(added_in_place), True),
    "no_grad": (PartlyDetaching, False),
}


@pytest.mark.parametrize("name", NOT_FOLDED)
def test_what_cannot_be_folded(name):
    make, forward_mode = NOT_FOLDED[name]
    model, loss_fn, x, y = images_for(as_trained(make()))
    objective = Objective(model, loss_fn, (x, y))
    vector = [torch.randn_like(p) for p in objective.params]
    found = objective.hessian_product(vector)
    assert (objective.product.folded, objective.product.forward_mode) == (None, forward_mode)
    objective.product.forward_mode = False
    torch.testing.assert_close(found, objective.hessian_product(vector), rtol=1e-10, atol=1e-12)


def test_a_folded_model_that_is_out_of_memory(monkeypatch):
    """A trace has lost the checkpoints of a model, so the model itself may still do."""
    model, loss_fn, x, y = images_for(as_trained(Blocks()))

    def out_of_memory(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Folded, "forward", out_of_memory)
    objective = Objective(model, loss_fn, (x, y))
    objective.hessian_product([torch.randn_like(p) for p in objective.params])
    assert (objective.product.folded, objective.product.forward_mode) == (None, True)


class Cube(torch.autograd.Function):
    """A function without a forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def test_a_part_without_forward_mode_is_differentiated_backwards():
    model, loss_fn, x, y = mlp()
    torch.manual_seed(1)
    model[1].forward = lambda x: x**3
    plain, _, forward = first_product(model, loss_fn, x, y)
    assert forward
    torch.manual_seed(1)
    model[1].forward = Cube.apply
    found, reverse, forward = first_product(model, loss_fn, x, y)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)
    assert not forward
    assert same(found, reverse)


@pytest.mark.parametrize("through", ["model", "parameters"])
def test_a_loss_that_reads_the_weights_itself(through):
    """Weight decay written into the loss adds 2 c to every eigenvalue, whichever way it finds the weights."""
    model, loss_fn, x, y = mlp()
    kept = list(model.parameters())

    def decayed(outputs, targets):
        params = model.parameters() if through == "model" else kept
        return loss_fn(outputs, targets) + 0.7 * sum(p.square().sum() for p in params)

    torch.manual_seed(1)
    found, reverse, forward = first_product(model, decayed, x, y)
    torch.manual_seed(1)
    vector = [torch.randn_like(p) for p in kept]
    plain = Objective(model, loss_fn, (x, y)).hessian_product(vector)
    assert forward == (through == "model")
    for h, r, without, v in zip(found, reverse, plain, vector, strict=True):
        torch.testing.assert_close(h, without + 1.4 * v, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(r, h, rtol=1e-10, atol=1e-12)


def test_a_first_vector_that_shows_nothing_is_not_believed():
    model, loss_fn, x, y = detaching()
    objective = Objective(model, loss_fn, (x, y))
    objective.hessian_product([torch.zeros_like(p) for p in objective.params])
    assert objective.product.forward_mode is False


def test_padding_that_only_a_later_batch_has():
    model, loss_fn, x, y = words()
    x[:4], x[4:, 0] = 3, 0
    objective = Objective(model, loss_fn, (x, y), batch_size=4)
    vector = [torch.randn_like(p) for p in objective.params]
    found = objective.hessian_product(vector)
    objective.product.forward_mode = False
    assert same(found, objective.hessian_product(vector))


def test_checkpointing_keeps_forward_mode():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()[0]

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    _, loss_fn, x, y = mlp()
    found, reverse, forward = first_product(Checkpointed(), loss_fn, x, y)
    assert forward
    torch.testing.assert_close(found, reverse, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_a_scripted_model_keeps_its_curvature():
    """Its tangents are lost once it has specialised itself."""
    model, loss_fn, x, y = mlp()
    expected = top_eigenvalues(Objective(model, loss_fn, (x, y)), 2).values
    scripted = torch.jit.trace(model, x)
    objective = Objective(scripted, loss_fn, (x, y))
    for _ in range(3):
        assert objective.hessian_product([torch.ones_like(p) for p in objective.params])[0].any()
    assert top_eigenvalues(objective, 2).values == pytest.approx(expected, rel=1e-6)


def test_a_compiled_model_has_a_hessian_too():
    model, loss_fn, x, y = mlp()
    expected = top_eigenvalues(Objective(model, loss_fn, (x, y)), 2).values
    whole = torch.compile(model, backend="aot_eager")
    assert top_eigenvalues(Objective(whole, loss_fn, (x, y)), 2).values == pytest.approx(expected, rel=1e-6)
    model[0].compile(backend="aot_eager")
    assert top_eigenvalues(Objective(model, loss_fn, (x, y)), 2).values == pytest.approx(expected, rel=1e-6)


def test_random_numbers_are_those_of_one_function():
    """Functional dropout stays on in eval mode: the same numbers in each product, whatever was tried before."""
    model, _, x, _ = mlp()
    model[1].forward = lambda h: F.dropout(torch.tanh(h))
    objective = Objective(model, F.mse_loss, (x, torch.zeros(20, 3, dtype=torch.float64)))
    vector = [torch.ones_like(p) for p in objective.params]
    first, second = objective.hessian_product(vector), objective.hessian_product(vector)
    assert same(first, second)


def test_ctrl_c_is_ctrl_c():
    """torch's formulas in forward mode wrap it into an error of their own."""
    model, loss_fn, x, y = conv()
    calls = []

    def loss(outputs, targets):
        calls.append(1)
        if len(calls) in (3, 5):
            raise RuntimeError(
                "The following operation failed in the TorchScript interpreter. KeyboardInterrupt: <...>"
            )
        return loss_fn(outputs, targets)

    objective = Objective(model, loss, (x, y))
    vector = [torch.ones_like(p) for p in objective.params]
    objective.loss()
    with pytest.raises(KeyboardInterrupt):  # while it tries forward mode
        objective.hessian_product(vector)
    objective = Objective(model, loss_fn, (x, y))
    objective.hessian_product(vector)
    objective.loss_fn = loss
    objective.loss()
    with pytest.raises(KeyboardInterrupt):  # and in the midst of it
        objective.hessian_product(vector)
    assert objective.product.forward_mode


def test_a_model_that_fails_says_why():
    model, loss_fn, x, y = mlp()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Objective(model, loss_fn, (x[:, :3], y)).hessian_product([torch.ones_like(p) for p in model.parameters()])
