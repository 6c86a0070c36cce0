"""`sparsam evaluate`: the accuracy of a run's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsam.cli.analysis import Device, find_device
from sparsam.training.evaluation import evaluate_run


def evaluate(
    run: Annotated[Path, typer.Argument(help="The directory of a run.")],
    best: Annotated[bool, typer.Option("--best", help="The best epoch's weights in place of the last.")] = False,
    device: Device = None,
) -> None:
    """Measure loss and accuracy of a run's weights again.

    Example:
    ```
    sparsam evaluate runs/digits-sam-seed0
    ```
    """
    result = evaluate_run(run, best=best, device=find_device(device))
    print(
        f"{result['weights']} weights ({result['when']}) on {result['count']} {result['evaluated_on']} images: "
        f"loss {result['loss']:.4f}, accuracy {100 * result['accuracy']:.2f} %"
    )
