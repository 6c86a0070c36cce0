"""The commands, one file each."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, TextIO

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
from sparsam.cli.reproduce import reproduce
from sparsam.cli.train import train
from sparsam.errors import UserError, UserRuntimeError
from sparsam.training.interrupt import Interrupted
from sparsam.training.ranks import launched_processes

IN_FULL = "the second pass is computed in full"  # how a warning of replay begins

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (train, evaluate, compare, reproduce, report, recipes, cuts, *COMMANDS, convergence, doctor):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning; it is shown as one of this command, wherever it comes from."""
    text = str(message)
    if text.startswith(IN_FULL):  # the model and the loop are the command's own: what a user can change is the cut
        text += "; `sparsam cuts RECIPE` lists the cuts that save time"
    print(f"warning: {text}", file=sys.stderr, flush=True)


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Sparse SAM for PyTorch: train, compare and look at sharpness-aware minimization."""
    if launched_processes() > 1 and context.invoked_subcommand != "train":
        raise UserRuntimeError("only `sparsam train` runs on several processes; start this one without torchrun")


def run() -> None:
    """Run a command; warnings come without a line of code, and errors that the user can mend without a traceback."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            app()
    except Interrupted as stop:
        sys.exit(f"{stop}")
    except UserError as error:
        sys.exit(f"error: {error}")
