"""Measuring a run's weights again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sparsam.runs.checkpoint import load_checkpoint
from sparsam.runs.directory import RunDirectory
from sparsam.training.trainer import Trainer


def evaluate_run(path: Path, *, best: bool, device: torch.device) -> dict[str, Any]:
    """Return loss and accuracy of the last or the best weights of a run, on the images it was evaluated on."""
    directory = RunDirectory(path)
    trainer = Trainer(directory.recipe(), directory, device=device)
    saved = load_checkpoint(directory.best if best else directory.last, device)
    trainer.model.load_state_dict(saved["model"])
    loss, accuracy, count = trainer.evaluate()
    return {
        "weights": "best" if best else "last",
        "when": f"epoch {saved['epoch']}" + (f" and {batch} batches" if (batch := saved.get("batch")) else ""),
        "evaluated_on": trainer.recipe.evaluated_on,
        "count": count,
        "loss": loss,
        "accuracy": accuracy,
    }
