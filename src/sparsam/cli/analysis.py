"""The commands that analyse trained runs: landscape, hessian, sharpness, gradients, masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from sparsam.analysis.run_sharpness import measure_sharpness
from sparsam.cli import gradients as gradients_module
from sparsam.cli import hessian as hessian_module
from sparsam.cli import landscape as landscape_module
from sparsam.cli import sharpness as sharpness_module
from sparsam.cli.console import plain_console
from sparsam.cli.names import names_of, ordered
from sparsam.cli.options import given_options
from sparsam.errors import UserValueError, need
from sparsam.report.mask_figure import RunMasks, draw_masks
from sparsam.runs.checkpoint import check_checkpoint
from sparsam.runs.directory import RunDirectory
from sparsam.runs.results import check_shared, outdated, read_result, result_file
from sparsam.runs.run import read_method
from sparsam.training.environment import default_device
from sparsam.training.interrupt import Interrupted

Runs = Annotated[list[Path], typer.Argument(help="Directories of runs, or folders that hold them.")]
Samples = Annotated[int, typer.Option(min=1, help="Training images to measure over, the same for all runs.")]
Best = Annotated[bool, typer.Option("--best", help="Take the weights of the best epoch, not of the last.")]
Seed = Annotated[int, typer.Option(min=0, help="The seed of random numbers.")]
Redraw = Annotated[bool, typer.Option("--redraw", help="Show earlier results, measure nothing.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where figures are written.")]
DataRoot = Annotated[
    Path | None, typer.Option(help="Where the data is now, if it has moved since the runs (data.root of a recipe).")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: a GPU if there is one.")]


def sharpness(
    context: typer.Context,
    runs: Runs,
    rho: Annotated[float, typer.Option(help="The radius around the weights.")] = 0.1,
    adaptive_rho: Annotated[float, typer.Option(help="The same for the adaptive variants.")] = 1.0,
    ascent: Annotated[int, typer.Option(min=1, help="Steps of gradient ascent; 1 is SAM's own perturbation.")] = 1,
    noise: Annotated[int, typer.Option(min=2, help="Random perturbations for the average case.")] = 10,
    samples: Samples = 10_000,
    seed: Seed = 0,
    best: Best = False,
    redraw: Redraw = False,
    data_root: DataRoot = None,
    device: Device = None,
) -> None:
    """Measure how much the loss rises near the weights of runs: worst case, average case, adaptive, λ1.

    The numbers are kept in RUN/analysis/sharpness.json, and `sparsam report` shows them.

    Example:
    ```
    sparsam sharpness runs/demo/*-seed0 --rho 0.1
    ```
    """
    measure = partial(
        measure_sharpness,
        rho=rho,
        adaptive_rho=adaptive_rho,
        ascent=ascent,
        noise=noise,
        samples=samples,
        seed=seed,
        best=best,
        data_root=data_root,
    )
    runs = ordered(runs)
    results = _results(
        "sharpness", context, runs, measure, sharpness_module.SHARED, redraw=redraw, best=best, device=device
    )
    sharpness_module.show(runs, results)


def gradients(
    context: typer.Context,
    runs: Runs,
    rho: Annotated[float, typer.Option(help="The radius of SAM's perturbation.")] = 0.1,
    batch_size: Annotated[int, typer.Option(min=1, help="Images that a gradient is computed over.")] = 128,
    batches: Annotated[int, typer.Option(min=1, help="Batches to count over.")] = 8,
    best: Best = False,
    redraw: Redraw = False,
    output: Output = Path("runs/analysis"),
    data_root: DataRoot = None,
    device: Device = None,
) -> None:
    """Compare the gradients of SAM and SGD weight by weight, over all weights and by layer.

    The counts are kept in RUN/analysis/gradients.json; figures are gradients.png and one for each run.

    Example:
    ```
    sparsam gradients runs/demo/*-seed0
    ```
    """
    measure = partial(
        gradients_module.measure, rho=rho, batch_size=batch_size, batches=batches, best=best, data_root=data_root
    )
    options: dict[str, Any] = {"redraw": redraw, "best": best, "device": device, "output": output}
    runs = ordered(runs)
    results = _results("gradients", context, runs, measure, gradients_module.SHARED, **options)
    gradients_module.show(runs, results, output)


def masks(runs: Runs, output: Output = Path("runs/analysis")) -> None:
    """Draw which layers the masks of runs perturb, and how the masks change from epoch to epoch.

    Example:
    ```
    sparsam masks runs/demo/*-ssam-*-seed0
    ```
    """
    runs = ordered(runs)
    found = [
        RunMasks(name, read_method(run), RunDirectory(run).metrics())
        for name, run in zip(names_of(runs), runs, strict=True)
    ]
    shown = [run for run in found if run.epochs]
    files = draw_masks(shown or found, output / "masks")
    if len(shown) < len(found):
        print(f"Without a mask: {', '.join(run.label for run in found if not run.epochs)}")
    print(f"Figures: {', '.join(map(str, files))}")


def hessian(
    context: typer.Context,
    runs: Runs,
    top: Annotated[int, typer.Option(min=1, help="Eigenvalues to find.")] = 5,
    products: Annotated[int, typer.Option(min=2, help="Hessian products to find them with, at most.")] = 100,
    probes: Annotated[int, typer.Option(min=1, help="Random vectors for the density and the trace.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Lanczos steps from each probe, a Hessian product each.")] = 60,
    precision: Annotated[str, typer.Option(help="fp32, or tf32: a GPU's fast products to search with.")] = "fp32",
    memory: Annotated[float, typer.Option(help="GiB for vectors, at most; activations come on top.")] = 4.0,
    samples: Samples = 10_000,
    seed: Seed = 0,
    best: Best = False,
    redraw: Redraw = False,
    output: Output = Path("runs/analysis"),
    data_root: DataRoot = None,
    device: Device = None,
) -> None:
    """Measure the spectrum of the loss's Hessian: λ1, λ5, λ1/λ5, the trace, and the density of all eigenvalues.

    The numbers are kept in RUN/analysis/hessian.json; docs/hessian.md says how to read the figure.

    Example:
    ```
    sparsam hessian runs/demo/*-seed0
    ```
    """
    measure = partial(
        hessian_module.measure,
        top=top,
        products=products,
        probes=probes,
        steps=steps,
        precision=precision,
        memory=memory,
        samples=samples,
        seed=seed,
        best=best,
        data_root=data_root,
    )
    options: dict[str, Any] = {"redraw": redraw, "best": best, "device": device, "output": output}
    runs = ordered(runs)
    results = _results("hessian", context, runs, measure, hessian_module.SHARED, **options)
    hessian_module.show(runs, results, output)


def landscape(
    context: typer.Context,
    runs: Runs,
    dimensions: Annotated[int, typer.Option(min=1, max=2, help="1: along a line; 2: over a plane.")] = 2,
    points: Annotated[int, typer.Option(min=2, help="Points on each axis.")] = 50,
    range: Annotated[float, typer.Option("--range", help="Each axis goes from -RANGE to RANGE.")] = 1.0,
    directions: Annotated[str, typer.Option(help="random (filter-normalised) or pca (of checkpoints).")] = "random",
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(help="For pca, which needs some: a checkpoint of any run; may be repeated."),
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, or bf16: faster, to two digits.")] = "fp32",
    samples: Samples = 10_000,
    seed: Seed = 0,
    best: Best = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Compute anew what was computed before.")] = False,
    redraw: Redraw = False,
    output: Output = Path("runs/analysis"),
    data_root: DataRoot = None,
    device: Device = None,
) -> None:
    """Draw the loss around the weights of runs, side by side: contours, surfaces, an interactive page.

    The losses are kept in RUN/analysis/landscape.npz (of a line: landscape-line.npz). Ctrl-C keeps finished points, and
    the same command continues.

    Examples:
    ```
    sparsam landscape runs/demo/*-seed0
    sparsam landscape runs/demo/*-seed0 --dimensions 1 --points 101
    ```
    """
    runs, checkpoints = ordered(runs), checkpoint or []
    if redraw:
        check_redraw(context, "dimensions")
        found = [landscape_module.load(run, dimensions) for run in runs]
        warn_outdated(runs, [shown.about for shown in found])
    else:
        place = find_device(device)
        check_runs(runs, best=best, output=output)
        landscape_module.check(directions=directions, checkpoints=checkpoints)
        found = [
            landscape_module.measure(
                run,
                dimensions=dimensions,
                points=points,
                range=range,
                directions=directions,
                checkpoints=checkpoints,
                precision=precision,
                samples=samples,
                seed=seed,
                best=best,
                overwrite=overwrite,
                data_root=data_root,
                device=place,
            )
            for run in runs
        ]
    landscape_module.show(runs, found, output)


COMMANDS = (landscape, hessian, sharpness, gradients, masks)


def _results(
    name: str,
    context: typer.Context,
    runs: list[Path],
    measure: Callable[..., dict[str, Any]],
    shared: tuple[str, ...],
    *,
    redraw: bool,
    best: bool,
    device: str | None,
    output: Path | None = None,
) -> list[dict[str, Any]]:
    """Measure runs one by one, or read earlier results, which must have the same settings."""
    if redraw:
        check_redraw(context)
        return earlier_results(name, runs, shared)
    check_runs(runs, best=best, output=output)
    place, results = find_device(device), []
    for run in runs:
        with nullcontext() if name == "hessian" else status(f"{run.name}: {name}"):  # hessian has its own bar
            try:
                results.append(measure(run, device=place))
            except KeyboardInterrupt:
                raise Interrupted(
                    f"{run.name}: stopped; nothing new of it was saved, results of earlier runs were"
                ) from None
    return results


def earlier_results(name: str, runs: Sequence[Path], shared: tuple[str, ...]) -> list[dict[str, Any]]:
    """Read results that were measured before; they must have the same settings."""
    results = [read_result(run, name) for run in runs]
    check_shared(runs, results, shared)
    warn_outdated(runs, results)
    return results


def check_redraw(context: typer.Context, *allowed: str) -> None:
    """Refuse options of a measurement beside --redraw, which measures nothing."""
    fitting = ("runs", "redraw", "output", *allowed)
    others = [option for name, option in given_options(context).items() if name not in fitting]
    if others:
        raise UserValueError(f"--redraw shows earlier results as they were measured, so leave out {', '.join(others)}")


def warn_outdated(runs: Sequence[Path], results: Sequence[Mapping[str, Any]]) -> None:
    """Name the runs that were continued after their result was computed."""
    for text in filter(None, map(outdated, runs, results)):
        plain_console(stderr=True).print(text, style="yellow")


def measure_missing(runs: list[Path], rho: float, samples: int, device: torch.device) -> None:
    """Measure the sharpness of those runs that have no such result yet."""
    wanted = {"rho": rho, "ascent": 1, "samples_asked": samples, "weights": "last"}
    for run in runs:
        if result_file(run, "sharpness.json").is_file():
            known = read_result(run, "sharpness")
            if {key: known.get(key) for key in wanted} == wanted and not outdated(run, known):
                continue
        with status(f"{run.name}: sharpness"):
            measure_sharpness(run, rho=rho, samples=samples, device=device)


def check_runs(runs: list[Path], *, best: bool, output: Path | None = None) -> None:
    """Refuse at once what would fail only after some of the runs are measured."""
    if output is not None:
        need("matplotlib", "figures", extra="analysis")
        if output.exists() and not output.is_dir():
            raise UserValueError(f"--output must be a folder for figures, but {output} is a file")
    for run in runs:
        directory = RunDirectory(run)
        directory.recipe()
        check_checkpoint(directory.best if best else directory.last)


def status(text: str) -> Any:
    """Show on a terminal what is being computed."""
    return Console(stderr=True).status(Text(text))


def find_device(name: str | None) -> torch.device:
    """Return a device by its name. The default is a GPU if there is one."""
    if name is None:
        return default_device()
    here = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    refusal = f"--device must be a device of this machine ({', '.join(here)}), but is {name!r}"
    try:
        device = torch.device(name)
    except RuntimeError as error:  # which lists all that torch has ever run on
        raise UserValueError(refusal) from error
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserValueError(f"{refusal}: {error}") from error
    return device
