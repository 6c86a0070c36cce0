"""Starting runs, and continuing them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sparsam.runs.directory import RunDirectory
from sparsam.runs.recipe import Recipe
from sparsam.training.environment import default_device, describe_environment, warn_if_moved
from sparsam.training.progress import Progress
from sparsam.training.ranks import run_directory
from sparsam.training.trainer import Trainer


def train(
    recipe: Recipe, path: str | Path, *, device: torch.device | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Train a recipe in a new directory."""
    return new_run(recipe, path, device=device, progress=progress).run()


def resume(path: str | Path, *, device: torch.device | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Continue a run from its latest checkpoint; from its start if it has none."""
    directory = run_directory(path)
    return directory.summary() if directory.finished else old_run(path, device=device, progress=progress).run()


def new_run(
    recipe: Recipe, path: str | Path, *, device: torch.device | None = None, progress: Progress | None = None
) -> Trainer:
    """Make a new directory for a recipe, and its trainer."""
    directory = run_directory(path)
    with _locked_for_trainer(directory):
        directory.check_new()
        return _begin(recipe, directory, device, progress)


def old_run(path: str | Path, *, device: torch.device | None = None, progress: Progress | None = None) -> Trainer:
    """Return a trainer that stands where an unfinished run was saved last."""
    directory = run_directory(path)
    directory.recipe()  # an error if there is no run
    with _locked_for_trainer(directory):
        return _continue(directory, device, progress)


def open_run(
    recipe: Recipe, path: str | Path, *, device: torch.device | None = None, progress: Progress | None = None
) -> Trainer | None:
    """Return a trainer for a new run, or for one that was stopped; None if the run is finished."""
    directory = run_directory(path)
    with _locked_for_trainer(directory):
        if directory.finished:
            directory.unlock()
            return None
        return (
            _continue(directory, device, progress) if directory.exists else _begin(recipe, directory, device, progress)
        )


def _begin(recipe: Recipe, directory: RunDirectory, device: torch.device | None, progress: Progress | None) -> Trainer:
    device = device or default_device()
    trainer = Trainer(recipe, directory, device=device, progress=progress)
    directory.clear()
    directory.create(recipe, describe_environment(device))  # after all that can go wrong
    return trainer


def _continue(directory: RunDirectory, device: torch.device | None, progress: Progress | None) -> Trainer:
    device = device or default_device()
    trainer = Trainer(directory.recipe(), directory, device=device, progress=progress)
    if directory.last.exists():
        warn_if_moved(directory, device)
        trainer.load(directory.last)
    directory.keep_epochs(trainer.epoch)
    directory.note_resumed(min(trainer.steps_taken, trainer.total_steps), describe_environment(device))
    return trainer


@contextmanager
def _locked_for_trainer(directory: RunDirectory) -> Iterator[None]:
    """Lock a run, which its trainer unlocks at the end; after an error it is unlocked here."""
    directory.lock()
    try:
        yield
    except BaseException:
        directory.unlock()
        raise
