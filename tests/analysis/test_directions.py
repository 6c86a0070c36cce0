"""Directions of a landscape: filters against readable loops, principal ones against numpy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from small_landscapes import trajectory
from torch import nn

from cases import same, task
from sparsam.analysis.directions import filter_normalised, principal_directions, random_directions
from sparsam.analysis.landscape import loss_landscape
from sparsam.selection import random_generator


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
