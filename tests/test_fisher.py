"""The diagonal Fisher: exact against brute force, signs without bias, and nothing disturbed."""

from __future__ import annotations

import re

import pytest
import torch
from small_models import TiedAutoencoder, trained_task
from torch import nn
from torch.nn import functional as F

from cases import same, task
from reference import fisher, signs_fisher
from sparsam import diagonal_fisher
from sparsam.errors import UserValueError

TOLERANCE = {"rtol": 1e-10, "atol": 1e-14}


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.reshape(-1), torch.from_numpy(b).to(a.dtype), **TOLERANCE)


@pytest.mark.parametrize("chunk_size", [None, 1, 7, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_exact_equals_brute_force(chunk_size, reduction):
    t = trained_task()
    loss = nn.CrossEntropyLoss(reduction=reduction)
    got = diagonal_fisher(t.model, loss, t.x, t.y, chunk_size=chunk_size)
    assert [f.shape for f in got] == [p.shape for p in t.model.parameters()]
    assert_same(got, fisher(t.model, F.cross_entropy, t.x, t.y))


@pytest.mark.parametrize(("samples", "calls"), [(2048, 64), (4096, 64), (8192, 128)])
def test_many_samples_take_larger_chunks(samples, calls):
    model, sizes = nn.Linear(1, 2), []
    model.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))
    x = torch.randn(samples, 1)
    diagonal_fisher(model, F.cross_entropy, x, torch.zeros(samples, dtype=torch.long), method="signs")
    assert len(sizes) == calls
    assert sum(sizes) == samples


@pytest.mark.parametrize("chunk_size", [None, 1, 5])
def test_signs_equal_brute_force(chunk_size):
    t = trained_task(samples=40)
    got = diagonal_fisher(
        t.model,
        F.cross_entropy,
        t.x,
        t.y,
        method="signs",
        chunk_size=chunk_size,
        generator=torch.Generator().manual_seed(3),
    )
    signs = (torch.randint(0, 2, (40,), generator=torch.Generator().manual_seed(3)) * 2 - 1).tolist()
    assert_same(got, signs_fisher(t.model, F.cross_entropy, t.x, t.y, signs, chunk_size or 32))


def looks_into_its_tensors(outputs, targets):
    return F.cross_entropy(outputs, targets) * (2 if targets.item() == 1 else 1)


def calls_numpy(outputs, targets):
    weight = float(targets.numpy()[0] == 1) + 1
    return F.cross_entropy(outputs, targets) * weight


def sees_one_sample(outputs, targets):
    assert len(outputs) == len(targets) == 1
    return F.cross_entropy(outputs, targets, reduction="none") * (1 + (targets == 1))


@pytest.mark.parametrize(
    ("loss", "calls"),
    [(F.cross_entropy, 2), (sees_one_sample, 2), (looks_into_its_tensors, 41), (calls_numpy, 41)],
)
def test_losses_of_a_chunk_are_computed_at_once(loss, calls):
    """40 samples in two chunks: two calls, or one that fails and then one for each sample."""
    t, called = trained_task(samples=40), []

    def loss_fn(outputs, targets):
        called.append(1)
        return loss(outputs, targets)

    options = {"method": "signs", "generator": torch.Generator().manual_seed(3)}
    got = diagonal_fisher(t.model, loss_fn, t.x, t.y, **options)
    assert len(called) == calls
    signs = (torch.randint(0, 2, (40,), generator=torch.Generator().manual_seed(3)) * 2 - 1).tolist()
    assert_same(got, signs_fisher(t.model, lambda o, y: loss(o, y).sum(), t.x, t.y, signs, 32))


@pytest.mark.parametrize("case", ["classes", "ignored", "sequences", "probabilities"])
def test_cross_entropy_itself_is_the_loss_that_sees_one_sample(case):
    """It has a shorter way than others; a function around it takes the common one."""

    class PerPosition(nn.Linear):
        def forward(self, x):
            return super().forward(x).transpose(1, 2)

    model = (PerPosition if case == "sequences" else nn.Linear)(5, 3).double()
    x = torch.randn(6, 4, 5, dtype=torch.float64) if case == "sequences" else torch.randn(6, 5, dtype=torch.float64)
    y = torch.randint(0, 3, (6, 4) if case == "sequences" else (6,))
    if case == "ignored":
        y[2] = -100
    if case == "probabilities":
        y = torch.randn(6, 3, dtype=torch.float64).softmax(1)

    def signs(loss_fn, chunk_size):
        options = {"chunk_size": chunk_size, "generator": torch.Generator().manual_seed(3)}
        return diagonal_fisher(model, loss_fn, x, y, method="signs", **options)

    def ours(outputs, targets):
        return F.cross_entropy(outputs, targets)

    for a, b in zip(signs(F.cross_entropy, 3), signs(ours, 3), strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)
    exact = diagonal_fisher(model, F.cross_entropy, x, y)
    for a, b in zip(signs(F.cross_entropy, 1), exact, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


def test_a_loss_of_nested_outputs_and_targets():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 4).double()

        def forward(self, x):
            h = self.linear(x)
            return {"classes": h[:, :3], "value": h[:, 3], "scale": 2.0}

    def loss(outputs, targets):
        value = F.mse_loss(outputs["value"], targets[1])
        return F.cross_entropy(outputs["classes"], targets[0]) + outputs["scale"] * value

    model, x = Two(), torch.randn(6, 3, dtype=torch.float64)
    y = torch.randint(0, 3, (6,)), torch.randn(6, dtype=torch.float64)
    exact = diagonal_fisher(model, loss, x, y)
    for a, b in zip(diagonal_fisher(model, loss, x, y, method="signs", chunk_size=1), exact, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


def test_signs_are_exact_for_single_samples():
    t = trained_task()
    exact = diagonal_fisher(t.model, F.cross_entropy, t.x, t.y)
    for a, b in zip(
        diagonal_fisher(t.model, F.cross_entropy, t.x, t.y, method="signs", chunk_size=1), exact, strict=True
    ):
        torch.testing.assert_close(a, b, **TOLERANCE)


def test_signs_are_unbiased():
    """The mean of 1,000 draws lies within 5 standard errors of the exact value, for each of 357 weights.

    With right code the largest of 357 standardised errors exceeds 5 with a probability of 357 * 6e-7 = 2e-4 (and
    the seed is fixed), and their mean square is 1 within 20 %. The variance of one draw is 4 sum_{i<j} g_i² g_j²,
    at most 2 F² for F = sum g_i², so the standard error is at most 4.5 % of F: a bias of 23 % in a single weight,
    or of 4 % in all of them, fails.
    """
    t = trained_task(samples=32)
    exact = torch.cat([f.flatten() for f in diagonal_fisher(t.model, F.cross_entropy, t.x, t.y)])
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack(
        [
            torch.cat(
                [
                    f.flatten()
                    for f in diagonal_fisher(
                        t.model, F.cross_entropy, t.x, t.y, method="signs", chunk_size=32, generator=generator
                    )
                ]
            )
            for _ in range(1000)
        ]
    )
    alive = exact > 0
    error = (draws.mean(0) - exact)[alive] / (draws.std(0)[alive] / len(draws) ** 0.5)
    assert len(exact) == 357
    assert alive.sum() > 330
    assert error.abs().max() < 5
    assert error.square().mean().item() == pytest.approx(1, abs=0.2)
    assert (draws[:, ~alive] == 0).all()


def test_signs_without_generator_differ_from_call_to_call_and_follow_the_global_seed():
    t = trained_task()

    def draw():
        return diagonal_fisher(t.model, F.cross_entropy, t.x, t.y, method="signs")

    torch.manual_seed(0)
    one, other = draw(), draw()
    torch.manual_seed(0)
    again = draw()
    assert not same(one, other)
    assert same(one, again)


@pytest.mark.parametrize("method", ["exact", "signs"])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_disturbed(method, fails):
    t = trained_task(dropout=0.5, samples=100)  # more than three chunks
    t.model[4].eval()  # a layer whose mode the user has set
    for p in t.model.parameters():
        p.grad = torch.full_like(p, 3.0)
    modes, buffers = [m.training for m in t.model.modules()], [b.clone() for b in t.model.buffers()]

    calls = []

    def loss_fn(outputs, targets):
        calls.append(t.model.training)
        if fails and len(calls) >= 3:
            raise ZeroDivisionError
        return F.cross_entropy(outputs, targets)

    generator = torch.Generator().manual_seed(0) if method == "signs" else None
    state = torch.get_rng_state()
    try:
        diagonal_fisher(t.model, loss_fn, t.x, t.y, method=method, generator=generator)
    except ZeroDivisionError:
        assert fails
    else:
        assert not fails
    assert not any(calls)
    assert [m.training for m in t.model.modules()] == modes
    assert same(list(t.model.buffers()), buffers)
    assert all((p.grad == 3).all() for p in t.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_buffers_that_move_in_eval_mode_come_back():
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("replaced", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            self.replaced = self.replaced + 1
            return super().forward(x)

    model = Counting()
    buffers = dict(model.named_buffers())
    diagonal_fisher(model, F.cross_entropy, torch.randn(4, 3), torch.zeros(4, dtype=torch.long))
    assert model.calls == model.replaced == 0
    assert all(b is buffers[name] for name, b in model.named_buffers())


def test_frozen_and_unused_parameters():
    t = trained_task()
    t.model[0].weight.requires_grad_(False)
    t.model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    for method in ("exact", "signs"):
        got = diagonal_fisher(t.model, F.cross_entropy, t.x, t.y, method=method)
        names = [n for n, p in t.model.named_parameters() if p.requires_grad]
        assert len(got) == len(names)
        assert got[names.index("unused")].tolist() == [0, 0]


@pytest.mark.parametrize("options", [{}, {"chunk_size": 4}, {"method": "signs", "chunk_size": 1}])
def test_a_weight_that_is_used_twice(options):
    """Where methods that hook into layers go wrong."""
    model, x = TiedAutoencoder(), torch.randn(6, 5, dtype=torch.float64)
    assert_same(diagonal_fisher(model, F.mse_loss, x, x, **options), fisher(model, F.mse_loss, x, x))


def test_inputs_may_be_tuples_and_dicts():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2).double()

        def forward(self, a, b):
            return self.linear(a + 2 * b)

    model, a, b, y = Two(), *torch.randn(2, 5, 3, dtype=torch.float64), torch.randint(0, 2, (5,))
    expected = fisher(model.linear, F.cross_entropy, a + 2 * b, y)
    for inputs in ((a, b), {"a": a, "b": b}):
        for options in ({}, {"chunk_size": 2}, {"method": "signs", "chunk_size": 1}):
            assert_same(diagonal_fisher(model, F.cross_entropy, inputs, y, **options), expected)


class TakesADict(nn.Module):
    """A model whose one argument is a dict."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2).double()

    def forward(self, batch):
        return self.linear(batch["a"])


EVERY_WAY = pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"method": "signs", "chunk_size": 1}])


@EVERY_WAY
def test_a_model_that_takes_a_dict_itself_gets_it_in_a_tuple(options):
    model, a, y = TakesADict(), torch.randn(5, 3, dtype=torch.float64), torch.randint(0, 2, (5,))
    expected = fisher(model.linear, F.cross_entropy, a, y)
    assert_same(diagonal_fisher(model, F.cross_entropy, ({"a": a},), y, **options), expected)


A = torch.ones(5, 3, dtype=torch.float64)


@EVERY_WAY
@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (
            TakesADict(),
            {"a": A},
            "inputs (of FisherMask: those in dataset) must be what the model is called with, but model(**inputs) with "
            "the keys 'a' raised TypeError: TakesADict.forward() got an unexpected keyword argument 'a'; a model that "
            "takes the dict itself gets it in a tuple: (dict,) as inputs, ((dict,), y) as a batch or item",
        ),
        (
            nn.Linear(3, 2).double(),
            [A, A],
            "but model(*inputs) with 2 inputs raised TypeError: Linear.forward() takes 2 positional arguments but 3 "
            "were given; a model that takes the tuple itself gets it in a tuple: (tuple,) as inputs",
        ),
    ],
)
def test_inputs_that_the_model_does_not_take(model, inputs, message, options):
    with pytest.raises(UserValueError, match=re.escape(message)):
        diagonal_fisher(model, F.cross_entropy, inputs, torch.zeros(5).long(), **options)


@EVERY_WAY
def test_a_loss_that_is_no_tensor(options):
    model = nn.Linear(3, 2).double()
    with pytest.raises(
        TypeError, match=re.escape("loss_fn(outputs, targets) must return a tensor, but returned a tuple")
    ):
        diagonal_fisher(model, lambda outputs, _: (outputs.sum(), 0), A, torch.zeros(5).long(), **options)


def test_what_vmap_cannot_handle_is_not_blamed_on_the_inputs():
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2 if x.sum().item() > 0 else 1)

    with pytest.raises(RuntimeError, match="vmap") as raised:
        diagonal_fisher(Looks(3, 2).double(), F.cross_entropy, A, torch.zeros(5).long(), chunk_size=2)
    assert not isinstance(raised.value, UserValueError)


def test_half_precision_weights_give_float32():
    """Squared bf16 gradients of 1e-3 would lose most of their digits."""
    t = task(torch.float32)
    exact = diagonal_fisher(t.model, F.cross_entropy, t.x, t.y)
    half = diagonal_fisher(t.model.bfloat16(), F.cross_entropy, t.x.bfloat16(), t.y)
    assert {f.dtype for f in half} == {torch.float32}
    flat = [torch.cat([f.flatten() for f in fs]) for fs in (exact, half)]
    assert torch.corrcoef(torch.stack(flat))[0, 1] > 0.99


def test_recurrent_networks():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    model, x, y = Net().double(), torch.randn(6, 7, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    model.eval()
    assert_same(diagonal_fisher(model, F.cross_entropy, x, y), fisher(model, F.cross_entropy, x, y))
    assert not model.rnn.training
