"""Landscapes of small models, and losses with gaps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional as F

from cases import task
from sparsam.analysis.landscape import loss_landscape


def trajectory(model, count, scale=0.1):
    return [
        {
            name: p + scale * torch.randn_like(p) if p.is_floating_point() else p
            for name, p in model.state_dict().items()
        }
        for _ in range(count)
    ]


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
