"""`sparsam train`: one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import rich
import typer

from sparsam.cli.analysis import Device, find_device
from sparsam.cli.options import MaxSteps, Set, overrides
from sparsam.errors import UserValueError


def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe by name, such as digits-sam, or a file (*.toml).")
    ] = None,
    settings: Set = None,
    model: Annotated[str | None, typer.Option(help="Another network, such as wrn-28-10 or timm:NAME.")] = None,
    max_steps: MaxSteps = None,
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

    `sparsam recipes` lists the recipes, docs/training.md what --set can change.
    """
    from sparsam.training import load_recipe
    from sparsam.training import resume as resume_run
    from sparsam.training import train as train_run
    from sparsam.training.progress import suitable_progress

    if recipe is not None and resume is None:
        loaded = load_recipe(recipe, overrides(settings, model__name=model, train__max_steps=max_steps))
        path = output or Path("runs") / f"{loaded.name}-seed{loaded.train.seed}"
        summary = train_run(loaded, path, device=find_device(device), progress=suitable_progress())
    elif resume is not None and recipe is None:
        if settings or output or model or max_steps:
            raise UserValueError(
                "--resume continues a run as it was: --set, --model, --max-steps and --output do not go with it"
            )
        path = resume
        if (path / "summary.json").is_file():
            rich.print(f"{path} is finished already")
        summary = resume_run(path, device=find_device(device), progress=suitable_progress())
    else:
        raise UserValueError("train needs either a recipe or --resume DIR")
    rich.print(f"{_accuracy(summary)}; everything is in {path}")


def _accuracy(summary: dict[str, Any]) -> str:
    last, best = (f"{100 * summary[key]:.2f} %" for key in ("test_accuracy", "best_accuracy"))
    return (
        f"{summary['method']}: {last} of the {summary['evaluated_on']} images after the last of {summary['epochs']} "
        f"epochs (best: {best}, epoch {summary['best_epoch']})"
    )
