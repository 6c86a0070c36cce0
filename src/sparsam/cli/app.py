"""The commands, one file each."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sparsam import __version__
from sparsam.cli.analysis import COMMANDS
from sparsam.cli.compare import compare
from sparsam.cli.convergence import convergence
from sparsam.cli.cuts import cuts
from sparsam.cli.doctor import doctor
from sparsam.cli.evaluate import evaluate
from sparsam.cli.recipes import recipes
from sparsam.cli.report import report
from sparsam.cli.train import train
from sparsam.errors import UserError
from sparsam.training.interrupt import Interrupted

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (train, evaluate, compare, report, recipes, cuts, *COMMANDS, convergence, doctor):
    app.command()(command)


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


def run() -> None:
    """Run a command; errors that the user can mend come without a traceback."""
    try:
        app()
    except Interrupted as stop:
        sys.exit(f"{stop}")
    except UserError as error:
        sys.exit(f"error: {error}")
