"""The objective of a trained run: its weights, its training images without augmentation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from sparsam.analysis.objective import Objective
from sparsam.randomness import random_generator
from sparsam.runs.build import build_loader, build_network
from sparsam.runs.checkpoint import load_checkpoint
from sparsam.runs.directory import RunDirectory
from sparsam.selection import Selection


def load_objective(
    run: str | Path,
    *,
    samples: int = 10_000,
    batch_size: int = 1000,
    best: bool = False,
    data_root: str | Path | None = None,
    device: torch.device | None = None,
) -> Objective:
    """Return the training loss of a run's weights over some of its training images.

    The images are drawn without replacement from seed 0, the same ones for all runs on the same data. They are not
    augmented, and the loss is the plain cross-entropy.

    Args:
        run: The directory of a run.
        samples: The number of images; at most all are taken.
        batch_size: The number of images in a batch.
        best: Take the weights of the best epoch, not of the last.
        data_root: Where the data is now, if it has moved since the run.
        device: Where the objective is computed; default: the CPU.
    """
    directory = RunDirectory(run)
    recipe, device = directory.recipe(), device or torch.device("cpu")
    if data_root is not None:
        recipe = replace(recipe, data=replace(recipe.data, root=str(data_root)))
    recipe = replace(recipe, train=replace(recipe.train, compile=False))  # which takes longer than it saves here
    loader = build_loader(recipe, device)
    model = build_network(recipe, loader.classes, loader.channels, device)
    saved = load_checkpoint(directory.best if best else directory.last, device)
    model.load_state_dict(saved["model"])
    images: Any = loader.samples()
    chosen = torch.randperm(len(images), generator=random_generator(0))[:samples].tolist()
    batches = DataLoader(Subset(images, chosen), batch_size=batch_size)
    return Objective(model, F.cross_entropy, batches)


def run_mask(run: str | Path, objective: Objective) -> Selection | None:
    """Return which weights of the objective the run perturbed in its last step; None if all or none."""
    directory = RunDirectory(run)
    saved = load_checkpoint(directory.last, objective.device)["optimizer"]
    made = saved.get("sparsam", {}).get("mask", {}).get("made")
    selection = made and made["selection"]
    if selection is None or all(m is True for m in selection):
        return None
    # The optimizer has all parameters of the model, in the model's order.
    by_parameter = dict(zip(objective.model.parameters(), selection, strict=True))
    return [by_parameter[p] for p in objective.params]
