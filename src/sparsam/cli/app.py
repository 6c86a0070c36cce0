"""The commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import rich
import typer
from rich.console import Console

from sparsam import __version__
from sparsam.cli import doctor as doctor_module
from sparsam.cli.analysis import COMMANDS, Device, find_device, measure_missing
from sparsam.cli.convergence import convergence
from sparsam.cli.table import show_table
from sparsam.errors import UserError, UserValueError
from sparsam.report import collect, summary_table, write_report

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a setting, such as train.epochs=10."),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Sparse SAM for PyTorch: train, compare and look at sharpness-aware minimization."""


@app.command()
def train(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe, such as recipes/digits-sam.toml.")] = None,
    settings: Set = None,
    model: Annotated[str | None, typer.Option(help="Another network, such as wrn-28-10 or timm:NAME.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write; default: runs/NAME-seedN.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this directory.")] = None,
    device: Device = None,
) -> None:
    """Train one recipe, or continue a run.

    Examples:
    ```
    sparsam train recipes/digits-sam.toml
    sparsam train recipes/cifar10-resnet18-sam.toml --set data.root=DATA
    sparsam train --resume runs/digits-sam-seed0
    ```

    docs/training.md lists what --set can change.
    """
    from sparsam.training import load_recipe
    from sparsam.training import resume as resume_run
    from sparsam.training import train as train_run
    from sparsam.training.progress import suitable_progress

    if (recipe is None) == (resume is None):
        raise UserValueError("train needs either a recipe or --resume DIR")
    if resume is not None:
        if settings or output or model:
            raise UserValueError("--resume continues a run as it was: --set, --model and --output do not go with it")
        path = resume
        if (path / "summary.json").is_file():
            rich.print(f"{path} is finished already")
        summary = resume_run(path, device=find_device(device), progress=suitable_progress())
    else:
        assert recipe is not None
        loaded = load_recipe(recipe, [*(settings or []), *([f"model.name={model}"] if model else [])])
        path = output or Path("runs") / f"{loaded.name}-seed{loaded.train.seed}"
        summary = train_run(loaded, path, device=find_device(device), progress=suitable_progress())
    rich.print(f"{_accuracy(summary)}; everything is in {path}")


@app.command()
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
    from sparsam.training.evaluation import evaluate_run

    result = evaluate_run(run, best=best, device=find_device(device))
    rich.print(
        f"{result['weights']} weights ({result['when']}) on {result['count']} {result['evaluated_on']} images: "
        f"loss {result['loss']:.4f}, accuracy {100 * result['accuracy']:.2f} %"
    )


@app.command()
def compare(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes to compare.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each recipe, with seeds 0, 1, ...")] = 1,
    settings: Set = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write.")] = Path("runs/compare"),
    sharpness: Annotated[
        float | None,
        typer.Option(metavar="RHO", help="Measure how much the loss rises within RHO of the weights, and λ1."),
    ] = None,
    at_once: Annotated[
        int, typer.Option(min=1, help="Runs that share the device; step times are then not those of a run alone.")
    ] = 1,
    device: Device = None,
) -> None:
    """Train several recipes with several seeds and compare them: a table here, a page in the output directory.

    Runs that are finished already are not repeated, and one that was stopped is continued, so the same command again
    goes on where it was.

    Example:
    ```
    sparsam compare recipes/digits-*.toml --seeds 3
    ```
    """
    from sparsam.training.comparison import compare_recipes
    from sparsam.training.progress import LogProgress, suitable_progress

    runs = compare_recipes(
        recipes,
        seeds,
        output,
        overrides=settings,
        device=find_device(device),
        at_once=at_once,
        progress=lambda: LogProgress(epochs=False) if at_once > 1 else suitable_progress(epochs=False),
    )
    if sharpness is not None:
        measure_missing(runs, sharpness, find_device(device))
    _show(runs)
    page = write_report(runs, output / "report.html")
    rich.print(f"The page with curves and masks: {page}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("runs/report.html"),
    figures: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where landscape, hessian, gradients and masks have drawn; default: analysis beside the page, beside "
            "the runs or one higher.",
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML page about runs, and print its table.

    What other commands have measured of the runs and drawn of them is on the page, with links to the files.

    Example:
    ```
    sparsam report runs/compare/*-seed* -o page.html
    ```
    """
    runs = [run for run in runs if run.suffix != ".html"]  # pages beside the runs, where a shell's * finds them
    _show(runs)
    rich.print(f"The page: {write_report(runs, output, figures)}")


@app.command()
def cuts(
    model: Annotated[str, typer.Argument(help="A network, such as wrn-28-10 or timm:NAME, or a recipe (*.toml).")],
    batch_size: Annotated[int | None, typer.Option(min=1, help="Default: 128, or the recipe's.")] = None,
    image_size: Annotated[int | None, typer.Option(min=1, help="Default: 32, or the recipe's.")] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, help="Default: 10, or the recipe's (image folders: 1000).")
    ] = None,
    channels: Annotated[int | None, typer.Option(min=1, help="Default: 3, or the recipe's.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="Mark the cut that a step of so many base steps allows, such as 1.25.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; default: fp32, or the recipe's.")] = None,
    device: Device = None,
) -> None:
    """List where a network can be cut, with the share of the weights and of the step that lies behind each cut.

    It is measured here and now, on random images.

    Examples:
    ```
    sparsam cuts resnet18 --budget 1.25
    sparsam cuts recipes/cifar10-wrn28-10-sam.toml --batch-size 32
    ```
    """
    from sparsam.cli import cuts as cuts_module
    from sparsam.masks.budget import check_budget

    recipe, images = cuts_module.load(
        model, batch_size=batch_size, precision=precision, size=image_size, classes=classes, channels=channels
    )
    place = find_device(device)
    if budget is None and recipe.mask.kind == "budget" and not recipe.mask.cut:
        budget = recipe.mask.budget
    if budget is not None:
        check_budget(budget)
    with Console(stderr=True).status("Measuring ...", refresh_per_second=2):  # drawing delays what is measured
        costs = cuts_module.measure(recipe, images, place, budget)
    cuts_module.show(recipe, images, costs, place, budget)


@app.command()
def doctor() -> None:
    """Say what is installed, what is missing and how to get it."""
    raise typer.Exit(doctor_module.report())


def _show(runs: list[Path]) -> None:
    show_table(summary_table(collect(runs)), rich.get_console())


def _accuracy(summary: dict[str, Any]) -> str:
    last, best = (f"{100 * summary[key]:.2f} %" for key in ("test_accuracy", "best_accuracy"))
    return (
        f"{summary['method']}: {last} of the {summary['evaluated_on']} images after the last of {summary['epochs']} "
        f"epochs (best: {best}, epoch {summary['best_epoch']})"
    )


for command in (*COMMANDS, convergence):
    app.command()(command)


def run() -> None:
    """Run a command; errors that are meant for the user come without a traceback."""
    from sparsam.training.trainer import Interrupted

    try:
        app()
    except Interrupted as stop:
        sys.exit(f"{stop}")
    except UserError as error:
        sys.exit(f"error: {error}")
