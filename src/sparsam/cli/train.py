"""`sparsam train`: one run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsam.cli.analysis import Device, find_device
from sparsam.cli.options import MaxSteps, NoEpochs, Set, overrides
from sparsam.errors import UserValueError
from sparsam.runs.directory import RunDirectory
from sparsam.training import load_recipe
from sparsam.training import resume as resume_run
from sparsam.training import train as train_run
from sparsam.training.progress import Progress, length_of, suitable_progress
from sparsam.training.ranks import Ranks, joined, run_directory


def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe by name, such as digits-sam, or a file (*.toml).")
    ] = None,
    settings: Set = None,
    model: Annotated[str | None, typer.Option(help="Another network, such as wrn-28-10 or timm:NAME.")] = None,
    max_steps: MaxSteps = None,
    epochs: NoEpochs = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write; default: runs/NAME-seedN.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this directory.")] = None,
    device: Device = None,
) -> None:
    """Train one recipe, or continue a run.

    Examples:
    ```
    sparsam train digits-sam
    sparsam train cifar10-resnet18-sam --set data.root=DATA
    sparsam train cifar10-resnet18-sam --set data.root=DATA --set data.limit=256 --max-steps 2
    sparsam train --resume runs/digits-sam-seed0
    ```

    `sparsam recipes` lists the recipes, docs/training.md what --set can change. A terminal shows a bar; anything else
    gets a line of JSON for each epoch on stderr. `torchrun --nproc-per-node 2 -m sparsam train RECIPE` trains on two
    processes, each on a half of every batch.
    """
    with joined(partial(find_device, device)) as own_device:
        _train(recipe, settings, model, max_steps, output, resume, own_device)


def _train(
    recipe: str | None,
    settings: list[str] | None,
    model: str | None,
    max_steps: int | None,
    output: Path | None,
    resume: Path | None,
    device: Any,
) -> None:
    first = Ranks().first
    progress = suitable_progress() if first else Progress()
    if recipe is not None and resume is not None:
        raise UserValueError("train takes a recipe or --resume DIR, not both")
    if recipe is not None:
        loaded = load_recipe(recipe, overrides(settings, model__name=model, train__max_steps=max_steps))
        path = output or Path("runs") / f"{loaded.name}-seed{loaded.train.seed}"
        summary = train_run(loaded, path, device=device, progress=progress)
    elif resume is not None:
        if settings or output or model or max_steps:
            raise UserValueError(
                "--resume continues a run as it was: --set, --model, --max-steps and --output do not go with it"
            )
        path = resume
        if first and run_directory(path).finished:
            print(f"{path} is finished already{_early_end(run_directory(path))}")
        summary = resume_run(path, device=device, progress=progress)
    else:
        raise UserValueError("train needs either a recipe or --resume DIR")
    if first:
        print(f"{_accuracy(summary, run_directory(path).recipe().train.max_steps)}; everything is in {path}")


def _early_end(run: RunDirectory) -> str:
    summary, steps = run.summary(), run.recipe().train.max_steps
    ended = steps is not None and summary.get("steps") == steps
    return f": it ended after {length_of(summary, steps)}, its train.max_steps" if ended else ""


def _accuracy(summary: dict[str, Any], max_steps: int | None) -> str:
    last, best = (f"{100 * summary[key]:.2f} %" for key in ("test_accuracy", "best_accuracy"))
    peak = f" (best: {best}, epoch {summary['best_epoch']})" if summary["epochs"] > 1 else ""
    images = f"{last} of the {summary['evaluated_on']} images"
    return f"{summary['method']}: {images} are classified correctly after {length_of(summary, max_steps)}{peak}"
