"""Several recipes, several seeds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparsam.training.progress import Progress
from sparsam.training.recipe import Recipe, RecipeError, load_recipe
from sparsam.training.rundir import RunDirectory
from sparsam.training.trainer import Interrupted, Trainer, new_run, old_run, stopping_on_signals


def compare_recipes(
    recipes: Sequence[Path],
    seeds: int,
    output: Path,
    *,
    overrides: Sequence[str] | None = None,
    device: torch.device,
    at_once: int = 1,
    progress: Callable[[], Progress] = Progress,
) -> list[Path]:
    """Train every recipe with every seed; return the runs' directories.

    A run that is finished is left as it is and one that was stopped is continued, if its recipe is still the same.

    Args:
        recipes: Files.
        seeds: How many runs of each, with seeds 0, 1, ...
        output: Where the runs are written, as NAME-seedN.
        overrides: `key=value`, for all runs that they concern: those of `mask` go to recipes with a sparse mask only,
            those of `sam` to recipes with SAM.
        device: Where to train.
        at_once: How many runs take turns on the device, a step each; on a GPU they overlap, on streams of their own.
            Step times are then not those of a run alone.
        progress: Makes the one who is told, anew for each run.
    """
    planned = []
    for file in recipes:  # everything is checked before the first is trained
        for seed in range(seeds):
            recipe = load_recipe(file, [*_concerned(file, overrides or []), f"train.seed={seed}"])
            path = output / f"{recipe.name}-seed{seed}"
            if (path / "recipe.json").is_file() and RunDirectory(path).recipe() != recipe:
                raise RecipeError(f"{path} holds a run of another recipe; choose another --output or delete it")
            planned.append((recipe, path))
    if len({path for _, path in planned}) < len(planned):
        raise RecipeError("the recipes must have different names, but two have the same")

    def trainer(recipe: Recipe, path: Path) -> Trainer:
        gc.collect()  # the run before must not count in this one's memory
        if (path / "recipe.json").is_file():
            return old_run(path, device=device, progress=progress())
        return new_run(recipe, path, device=device, progress=progress())

    waiting = (
        partial(trainer, recipe, path)
        for recipe, path in planned
        if not ((path / "recipe.json").is_file() and RunDirectory(path).finished)
    )
    _take_turns(waiting, at_once, device)
    return [path for _, path in planned]


def _take_turns(waiting: Iterable[Callable[[], Trainer]], at_once: int, device: torch.device) -> None:
    """Train `at_once` runs side by side, a step each in turn, until none is left."""
    waiting = iter(waiting)
    running: dict[Trainer, tuple[Iterator[None], Any]] = {}
    interrupted: list[Interrupted] = []

    def stop() -> None:
        nonlocal waiting
        waiting = iter(())
        for run in running:
            run.stop()

    with stopping_on_signals(stop):
        while True:
            while len(running) < at_once and (start := next(waiting, None)):
                run = start()
                running[run] = (run.steps(), _stream(device) if at_once > 1 else None)
            if not running:
                break
            for run, (steps, stream) in list(running.items()):
                try:
                    with torch.cuda.stream(stream):
                        next(steps)
                except StopIteration:
                    del running[run]
                except Interrupted as stopped:
                    del running[run]
                    interrupted.append(stopped)
    if interrupted:
        raise interrupted[0]


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))  # for what the run's making has launched
    return stream


def _concerned(file: Path, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that concern a recipe: SGD has no rho, and SAM no sparsity."""
    recipe = load_recipe(file)
    absent = () if recipe.mask.kind != "dense" else ("mask.",) if recipe.sam.enabled else ("mask.", "sam.")
    return [override for override in overrides if not override.startswith(absent)]
