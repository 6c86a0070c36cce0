"""`sparsam compare`: several recipes, several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsam.cli.analysis import Device, find_device, measure_missing
from sparsam.cli.options import MaxSteps, NoEpochs, Set, ShareStart, continued_by_same_command, overrides
from sparsam.cli.report import show_runs
from sparsam.report import write_report
from sparsam.training.comparison import compare_recipes
from sparsam.training.progress import LogProgress, suitable_progress


def compare(
    recipes: Annotated[list[str], typer.Argument(help="Recipes by name, or files (*.toml).")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each recipe, with seeds 0, 1, ...")] = 1,
    settings: Set = None,
    max_steps: MaxSteps = None,
    epochs: NoEpochs = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write.")] = Path("runs/compare"),
    sharpness: Annotated[
        float | None,
        typer.Option(metavar="RHO", help="Measure how much the loss rises within RHO of the weights, and λ1."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Training images for --sharpness.")] = 10_000,
    rounds: Annotated[
        int, typer.Option(min=0, help="Time the steps of all methods in turn, in so many rounds; 0: do not.")
    ] = 30,
    at_once: Annotated[int, typer.Option(min=1, help="Runs that share the device.")] = 1,
    share_start: ShareStart = False,
    device: Device = None,
) -> None:
    """Train several recipes with several seeds and compare them: a table here, a page in the output directory.

    Runs that are finished already are not repeated, and one that was stopped is continued, so the same command again
    goes on where it was. A setting goes to the recipes that it has a meaning for: a sparsity to sparse masks only.

    Example:
    ```
    sparsam compare digits-sgd digits-sam digits-ssam-f --seeds 3
    ```
    """
    with continued_by_same_command():
        runs = compare_recipes(
            recipes,
            seeds,
            output,
            overrides=overrides(settings, train__max_steps=max_steps),
            device=find_device(device),
            at_once=at_once,
            share_start=share_start,
            rounds=rounds,
            progress=lambda: LogProgress(ends=True) if at_once > 1 else suitable_progress(ends=True),
        )
    if sharpness is not None:
        measure_missing(runs, sharpness, samples, find_device(device))
    show_runs(runs)
    page = write_report(runs, output / "report.html")
    print(f"The page with curves and masks: {page}")
