"""How much the loss rises near the weights, and how SAM's gradient differs from SGD's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from cases import same, task, weights
from sparsam.analysis import Objective, average_case, gradient_difference, worst_case


def half_square(outputs, targets):
    return (outputs - targets).square().sum(1) / 2  # one loss a sample


def quadratic(values=(3.0, 1.0, 0.5), at=(1.0, -2.0, 2.0)):
    """f(w) = sum of values * w² / 2, over three samples that each see one weight."""
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([at]))
    x = torch.diag(torch.tensor(values, dtype=torch.float64).mul(3).sqrt())
    return Objective(model, half_square, (x, torch.zeros(3, 1, dtype=torch.float64)))


def f(values, w):
    return float((torch.tensor(values) * w.square()).sum() / 2)


VALUES, AT = (3.0, 1.0, 0.5), (1.0, -2.0, 2.0)


def test_the_objective_is_the_mean_over_samples():
    objective = quadratic()
    w = torch.tensor(AT, dtype=torch.float64)
    assert objective.loss().item() == pytest.approx(f(VALUES, w), rel=1e-12)
    torch.testing.assert_close(objective.gradient()[0][0], torch.tensor(VALUES, dtype=torch.float64) * w)
    v = torch.randn(1, 3, dtype=torch.float64)
    torch.testing.assert_close(objective.hessian_product([v])[0], torch.tensor(VALUES, dtype=torch.float64) * v)


def test_unequal_batches_count_by_their_samples():
    t = task()
    whole = Objective(t.model, F.cross_entropy, (t.x, t.y))
    parts = Objective(t.model, F.cross_entropy, [(t.x[:5], t.y[:5]), (t.x[5:], t.y[5:])])
    split = Objective(t.model, F.cross_entropy, (t.x, t.y), batch_size=7)
    v = [torch.randn_like(p) for p in whole.params]
    for other in (parts, split):
        assert other.loss().item() == pytest.approx(whole.loss().item(), rel=1e-12)
        for a, b in zip(other.gradient(), whole.gradient(), strict=True):
            torch.testing.assert_close(a, b)
        for a, b in zip(other.hessian_product(v), whole.hessian_product(v), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rho", [0.01, 0.5])
def test_the_worst_case_of_one_step_is_sams_perturbation(rho):
    w, a = torch.tensor(AT, dtype=torch.float64), torch.tensor(VALUES, dtype=torch.float64)
    g = a * w
    expected = f(VALUES, w + rho * g / g.norm()) - f(VALUES, w)
    assert worst_case(quadratic(), rho) == pytest.approx(expected, rel=1e-12)
    m = torch.tensor([True, False, True])
    masked = f(VALUES, w + rho * g / g.norm() * m) - f(VALUES, w)
    assert worst_case(quadratic(), rho, mask=[m.view(1, 3)]) == pytest.approx(masked, rel=1e-12)
    adaptive = f(VALUES, w + rho * w**2 * g / (w.abs() * g).norm()) - f(VALUES, w)
    assert worst_case(quadratic(), rho, adaptive=True) == pytest.approx(adaptive, rel=1e-12)


def test_more_steps_come_to_the_maximum_on_the_ball():
    """Of a quadratic in two variables the maximum on a circle is found by trying all angles."""
    values, at, rho = (3.0, 1.0), (0.1, 0.3), 0.7
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([at]))
    x = torch.diag(torch.tensor(values, dtype=torch.float64).mul(2).sqrt())
    objective = Objective(model, half_square, (x, torch.zeros(2, 1, dtype=torch.float64)))
    angles = torch.linspace(0, 2 * math.pi, 200_001, dtype=torch.float64)
    circle = torch.stack([at[0] + rho * angles.cos(), at[1] + rho * angles.sin()])
    best = float((torch.tensor(values).view(2, 1) * circle.square()).sum(0).max() / 2)
    start = sum(v * a * a for v, a in zip(values, at, strict=True)) / 2
    rises = [worst_case(objective, rho, steps=steps) for steps in (1, 2, 5, 50)]
    assert rises == sorted(rises)
    assert rises[-1] == pytest.approx(best - start, rel=1e-6)


def test_the_average_case_of_a_quadratic_is_half_its_trace():
    """E f(w + s z) - f(w) = s² trace / 2, s² = rho² / n; adaptive with the weights' squares."""
    objective, rho = quadratic(), 0.3
    mean, error = average_case(objective, rho, samples=2000)
    assert mean == pytest.approx(rho**2 / 3 * sum(VALUES) / 2, abs=4 * error)
    mean, error = average_case(objective, rho, samples=2000, adaptive=True)
    expected = rho**2 / 3 * sum(v * a * a for v, a in zip(VALUES, AT, strict=True)) / 2
    assert mean == pytest.approx(expected, abs=4 * error)
    assert average_case(objective, rho, seed=1) == average_case(objective, rho, seed=1)
    assert average_case(objective, rho, seed=1) != average_case(objective, rho, seed=2)


LOOKS = {
    "loss": lambda o: o.loss(),
    "gradient": lambda o: o.gradient(),
    "product": lambda o: o.hessian_product([torch.ones_like(p) for p in o.params]),
    "worst": lambda o: worst_case(o, 0.1, steps=3),
    "worst, adaptive": lambda o: worst_case(o, 0.1, adaptive=True),
    "average": lambda o: average_case(o, 0.1, samples=2),
    "gradients": lambda o: gradient_difference(o, 0.1),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("training", [True, False])
def test_the_model_comes_back_as_it_was(look, training):
    t = task(torch.float32, dropout=0.5)
    t.model.train(training)
    t.model[0].eval()
    t.loss().backward()
    before = weights(t.model), [p.grad.clone() for p in t.model.parameters()], torch.get_rng_state()
    LOOKS[look](Objective(t.model, F.cross_entropy, (t.x, t.y)))
    after = weights(t.model), [p.grad for p in t.model.parameters()], torch.get_rng_state()
    assert same(before[0], after[0])
    assert same(before[1], after[1])
    assert torch.equal(before[2], after[2])
    assert [m.training for m in t.model] == [False] + [training] * (len(t.model) - 1)


@pytest.mark.parametrize(("look", "call"), [("worst", 3), ("average", 2), ("gradients", 2)])
def test_the_weights_come_back_after_an_exception(look, call):
    t = task()
    calls = []

    def fails_later(outputs, targets):
        calls.append(1)
        if len(calls) == call:
            raise MemoryError
        return F.cross_entropy(outputs, targets)

    before = weights(t.model)
    with pytest.raises(MemoryError):
        LOOKS[look](Objective(t.model, fails_later, (t.x, t.y)))
    assert same(weights(t.model), before)


def test_dropout_is_off_and_batch_norm_uses_its_running_statistics():
    t = task(dropout=0.9)
    t.model.train()
    objective = Objective(t.model, F.cross_entropy, (t.x, t.y))
    t.model.eval()
    assert objective.loss().item() == F.cross_entropy(t.model(t.x), t.y).item()


@pytest.mark.parametrize("look", ["worst", "average", "gradients"])
def test_a_loss_that_is_not_finite_is_an_error(look):
    t = task()
    with pytest.raises(ValueError, match=r"must be finite, but (is nan|some are not)"):
        LOOKS[look](Objective(t.model, lambda outputs, targets: outputs.sum() * math.nan, (t.x, t.y)))


def test_frozen_weights_are_not_looked_at_and_shared_ones_once():
    t = task()
    t.model[0].requires_grad_(False)
    t.model.add_module("again", t.model[8])
    objective = Objective(t.model, lambda outputs, targets: outputs.square().mean(), (t.x, t.y))
    assert len(objective.params) == len({id(p) for p in objective.params}) == len(list(t.model.parameters())) - 2
    for p in t.model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="model must have a parameter that requires a gradient, but all are frozen"):
        Objective(t.model, F.cross_entropy, (t.x, t.y))


BATCHES = "data must be a pair of tensors or batches of (inputs, targets), but "
REFUSED = [
    (lambda t: (t.x, t.y[:3]), ValueError, "data must have a target for each input, but has 24 inputs and 3 targets"),
    (lambda t: [], ValueError, "data must hold at least one sample, but is empty"),
    (lambda t: [(t.x[:0], t.y[:0])], ValueError, "data must hold at least one sample, but is empty"),
    (lambda t: t.x, TypeError, f"{BATCHES}is a Tensor"),
    (lambda t: 3, TypeError, f"{BATCHES}is a int"),
    (lambda t: (t.x.numpy(), t.y.numpy()), TypeError, f"{BATCHES}holds a ndarray"),
    (lambda t: [(t.x, t.y, t.y)], TypeError, f"{BATCHES}holds a tuple of 3"),
    (lambda t: [{"x": t.x}], TypeError, f"{BATCHES}holds a dict"),
    (lambda t: [("some", t.y)], TypeError, "the inputs of a batch must hold a tensor of samples, but are str"),
]


@pytest.mark.parametrize(("data", "kind", "text"), REFUSED)
def test_data_that_is_refused(data, kind, text):
    t = task()
    with pytest.raises(kind) as error:
        Objective(t.model, F.cross_entropy, data(t))
    assert str(error.value) == text


def test_a_loader_that_shuffles_leaves_torchs_random_numbers():
    t = task()
    before = torch.get_rng_state()
    loader = DataLoader(TensorDataset(t.x, t.y), batch_size=7, shuffle=True)
    assert Objective(t.model, F.cross_entropy, loader).count == 24
    assert torch.equal(torch.get_rng_state(), before)


def test_an_empty_batch_counts_for_nothing():
    t = task()
    with_it = Objective(t.model, F.cross_entropy, [(t.x[:0], t.y[:0]), (t.x, t.y)])
    assert with_it.loss() == Objective(t.model, F.cross_entropy, (t.x, t.y)).loss()


def test_models_that_are_refused():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            return self.linear(x.sub_(0.5))

    x, y = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    words = nn.Sequential(nn.Embedding(5, 2, max_norm=1.0), nn.Flatten(), nn.Linear(6, 2))
    for model, inputs, text in [
        (
            Writes(),
            x,
            "model must not write into its inputs, but did, so the next loss would differ: let it clone them, or "
            "start with inplace=False",
        ),
        (words, x.long(), "model must not change its weights in a forward pass, but '0' has a max_norm"),
        (nn.Linear(3, 2, dtype=torch.complex64), x, "model must have real weights, but some are complex"),
    ]:
        with pytest.raises(ValueError) as error:
            Objective(model, F.cross_entropy, (inputs, y)).loss()
        assert str(error.value) == text


def test_a_clipping_threshold_is_no_embedding():
    model = nn.Linear(3, 2)
    model.max_norm = 1.0
    assert Objective(model, F.cross_entropy, (torch.ones(4, 3), torch.zeros(4, dtype=torch.long))).loss() > 0


def test_a_rise_without_end_is_infinite():
    """Whether the loss becomes infinite or NaN at w + eps."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    x = torch.ones(1, 1, dtype=torch.float64)
    for worse in (math.inf, math.nan):
        objective = Objective(model, lambda o, y, worse=worse: o.where(o <= 1, torch.tensor(worse)).mean(), (x, x))
        assert worst_case(objective, 0.1) == math.inf


def test_arguments_that_are_refused():
    objective = quadratic()
    for call, text in [
        (lambda: worst_case(objective, -1.0), "rho must be a finite number >= 0, but is -1.0"),
        (lambda: worst_case(objective, 0.1, steps=0), "steps must be a whole number >= 1, but is 0"),
        (lambda: worst_case(objective, 0.1, mask=[]), "mask must have an entry for each of 1 parameters, but has 0"),
        (lambda: average_case(objective, 0.1, samples=1), "samples must be a whole number >= 2, but is 1"),
        (
            lambda: gradient_difference(objective, 0.1, mask=[]),
            "mask must have an entry for each of 1 parameters, but has 0",
        ),
        (
            lambda: Objective(objective.model, half_square, (torch.ones(2, 3), torch.ones(2, 1)), batch_size=0),
            "batch_size must be a whole number >= 1, but is 0",
        ),
        (lambda: gradient_difference(objective, 0.1, bins=0), "bins must be a whole number >= 1, but is 0"),
    ]:
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == text


def test_a_parameter_of_the_model_itself_is_counted_once():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift, self.linear = nn.Parameter(torch.ones(3)), nn.Linear(3, 2)

        def forward(self, x):
            return self.linear(x + self.shift).tanh()

    found = gradient_difference(Objective(Shifted(), F.cross_entropy, (torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))))
    assert {name: sum(row) for name, row in found.counts.items()} == {"": 11, "shift": 3, "linear": 8}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("adaptive", [False, True])
def test_gradient_differences_against_a_loop_over_single_weights(masked, adaptive):
    t = task()
    objective, rho, bins = Objective(t.model, F.cross_entropy, (t.x, t.y)), 0.2, 50
    mask = [torch.rand_like(p) < 0.3 for p in objective.params] if masked else None
    options = {"bins": bins, "mask": mask, "adaptive": adaptive}
    found = gradient_difference(objective, rho, **options)
    sgd, before = objective.gradient(), [p.detach().clone() for p in objective.params]
    scales = [p.abs() if adaptive else torch.ones_like(p) for p in before]
    norm = math.sqrt(sum(float((s * g).square().sum()) for s, g in zip(scales, sgd, strict=True)))
    with torch.no_grad():
        for i, (p, s, g) in enumerate(zip(objective.params, scales, sgd, strict=True)):
            p += rho * s.square() * g / norm * (mask[i] if masked else 1)
    sam = objective.gradient()
    counts, below = [0] * bins, 0
    for a, b in zip(sam, sgd, strict=True):
        for x, y in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True):
            r = -math.inf if x == y else math.inf if y == 0 else math.log(abs((x - y) / y))
            below += r < 0
            counts[min(max(int((r - -12) / 20 * bins) if math.isfinite(r) else (r > 0) * bins, 0), bins - 1)] += 1
    assert found.counts[""] == counts
    assert found.below_zero[""] == below / sum(counts)
    assert sum(found.counts["3"]) == sum(p.numel() for p in t.model[3].parameters())
    assert [sum(c) for c in zip(*(row for name, row in found.counts.items() if name), strict=True)] == counts
    with torch.no_grad():
        for p, w in zip(objective.params, before, strict=True):
            p.copy_(w)
    two = [
        gradient_difference(Objective(t.model, F.cross_entropy, (t.x[s], t.y[s])), rho, **options)
        for s in (slice(0, 10), slice(10, 20))
    ]
    both = Objective(t.model, F.cross_entropy, (t.x[:20], t.y[:20]), batch_size=10)
    added = [a + b for a, b in zip(two[0].counts[""], two[1].counts[""], strict=True)]
    assert gradient_difference(both, rho, **options).counts[""] == added
    assert found.edges[0] == -12
    assert found.edges[-1] == 8
