"""Landscapes: known quadratics, points with their own weights, models as they were."""

from __future__ import annotations

import copy
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_landscapes import trajectory
from torch import nn
from torch.nn import functional as F

from cases import same, task, weights
from sparsam.analysis import fusion
from sparsam.analysis import landscape as module
from sparsam.analysis.directions import principal_directions, random_directions
from sparsam.analysis.fusion import FusedForward
from sparsam.analysis.hessian import top_eigenvalues
from sparsam.analysis.landscape import Landscape, fused_batch, joined, loss_landscape
from sparsam.analysis.objective import Objective
from sparsam.models import build_model
from sparsam.report.landscape_words import caption

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def regression(samples=40, inputs=6):
    """Linear regression, whose loss is a quadratic function of its weights."""
    model = nn.Linear(inputs, 3, dtype=torch.float64)
    return model, torch.randn(samples, inputs, dtype=torch.float64), torch.randn(samples, 3, dtype=torch.float64)


def known_losses(model, x, y, directions, axis):
    """f(w) + g·s + s·Hs/2 at each s = a d1 + b d2, with the gradient and the Hessian of the mean squared error."""
    inputs = np.hstack([x.numpy(), np.ones((len(x), 1))])
    w = np.hstack([model.weight.detach().numpy(), model.bias.detach().numpy()[:, None]]).T
    steps = [np.hstack([d[0].numpy(), d[1].numpy()[:, None]]).T for d in directions]
    rest = inputs @ w - y.numpy()

    def loss(*at):
        s = sum(a * step for a, step in zip(at, steps, strict=True))
        first, second = 2 * (inputs.T @ rest * s).sum(), 2 * (s * (inputs.T @ inputs @ s)).sum()
        return ((rest**2).sum() + first + second / 2) / rest.size

    if len(steps) == 1:
        return np.array([loss(a) for a in axis])
    return np.array([[loss(a, b) for a in axis] for b in axis])


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("given", [False, True])
def test_the_landscape_of_a_quadratic_is_the_quadratic(dimensions, given):
    model, x, y = regression()
    directions = random_directions(model, dimensions, seed=5)
    if given:
        directions = [[torch.randn_like(p) for p in model.parameters()] for _ in range(dimensions)]
    found = loss_landscape(
        model,
        F.mse_loss,
        (x, y),
        dimensions=dimensions,
        points=11,
        range=1.5,
        directions=directions if given else "random",
        seed=5,
    )
    assert found.axis.tolist() == np.linspace(-1.5, 1.5, 11).tolist()
    assert found.losses.shape == (11,) * dimensions
    np.testing.assert_allclose(found.losses, known_losses(model, x, y, directions, found.axis), **EXACT)
    assert found.losses[(5,) * dimensions] == found.centre == pytest.approx(F.mse_loss(model(x), y).item(), rel=1e-12)
    assert (found.complete, found.gaps) == (True, 0)


def test_the_usual_grid_is_the_papers():
    model, x, y = regression(samples=2)
    found = loss_landscape(model, F.mse_loss, (x, y))
    assert found.losses.shape == (50, 50)
    assert (found.axis[0], found.axis[-1]) == (-1, 1)


def test_one_seed_gives_one_landscape_bit_for_bit():
    t = task(torch.float32)
    one, again, other = (
        loss_landscape(t.model, F.cross_entropy, (t.x, t.y), points=6, seed=seed).losses for seed in (4, 4, 5)
    )
    assert (one == again).all()
    assert (one != other).all()


def test_the_memory_format_changes_nothing():
    t = task()
    plain = loss_landscape(t.model, F.cross_entropy, (t.x, t.y), points=4)
    t.model.to(memory_format=torch.channels_last)
    last = loss_landscape(t.model, F.cross_entropy, (t.x, t.y), points=4)
    np.testing.assert_allclose(last.losses, plain.losses, rtol=1e-10)


def test_unequal_batches_count_by_their_samples():
    t = task()
    whole = loss_landscape(t.model, F.cross_entropy, (t.x, t.y), points=4)
    parts = [(t.x[:5], t.y[:5]), (t.x[5:], t.y[5:])]
    for other in (
        loss_landscape(t.model, F.cross_entropy, parts, points=4),
        loss_landscape(t.model, F.cross_entropy, (t.x, t.y), points=4, batch_size=7),
        loss_landscape(t.model, nn.CrossEntropyLoss(reduction="none"), parts, points=4),
    ):
        np.testing.assert_allclose(other.losses, whole.losses, **EXACT)
        assert other.settings["samples"] == 24


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("data", ["pair", "batches", "once"])
@pytest.mark.parametrize("batch_size", [None, 10])
def test_fused_batches_are_larger_unless_their_size_is_given(monkeypatch, fused, data, batch_size):
    monkeypatch.setattr(module, "BATCH", 6)
    monkeypatch.setattr(module, "FUSED_BATCH", 12)
    monkeypatch.setattr(module, "fastest", lambda o: FusedForward(o.model, torch.float32) if fused else None)
    t, sizes = task(torch.float32), []

    def loss_fn(outputs, targets):
        sizes.append(len(targets))
        return F.cross_entropy(outputs, targets)

    batches = list(zip(t.x.split(8), t.y.split(8), strict=True))
    given = {"pair": (t.x, t.y), "batches": batches, "once": iter(batches)}[data]
    found = loss_landscape(
        t.model, loss_fn, given, dimensions=1, points=2, precision="bf16", batch_size=batch_size, range=0.1
    )
    whole = {None: [6, 6, 6, 6], 10: [10, 10, 4]}[batch_size] if data == "pair" else [8, 8, 8]
    whole = [12, 12] if fused and batch_size is None else whole
    assert sizes == whole * 3  # the centre and two points
    plain = loss_landscape(t.model, F.cross_entropy, (t.x, t.y), dimensions=1, points=2, range=0.1)
    np.testing.assert_allclose(found.losses, plain.losses, rtol=0.05)


def test_images_are_prepared_once_for_all_points(monkeypatch):
    calls = []
    windows = fusion._windows
    monkeypatch.setattr(fusion, "_windows", lambda *args, **options: calls.append(1) or windows(*args, **options))
    monkeypatch.setattr(module, "fastest", lambda o: FusedForward(o.model, torch.float32))
    model = build_model("resnet-small", 10).to(memory_format=torch.channels_last)
    x, y = torch.randn(10, 3, 8, 8), torch.randint(0, 10, (10,))
    loss_landscape(model, F.cross_entropy, list(zip(x.split(4), y.split(4), strict=True)), points=2, precision="bf16")
    assert len(calls) == 3  # for each batch


def test_joined_batches():
    def pairs(*sizes):
        return [(torch.rand(n, 8, 3, 3).to(memory_format=torch.channels_last), torch.rand(n)) for n in sizes]

    def sizes(batches):
        return [len(x) for x, _ in batches]

    given = pairs(4, 4, 3)
    found = joined(given, 6)
    assert sizes(found) == [6, 5]
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x, _ in found)
    for before, after in zip(zip(*given, strict=True), zip(*found, strict=True), strict=True):
        assert torch.equal(torch.cat(before), torch.cat(after))
    assert sizes(joined(given, 2)) == [4, 4, 3]  # not smaller than they were
    assert sizes(joined(given, 100)) == [11]
    mixed = [*given, (torch.rand(2, 8, 5, 5), torch.rand(2))]
    assert joined(mixed, 6) == mixed
    for other in (["a word"], torch.tensor(1), torch.zeros(99)):
        unusual = [(x, other) for x, _ in given]
        assert joined(unusual, 6) == unusual


@pytest.mark.parametrize(("memory", "size"), [(24, 5000), (40, 5000), (80, 10_000)])
def test_a_large_gpu_takes_more_at_a_time(monkeypatch, memory, size):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory * 2**30)
    )
    assert fused_batch(torch.device("cuda")) == size
    assert fused_batch(torch.device("cpu")) == 5000


@pytest.mark.parametrize("fails", [None, ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_afterwards_what_it_was(fails, training):
    t = task(torch.float32, dropout=0.5)
    t.model.train(training)
    t.model[4].eval()  # a layer whose mode the user has set
    with torch.no_grad():
        t.model[0].bias[0] = -0.0
    for p in t.model.parameters():
        p.grad = torch.full_like(p, 3.0)
    modes, before = [m.training for m in t.model.modules()], weights(t.model)
    pointers = [p.data_ptr() for p in t.model.parameters()]
    calls = []

    def loss_fn(outputs, targets):
        calls.append(t.model.training)
        if fails and len(calls) == 7:
            raise fails
        return F.cross_entropy(outputs, targets)

    state = torch.get_rng_state()
    try:
        loss_landscape(t.model, loss_fn, (t.x, t.y), points=4)
    except (ZeroDivisionError, KeyboardInterrupt) as error:
        assert type(error) is fails
    else:
        assert fails is None
    assert not any(calls)
    assert same(weights(t.model), before)
    assert [p.data_ptr() for p in t.model.parameters()] == pointers
    assert [m.training for m in t.model.modules()] == modes
    assert all((p.grad == 3).all() for p in t.model.parameters())
    assert all(p.requires_grad for p in t.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_frozen_weights_stay_and_shared_ones_move_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False, dtype=torch.float64)
            self.second = nn.Linear(4, 4, bias=False, dtype=torch.float64)
            self.second.weight = self.first.weight
            self.frozen = nn.Linear(4, 1, bias=False, dtype=torch.float64)
            self.frozen.weight.requires_grad_(False)

        def forward(self, x):
            return self.frozen(torch.tanh(self.second(torch.tanh(self.first(x)))))

    model, x = Tied(), torch.randn(5, 4, dtype=torch.float64)
    y = torch.zeros(5, 1, dtype=torch.float64)
    (direction,) = random_directions(model, 1, seed=2)
    assert len(direction) == 1
    found = loss_landscape(model, F.mse_loss, (x, y), dimensions=1, points=5, seed=2)
    for a, loss in zip(found.axis, found.losses, strict=True):
        w = model.first.weight.detach() + a * direction[0]
        outputs = torch.tanh(torch.tanh(x @ w.T) @ w.T) @ model.frozen.weight.T
        assert loss == pytest.approx(outputs.square().mean().item(), rel=1e-12)


def test_bf16_computes_each_point_with_its_own_weights():
    """Autocast keeps converted weights for as long as it lasts, unless it is told not to."""
    t = task(torch.float32)
    found = loss_landscape(t.model, F.cross_entropy, (t.x, t.y), dimensions=1, points=5, precision="bf16")
    (direction,) = random_directions(t.model, 1)
    for a, loss in zip(found.axis, found.losses, strict=True):
        model = copy.deepcopy(t.model).eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for p, d in zip(model.parameters(), direction, strict=True):
                p.add_(d, alpha=a)
            assert loss == F.cross_entropy(model(t.x), t.y).item()
    plain = loss_landscape(t.model, F.cross_entropy, (t.x, t.y), dimensions=1, points=5)
    assert (plain.losses != found.losses).all()
    np.testing.assert_allclose(found.losses, plain.losses, rtol=0.05)


def breaking(model, limit):
    """A loss that is NaN or infinite where the weights are far away."""
    start = model[0].weight.detach().clone()

    def loss_fn(outputs, targets):
        far = (model[0].weight - start).norm() > limit
        return torch.where(far, torch.inf if outputs.sum() > 0 else torch.nan, F.cross_entropy(outputs, targets))

    return loss_fn


def test_losses_that_are_not_finite_are_gaps():
    t = task()
    limit = 0.9 * random_directions(t.model, 1)[0][0].norm().item()
    found = loss_landscape(t.model, breaking(t.model, limit), (t.x, t.y), dimensions=1, points=11)
    assert np.isfinite(found.losses).tolist() == [abs(a) < 0.9 for a in found.axis.tolist()]
    assert found.gaps == 2
    assert found.complete
    assert math.isfinite(found.median)
    assert "Left blank: 2 points without a finite loss." in caption([found])


def test_a_centre_that_is_not_finite_is_refused():
    t = task()
    with pytest.raises(
        ValueError, match=r"loss at the model's own weights must be finite, but is nan: .* check the data"
    ):
        loss_landscape(t.model, F.cross_entropy, (t.x * math.nan, t.y))
    with torch.no_grad():
        t.model[3].weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"must be finite, but is nan: 3.weight has NaN or infinite values"):
        loss_landscape(t.model, F.cross_entropy, (t.x, t.y))


def test_a_plane_through_three_models_holds_their_losses(tmp_path):
    """Two checkpoints span the plane: at their coordinates the loss is theirs, biases and norms included."""
    t = task()
    checkpoints = trajectory(t.model, 2)
    torch.save({"model": checkpoints[0], "epoch": 3}, tmp_path / "run.pt")  # as a run's checkpoint
    torch.save(checkpoints[1], tmp_path / "plain.pt")  # as torch users write them
    files = [tmp_path / "run.pt", tmp_path / "plain.pt"]
    found = loss_landscape(t.model, F.cross_entropy, (t.x, t.y), directions="pca", checkpoints=files, points=3)
    assert sum(found.explained) == pytest.approx(1)
    for at, checkpoint in zip(found.path, checkpoints, strict=True):
        model = copy.deepcopy(t.model)
        model.load_state_dict({**t.model.state_dict(), **{n: checkpoint[n] for n, _ in model.named_parameters()}})
        expected = Objective(model, F.cross_entropy, (t.x, t.y)).loss().item()
        single = loss_landscape(
            t.model,
            F.cross_entropy,
            (t.x, t.y),
            directions=[
                [sum(a * x for a, x in zip(at, d, strict=True)) for d in zip(*pca(t, checkpoints), strict=True)]
            ],
            dimensions=1,
            points=3,
        )
        assert single.losses[2] == pytest.approx(expected, rel=1e-9)
    assert "principal, of checkpoints around w (small marks)" in caption([found])


def pca(t, checkpoints):
    return principal_directions(t.model, checkpoints, 2).directions


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    t = task()
    one = trajectory(t.model, 1)[0]

    def landscape(*checkpoints, **options):
        return loss_landscape(
            t.model, F.cross_entropy, (t.x, t.y), directions="pca", checkpoints=checkpoints, **options
        )

    with pytest.raises(
        ValueError, match="in 2 independent directions or more for 2 principal ones, but the 2 given differ in 1"
    ):
        landscape(one, t.model.state_dict())
    with pytest.raises(ValueError, match=r"in 1 independent directions or more .* but the 1 given differ in 0"):
        landscape(t.model.state_dict(), dimensions=1)
    with pytest.raises(ValueError, match=r"checkpoint 2 must have a tensor '0.weight' of shape .*, but has none"):
        landscape(one, {})
    with pytest.raises(
        ValueError, match=r"must have a tensor '0.weight' of shape \(4, 1, 3, 3\), but has one of shape \(1,\)"
    ):
        landscape({"0.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="checkpoint 1 must hold finite weights"):
        landscape({**one, "0.bias": one["0.bias"] * math.nan})
    with pytest.raises(
        ValueError, match='checkpoints must be given for directions="pca", and only then, but there are none'
    ):
        landscape()
    with pytest.raises(ValueError, match="only then, but directions is 'random'"):
        loss_landscape(t.model, F.cross_entropy, (t.x, t.y), checkpoints=[one])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimensions": 3}, "dimensions must be 1 or 2, but is 3"),
        ({"points": 1}, "points must be a whole number >= 2, but is 1"),
        ({"range": 0}, "range must be a finite number > 0, but is 0"),
        ({"range": math.inf}, "range must be a finite number > 0, but is inf"),
        ({"seed": -1}, "seed must be a whole number >= 0, but is -1"),
        ({"precision": "fp8"}, "precision must be one of 'fp32', 'bf16', but is 'fp8'"),
        ({"directions": "hessian"}, "directions must be one of 'random', 'pca', but is 'hessian'"),
        ({"directions": [[]]}, "directions must be 2 for dimensions=2, but are 1"),
        ({"directions": [[], []]}, "directions must have one tensor of its shape for each trainable parameter"),
    ],
)
def test_what_is_refused(options, message):
    t = task()
    with pytest.raises(ValueError, match=re.escape(message)):
        loss_landscape(t.model, F.cross_entropy, (t.x, t.y), **options)


def test_a_model_without_filters_is_refused():
    model = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="must have a trainable weight with filters"):
        loss_landscape(model, F.mse_loss, (torch.randn(4, 3), torch.randn(4, 3)))


def test_numbers_of_numpy_and_what_cannot_be_saved(tmp_path):
    t, file = task(), tmp_path / "l.npz"
    options = {"points": np.int64(3), "seed": np.int64(1), "file": file}
    assert loss_landscape(t.model, F.cross_entropy, (t.x, t.y), **options).settings["points"] == 3
    assert Landscape.load(file).complete
    with pytest.raises(TypeError, match="not JSON serializable"):  # before the first point
        loss_landscape(t.model, F.cross_entropy, (t.x, t.y), about={"run": tmp_path}, progress=lambda *_: 1 / 0)
    assert loss_landscape(t.model, F.cross_entropy, (t.x, t.y), dimensions=np.int64(1), points=2).losses.shape == (2,)
    for dimensions in (True, 1.0, 3):
        with pytest.raises(ValueError, match=rf"^dimensions must be 1 or 2, but is {dimensions}$"):
            loss_landscape(t.model, F.cross_entropy, (t.x, t.y), dimensions=dimensions)


def test_eigenvectors_are_directions():
    """Along the eigenvectors of a quadratic the loss is f(w) + g·s + λ a² / 2."""
    model, x, y = regression()
    objective = Objective(model, F.mse_loss, (x, y))
    found = top_eigenvalues(objective, 2, tolerance=1e-9)
    line = loss_landscape(
        model, F.mse_loss, (x, y), dimensions=1, points=5, directions=found.directions(objective)[1:], range=2.0
    )
    curvature = (line.losses[0] - 2 * line.losses[2] + line.losses[4]) / 2**2
    assert curvature == pytest.approx(found.values[1], rel=1e-8)
