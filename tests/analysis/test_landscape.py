"""Landscapes: known quadratics, directions against readable loops, resuming bit for bit, models as they were, pictures."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from browser import Page
from commands import invoke
from torch import nn
from torch.nn import functional as F

from cases import same, task, weights
from sparsam.analysis import fusion
from sparsam.analysis import landscape as module
from sparsam.analysis.directions import filter_normalised, principal_directions, random_directions
from sparsam.analysis.fusion import FusedForward
from sparsam.analysis.hessian import top_eigenvalues
from sparsam.analysis.landscape import Landscape, fused_batch, joined, loss_landscape
from sparsam.analysis.objective import Objective
from sparsam.cli import landscape as command
from sparsam.data import load_digits
from sparsam.models import build_model
from sparsam.report.landscape_figure import draw_figures
from sparsam.report.landscape_page import write_landscapes
from sparsam.report.landscape_scale import Scale
from sparsam.report.landscape_words import caption, labels
from sparsam.selection import random_generator
from sparsam.training.trainer import Interrupted

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


def test_directions_are_normalised_filter_by_filter():
    t = task()
    found = random_directions(t.model, 2, seed=3)
    for k, direction in enumerate(found):
        generator, direction = random_generator(3, k), iter(direction)
        for p in t.model.parameters():
            draw = torch.randn(p.shape, dtype=torch.float64, generator=generator)
            d = next(direction)
            if p.dim() < 2:
                assert not d.any()
                continue
            for i in range(len(p)):
                expected = draw[i] / draw[i].square().sum().sqrt() * p[i].square().sum().sqrt()
                torch.testing.assert_close(d[i], expected, rtol=1e-12, atol=0)
        assert next(direction, None) is None


def test_biases_and_normalisation_are_not_moved():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3, padding=1)
            self.norm = nn.LayerNorm([2, 4, 4])  # its weight has three dimensions
            self.batch_norm = nn.BatchNorm2d(2)
            self.position_bias = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return (self.batch_norm(self.norm(self.conv(x))) + self.position_bias).flatten(1).sum(1)

    model = Odd()
    moved = {
        name for (name, _), d in zip(model.named_parameters(), random_directions(model, 1)[0], strict=True) if d.any()
    }
    assert moved == {"conv.weight"}
    seen = set()

    def loss_fn(outputs, targets):
        seen.update((name, p.sum().item()) for name, p in model.named_parameters())
        return (outputs - targets).square()

    loss_landscape(model, loss_fn, (torch.randn(3, 1, 4, 4), torch.zeros(3)), points=3, dimensions=1)
    assert {name for name, _ in seen if sum(n == name for n, _ in seen) > 1} == {"conv.weight"}


def test_runs_share_the_draw_and_keep_their_own_lengths():
    one, other = task(seed=0).model, task(seed=1).model
    for d, e, p, q in zip(
        *random_directions(one, 1), *random_directions(other, 1), one.parameters(), other.parameters(), strict=True
    ):
        if p.dim() > 1:
            a, b = (t.flatten(1) / t.flatten(1).norm(dim=1, keepdim=True) for t in (d, e))
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(d.flatten(1).norm(dim=1), p.flatten(1).norm(dim=1))
            torch.testing.assert_close(e.flatten(1).norm(dim=1), q.flatten(1).norm(dim=1))


def test_the_draw_does_not_depend_on_memory_format_or_frozen_layers():
    t = task()
    plain = random_directions(t.model, 2)
    last = random_directions(copy.deepcopy(t.model).to(memory_format=torch.channels_last), 2)
    assert all(same([a.contiguous() for a in x], [b.contiguous() for b in y]) for x, y in zip(plain, last, strict=True))
    t.model[0].weight.requires_grad_(False)
    for before, now in zip(plain, random_directions(t.model, 2), strict=True):
        assert same(now, before[1:])


def test_a_filter_of_zeros_is_not_moved():
    assert filter_normalised(torch.ones(2, 2), torch.tensor([[0.0, 0.0], [3.0, 4.0]]))[0].tolist() == [0, 0]


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


# Interrupting and resuming


def stopping_at(count, error=KeyboardInterrupt):
    def progress(finished, total):
        assert total == 25
        if finished == count:
            raise error

    return progress


@pytest.mark.parametrize("stops", [(1,), (7, 24), (10, 11, 20)])
def test_an_interrupted_grid_goes_on_bit_for_bit(tmp_path, stops):
    t = task(torch.float32)
    whole = loss_landscape(t.model, F.cross_entropy, (t.x, t.y), points=5)
    file, calls = tmp_path / "some" / "landscape.npz", []

    def loss_fn(outputs, targets):
        calls.append(len(targets))
        return F.cross_entropy(outputs, targets)

    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            loss_landscape(t.model, loss_fn, (t.x, t.y), points=5, file=file, progress=stopping_at(stop))
        kept = Landscape.load(file)
        assert (kept.finished, kept.complete, kept.gaps) == (stop, False, 0)
        assert (kept.losses.ravel()[:stop] == whole.losses.ravel()[:stop]).all()
        assert np.isnan(kept.losses.ravel()[stop:]).all()
    found = loss_landscape(t.model, loss_fn, (t.x, t.y), points=5, file=file)
    assert (found.losses == whole.losses).all()
    assert len(calls) == 25 + len(stops) + 1  # no point twice; the centre once each time
    assert [f.name for f in file.parent.iterdir()] == ["landscape.npz"]
    again = loss_landscape(t.model, loss_fn, (t.x, t.y), points=5, file=file)
    assert (again.losses == whole.losses).all()
    assert len(calls) == 25 + len(stops) + 2


def test_what_is_finished_is_kept_after_an_error_too(tmp_path):
    t, calls = task(), []

    def loss_fn(outputs, targets):
        calls.append(0)
        if len(calls) == 1 + 9:
            raise ZeroDivisionError
        return F.cross_entropy(outputs, targets)

    with pytest.raises(ZeroDivisionError):
        loss_landscape(t.model, loss_fn, (t.x, t.y), points=5, file=tmp_path / "l.npz")
    assert Landscape.load(tmp_path / "l.npz").finished == 8


def test_points_are_saved_on_the_way(tmp_path):
    t, file, seen = task(), tmp_path / "l.npz", []

    def progress(finished, total):
        seen.append(Landscape.load(file).finished if file.exists() else 0)

    loss_landscape(t.model, F.cross_entropy, (t.x, t.y), points=5, file=file, save_every=0, progress=progress)
    assert seen == [0, *range(25)]  # each time what the point before had left


def test_another_setting_does_not_mix(tmp_path):
    t, file = task(), tmp_path / "l.npz"

    def landscape(**options):
        given = {"points": 5, "file": file, **options}
        return loss_landscape(given.pop("model", t.model), F.cross_entropy, given.pop("data", (t.x, t.y)), **given)

    landscape()
    before = file.read_bytes()
    for options, difference in [
        ({"points": 6}, r"points 5, now 6\."),
        ({"range": 2}, r"range 1.0, now 2.0\."),
        ({"seed": 1}, r"seed 0, now 1\."),
        ({"dimensions": 1}, r"dimensions 2, now 1\."),
        ({"precision": "bf16"}, r"precision fp32, now bf16\."),
        ({"data": (t.x[:9], t.y[:9])}, r"samples 24, now 9\."),
        ({"data": (t.x + 1, t.y)}, r"loss at the centre .*, now .* \(other data, or another loss function\)"),
        ({"model": task(seed=1).model}, r"weights \w{16}, now \w{16}\."),
        ({"points": 4, "seed": 3}, r"points 5, now 4; seed 0, now 3\."),
    ]:
        with pytest.raises(ValueError, match=rf"{re.escape(str(file))} holds .* does not mix .*: {difference}"):
            landscape(**options)
    assert file.read_bytes() == before


def test_a_file_holds_the_whole_landscape(tmp_path):
    t = task()
    about = {"label": "SAM", "seed": 3}
    found = loss_landscape(t.model, F.cross_entropy, (t.x, t.y), points=3, file=tmp_path / "l.npz", about=about)
    read = Landscape.load(tmp_path / "l.npz")
    for key, value in vars(found).items():
        assert np.array_equal(value, getattr(read, key)), key
    with np.load(tmp_path / "l.npz") as arrays:  # numbers and text, no pickles
        assert set(arrays) == {"losses", "axis", "centre", "finished", "path", "words"}
        assert json.loads(str(arrays["words"]))["settings"]["samples"] == 24
    (tmp_path / "l.npz").write_bytes((tmp_path / "l.npz").read_bytes()[:99])
    with pytest.raises(ValueError, match=r"l\.npz cannot be read as a landscape"):
        Landscape.load(tmp_path / "l.npz")
    with pytest.raises(ValueError, match="there is no landscape at nowhere"):
        Landscape.load("nowhere")


# Losses that are not finite


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
        ValueError, match=r"loss at the model's own weights must be finite, but is nan: .* look at the data"
    ):
        loss_landscape(t.model, F.cross_entropy, (t.x * math.nan, t.y))
    with torch.no_grad():
        t.model[3].weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"must be finite, but is nan: 3.weight has NaN or infinite values"):
        loss_landscape(t.model, F.cross_entropy, (t.x, t.y))


# Principal directions


def trajectory(model, count, scale=0.1):
    return [
        {
            name: p + scale * torch.randn_like(p) if p.is_floating_point() else p
            for name, p in model.state_dict().items()
        }
        for _ in range(count)
    ]


def test_principal_directions_are_those_of_numpy():
    t = task()
    checkpoints = trajectory(t.model, 5)
    found = principal_directions(t.model, checkpoints, 2)
    names = [name for name, _ in t.model.named_parameters()]
    rows = np.array(
        [torch.cat([(c[n] - p).detach().flatten() for n, p in t.model.named_parameters()]).numpy() for c in checkpoints]
    )
    _, sizes, axes = np.linalg.svd(rows, full_matrices=False)
    for k in range(2):
        assert [d.shape for d in found.directions[k]] == [t.model.state_dict()[n].shape for n in names]
        d = torch.cat([x.flatten() for x in found.directions[k]]).numpy()
        along = rows @ axes[k]
        farthest = along[np.abs(along).argmax()]
        np.testing.assert_allclose(d, farthest * axes[k], rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(found.path[:, k], along / farthest, rtol=1e-8, atol=1e-10)
    assert np.abs(found.path).max(0) == pytest.approx([1, 1], rel=1e-12)
    assert found.explained == pytest.approx((sizes[:2] ** 2 / (sizes**2).sum()).tolist(), rel=1e-10)


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


# Pictures


def landscapes(dimensions=2, points=9, **options):
    found = []
    for seed, label in enumerate(("SGD", "SAM", "<b>SSAM</b> & co")):
        t = task(seed=seed)
        about = {"label": label, "seed": 0, "setup": "tiny on noise"}
        found.append(
            loss_landscape(
                t.model, F.cross_entropy, (t.x, t.y), dimensions=dimensions, points=points, about=about, **options
            )
        )
    return found


def with_losses(shown, change):
    return replace(shown, losses=change(shown.losses.copy()))


def gap(losses):
    losses[-2:] = np.nan
    losses[0] = np.inf
    return losses


PICTURES = {
    "plane": lambda: landscapes(),
    "one": lambda: landscapes()[:1],
    "line": lambda: landscapes(1),
    "many": lambda: landscapes(points=4) * 3,
    "gaps": lambda: [with_losses(shown, gap) for shown in landscapes()],
    "line-gaps": lambda: [with_losses(shown, gap) for shown in landscapes(1)],
    "nothing": lambda: [with_losses(shown, lambda losses: losses * np.nan) for shown in landscapes()],
    "constant": lambda: [replace(with_losses(shown, np.ones_like), centre=1.0) for shown in landscapes()],
    "negative": lambda: [with_losses(shown, lambda losses: losses - 5) for shown in landscapes()],
    "wide": lambda: [with_losses(shown, lambda losses: losses**9) for shown in landscapes()],
    "unfinished": lambda: [replace(with_losses(shown, gap), finished=63) for shown in landscapes()],
    "pca": lambda: [
        loss_landscape(
            t.model, F.cross_entropy, (t.x, t.y), points=5, directions="pca", checkpoints=trajectory(t.model, 4)
        )
        for t in [task()]
    ],
}


@pytest.mark.parametrize("name", PICTURES)
def test_figures_are_written(name, tmp_path):
    from matplotlib.image import imread

    shown = PICTURES[name]()
    files = draw_figures(shown, tmp_path / "figures")
    line = shown[0].losses.ndim == 1
    names = ["landscape-line"] if line else ["landscape-contour", "landscape-surface"]
    assert [f.name for f in files] == [f"{n}.{suffix}" for n in names for suffix in ("png", "svg")]
    for file in files:
        if file.suffix == ".png":
            colours = np.unique((imread(file)[..., :3] * 255).astype(int).reshape(-1, 3), axis=0)
            assert len(colours) > (20 if line or name in ("nothing", "constant") else 300)
        else:
            assert file.read_text().count("<path") > 20
    page = write_landscapes(shown, tmp_path / "page.html").read_text()
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)
    assert page.count("<script") == 2
    assert "<b>SSAM" not in page


def test_runs_share_one_scale():
    shown = landscapes()
    scale = Scale.of(shown)
    values = np.concatenate([[*s.losses.ravel(), s.centre] for s in shown])
    assert (scale.low, scale.high) == (values.min(), values.max())
    assert not scale.log
    wide = Scale.of([with_losses(shown[0], lambda losses: 1e3 * losses), *shown])
    assert wide.log
    assert wide.low == scale.low
    assert Scale(0.02, 130, True).ticks() == pytest.approx([0.03, 0.1, 0.3, 1, 3, 10, 30, 100])
    assert Scale(-0.3, 1.1, False).ticks() == pytest.approx([0, 0.5, 1])
    assert Scale(1e-9, 1e9, True).ticks(4)[0] == pytest.approx(1e-9)
    gaps = with_losses(shown[0], gap)
    assert Scale.of([gaps]).high < math.inf


def test_labels_tell_runs_apart():
    def named(*abouts):
        return labels([replace(shown, about=about) for shown, about in zip(landscapes(points=2), abouts, strict=False)])

    assert named({"label": "SGD"}, {"label": "SAM"}) == ["SGD", "SAM"]
    assert named({"label": "SAM", "seed": 0}, {"label": "SAM", "seed": 1}) == ["SAM, seed 0", "SAM, seed 1"]
    twice = {"label": "SAM", "seed": 0}
    assert named({**twice, "run": "a"}, {**twice, "run": "b"}) == ["a", "b"]
    assert named({}, {}) == ["loss (1)", "loss (2)"]


def test_the_caption_says_what_is_drawn():
    text = caption(landscapes(points=4))
    assert "Mean loss over 24 samples at w + a·d₁ + b·d₂, model in eval mode, fp32, 4×4 points" in text
    assert "Directions: random (seed 0), each filter scaled to the length of the run’s own filter" in text
    assert "biases and normalisation parameters are not moved" in text
    assert "blank" not in text
    assert "Unfinished: 18 points are" in caption(PICTURES["unfinished"]()[:1])


# The page in a real browser


def test_the_page_can_be_turned_and_read(chromium, tmp_path):
    from selenium.webdriver import ActionChains

    shown = [with_losses(landscapes()[0], gap), *landscapes()[1:]]
    page = Page(chromium, write_landscapes(shown, tmp_path / "page.html")).open()
    page.problems()  # those of earlier pages
    page.open()
    assert page.text(".panels h2") == ["SGD", "SAM", "<b>SSAM</b> & co"]
    picture = "return document.querySelectorAll('.plot canvas')[arguments[0]].toDataURL()"
    before = [page.js(picture, i) for i in range(6)]
    assert len(set(before)) == 6

    middle = page.all(".plot.map canvas")[1]
    ActionChains(chromium).move_to_element(middle).perform()
    tip = page.text(".tip:not([hidden])")[0].split("\n")
    a, b = (float(value.replace("−", "-")) for value in re.findall(r"[−\d.]+", tip[0]))
    row, column = (int(np.abs(shown[0].axis - value).argmin()) for value in (b, a))
    assert tip[1:] == [
        text
        for s, name in zip(shown, page.text(".panels h2"), strict=True)
        for text in (name, f"{s.losses[row, column]:#.4g}")
    ]
    page.keys(".card[data-run='1'] .map", "RIGHT", "UP")
    assert page.text(".tip:not([hidden])")[0] != tip[0]
    ActionChains(chromium).move_to_element(page.one("h1")).perform()
    page.js("document.activeElement.blur()")
    wait(page)
    assert page.text(".tip:not([hidden])") == []
    assert [page.js(picture, i) for i in range(6)] == before

    surface = page.all(".plot.surface canvas")[0]
    ActionChains(chromium).click_and_hold(surface).move_by_offset(60, -20).release().perform()
    ActionChains(chromium).move_to_element(page.one("h1")).perform()
    wait(page)
    turned = [page.js(picture, i) for i in range(6)]
    assert all(a != b for a, b in zip(turned[::2], before[::2], strict=True))  # all surfaces together
    assert turned[1::2] == before[1::2]  # and no map
    page.click("#reset")
    wait(page)
    assert [page.js(picture, i) for i in range(6)] == before

    page.click("#legend button[data-run='0']")
    assert page.text(".card:not([hidden]) h2") == ["SAM", "<b>SSAM</b> & co"]
    page.click("#log")
    page.click("#theme")
    page.open(400, phone=True)
    assert page.js("return document.documentElement.scrollWidth") <= 400
    assert page.js("return performance.getEntriesByType('resource').map(entry => entry.name)") == []
    assert page.problems() == []


def wait(page):
    """Until what was asked for is drawn."""
    page.browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def test_the_page_of_a_line(chromium, tmp_path):
    shown = landscapes(1)
    page = Page(chromium, write_landscapes([with_losses(shown[0], gap), *shown[1:]], tmp_path / "page.html")).open()
    page.problems()
    page.open()
    lines = page.all("path[data-run]")
    assert [len(re.findall("[ML]", line.get_attribute("d"))) for line in lines] == [7, 10, 10]  # with the centre
    page.keys(".plot", "RIGHT", "LEFT")
    tip = page.text(".tip:not([hidden])")[0].split("\n")
    assert tip[0] == "a = −0.25"
    assert tip[2::2] == [f"{s.losses[3]:#.4g}" for s in shown]
    assert page.problems() == []


# The command


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    for method in ("sgd", "sam"):
        options = ["--set", "train.epochs=1", "--device", "cpu", "--output", place / method]
        invoke("train", f"recipes/digits-{method}.toml", *options)
    return place


def test_the_command_end_to_end(runs, tmp_path):
    options = ["--points", 4, "--samples", 5000, "--device", "cpu", "-o", tmp_path]
    text = invoke("landscape", runs / "sgd", runs / "sam", *options).stdout
    for name in ("landscape-contour.png", "landscape-contour.svg", "landscape-surface.png", "landscape-surface.svg"):
        assert (tmp_path / name).stat().st_size > 20_000
    assert (tmp_path / "landscape.html").stat().st_size > 20_000
    assert "landscape.html" in text.replace("\n", "")
    data = load_digits().train
    for name, method in (("sgd", "SGD"), ("sam", "SAM")):
        found = Landscape.load(runs / name / "analysis" / "landscape.npz")
        model = build_model("resnet-small", 10, channels=1).double().eval()
        model.load_state_dict(torch.load(runs / name / "checkpoints" / "last.pt", weights_only=True)["model"])
        with torch.no_grad():
            expected = F.cross_entropy(model(images(data)), data.y).item()
        assert found.centre == pytest.approx(expected, rel=1e-4)
        assert found.settings["samples"] == len(data.y)
        assert found.about == {
            "label": method,
            "seed": 0,
            "run": name,
            "setup": "resnet-small on digits",
            "weights": "last",
            "epochs": 1,
        }
        assert re.search(rf"{name} +{found.centre:.4g} +{found.median:.4g} +{found.losses.max():.4g} +0 +16", text)

    # Again with the same settings: nothing is computed; with others: refused.
    file = runs / "sgd" / "analysis" / "landscape.npz"
    before = Landscape.load(file)
    marked = before.losses + 1
    replace(before, losses=marked).save(file)
    invoke("landscape", runs / "sgd", *options)
    assert Landscape.load(file).losses.tobytes() == marked.tobytes()
    before.save(file)
    done = invoke("landscape", runs / "sgd", *options, "--seed", 7, code=1)
    assert "seed 0, now 7. Delete it to start anew (--overwrite does)" in " ".join(done.stderr.split())
    invoke("landscape", runs / "sgd", *options, "--overwrite", "--precision", "fp8", code=1)
    assert Landscape.load(file).settings["seed"] == 0
    invoke("landscape", runs / "sgd", *options, "--seed", 7, "--overwrite")
    assert Landscape.load(file).settings["seed"] == 7
    before.save(file)


def images(data):
    """The digits as the trainer feeds them, in float64."""
    from sparsam.data import Augmentation, ResidentLoader

    loader = ResidentLoader(load_digits(), 100, Augmentation(0, False, 0, 1.0), seed=0, device=torch.device("cpu"))
    return torch.stack([loader.samples()[i][0] for i in range(len(data.y))]).double()


def test_the_command_draws_again_without_a_model(runs, tmp_path):
    place = tmp_path / "moved"
    for name in ("sgd", "sam"):
        t = task()
        loss_landscape(t.model, F.cross_entropy, (t.x, t.y), points=3, file=place / name / "analysis" / "landscape.npz")
    invoke("landscape", place / "sgd", place / "sam", "--redraw", "-o", tmp_path / "out")
    assert (tmp_path / "out" / "landscape-surface.svg").stat().st_size > 10_000
    loss_landscape(t.model, F.cross_entropy, (t.x, t.y), points=4, file=place / "c" / "analysis" / "landscape.npz")
    done = invoke("landscape", place / "sgd", place / "c", "--redraw", "-o", tmp_path / "out", code=1)
    assert "to be compared, but points is 3 for" in done.stderr
    done = invoke("landscape", place / "d", "--redraw", code=1)
    assert "compute it with: sparsam landscape" in done.stderr


def test_the_command_along_principal_directions(runs, tmp_path):
    options = ["--points", 3, "--samples", 50, "--device", "cpu", "-o", tmp_path, "--directions", "pca"]
    other = ["--checkpoint", runs / "sam" / "checkpoints" / "last.pt"]
    invoke("landscape", runs / "sgd", "--dimensions", 1, *options, *other)
    found = Landscape.load(runs / "sgd" / "analysis" / "landscape-line.npz")
    assert found.path.tolist() == [[1.0]]
    assert found.settings["samples"] == 50
    assert {f.name for f in tmp_path.iterdir()} == {f"landscape-line.{suffix}" for suffix in ("png", "svg", "html")}
    done = invoke("landscape", runs / "sgd", *options, *other, code=1)
    assert "2 principal ones, but the 1 given differ in 1" in done.stderr


def test_the_command_refuses_before_it_computes(runs, tmp_path):
    for arguments, message in [
        ([tmp_path], "is not a run directory"),
        (
            [runs / "sgd", "--checkpoint", "x.pt"],
            "--checkpoint must be given for --directions pca, and only then, but --directions is random",
        ),
        ([runs / "sam", "--directions", "pca", "--checkpoint", "x.pt"], "there is no checkpoint at x.pt"),
        ([runs / "sam", "--precision", "fp8"], "precision must be one of"),
    ]:
        assert message in invoke("landscape", *arguments, "--device", "cpu", code=1).stderr


def test_ctrl_c_keeps_the_points_and_the_same_command_goes_on(runs, monkeypatch):
    load, calls = command.load_objective, []
    options = {"samples": 20, "best": False, "directions": "random", "checkpoints": [], "device": torch.device("cpu")}
    settings = {"dimensions": 1, "points": 6, "range": 1.0, "seed": 0, "precision": "fp32"}

    def interrupted(run, **options):
        objective = load(run, **options)

        def loss_fn(outputs, targets):
            calls.append(0)
            if len(calls) == 1 + 3:
                os.kill(os.getpid(), signal.SIGINT)
            return F.cross_entropy(outputs, targets)

        objective.loss_fn = loss_fn
        return objective

    monkeypatch.setattr(command, "load_objective", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match="sam: stopped after 3 of 6 points, which are kept; the same command goes on"):
        command.measure(runs / "sam", **options, **settings)
    assert signal.getsignal(signal.SIGINT) is handler
    found = command.measure(runs / "sam", **options, **settings)
    assert found.complete
    assert len(calls) == 1 + 3 + 1 + 3
    objective = load(runs / "sam", samples=20, device=torch.device("cpu"))
    whole = loss_landscape(objective.model, objective.loss_fn, objective.batches, dimensions=1, points=6)
    assert (found.losses == whole.losses).all()


def test_progress_is_told_in_lines_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(command, "LINES_EVERY", 0.0)
    lines = command._Lines("run")
    monkeypatch.setattr(command.time, "monotonic", lambda: lines.start + 30)
    for finished in (10, 13):  # ten of an earlier command
        lines.tell(finished, 25)
    assert capsys.readouterr().err == "run: 13/25 points, 2:00 left\n"
