"""`sparsam convergence`: SAM and SSAM beside the bounds of the convergence theorems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsam.analysis.convergence import measure_all
from sparsam.analysis.problems import PROBLEMS
from sparsam.cli.analysis import check_redraw
from sparsam.cli.console import plain_console
from sparsam.errors import need
from sparsam.report.convergence_figure import draw
from sparsam.runs.files import RunError, replace_file
from sparsam.runs.record import Record

SPARSITIES = (0.5, 0.8, 0.95)
NAME = "convergence"


def convergence(
    context: typer.Context,
    problem: Annotated[
        list[str] | None, typer.Option(help="cosine, robust or sigmoid; may be repeated. Default: all.")
    ] = None,
    sparsity: Annotated[
        list[float] | None, typer.Option(help="Of SSAM's masks; may be repeated. Default: 0.5, 0.8 and 0.95.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="T.")] = 1000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs that the mean is taken over.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    eta: Annotated[float, typer.Option(help="The first learning rate, as a share of 1/L, the largest allowed.")] = 1.0,
    rho: Annotated[float, typer.Option(help="The first rho, as a share of the largest that the theorem allows.")] = 1.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write.")] = Path("runs/convergence"),
    redraw: Annotated[bool, typer.Option("--redraw", help="Use what was measured before.")] = False,
) -> None:
    """Run SAM and SSAM under the conditions of the convergence theorems, beside the theorems' bounds.

    The problems are smooth, not convex, and all their constants are known; docs/theorems.md tells the rest.

    Examples:
    ```
    sparsam convergence
    sparsam convergence --problem cosine --sparsity 0.5 --sparsity 0.9 --steps 5000 --seeds 20
    sparsam convergence --redraw
    ```
    """
    need("matplotlib", "figures", extra="analysis")  # not only after the runs
    if redraw:
        check_redraw(context)
        result = load(output)
    else:
        result = measure(output, problem, sparsity, steps=steps, seeds=seeds, seed=seed, eta=eta, rho=rho)
    files = draw(result, output / NAME)
    show(result, files)


def measure(output: Path, problems: list[str] | None, sparsities: list[float] | None, **options: Any) -> dict[str, Any]:
    """Run everything and keep the numbers in OUTPUT/convergence.json."""
    console = Console(stderr=True)
    with console.status("Running ...") as status:
        result = measure_all(problems or list(PROBLEMS), sparsities or SPARSITIES, progress=status.update, **options)
    replace_file(output / f"{NAME}.json", json.dumps(result) + "\n")
    return result


def load(output: Path) -> dict[str, Any]:
    """Read what :func:`measure` kept."""
    path = output / f"{NAME}.json"
    if not path.is_file():
        raise RunError(f"there is no {path} to redraw; compute it with: sparsam convergence -o {output}")
    return Record.read(path).values


def show(result: dict[str, Any], files: list[Path]) -> None:
    """Print a row for each problem and method, and where the figure is."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("Problem", "Mask"):
        table.add_column(heading, no_wrap=True)
    for heading in ("s", "‖∇f‖²", "% bound", "Slope", "Theory", "> printed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for curve in result["curves"]:
        numbers = (f"{curve['mean'][-1]:.3g}", f"{100 * curve['largest_share']:.1f}")
        slopes = (f"{curve['slope']:.2f}", f"{curve['bound_slope']:.2f}")
        fails = ", ".join(map(str, curve["printed_fails_at"]))
        table.add_row(
            curve["problem"],
            curve["mask"],
            f"{curve['sparsity']:g}",
            *numbers,
            *slopes,
            f"T = {fails}" if fails else "–",
        )
    console = plain_console()
    console.print(table)
    console.print(
        f"Dense is SAM. ‖∇f‖²: mean over t ≤ {result['steps']} and {result['seeds']} seed(s). % bound: the most that "
        "the running mean was of the corrected bound. Slope: the power of T that fits it best from "
        f"T = {max(1, result['steps'] // 10)} on, and that of the bound. > printed: where it was above the bound that "
        "the paper prints.",
        style="dim",
    )
    console.print(f"The figure: {', '.join(map(str, files))}")
