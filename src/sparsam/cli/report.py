"""`sparsam report`: a page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsam.cli.names import with_inner
from sparsam.cli.table import print_table
from sparsam.report import collect, summary_table, write_report
from sparsam.report.table import summary_notes


def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs, or folders that hold them.")],
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
    runs = with_inner(run for run in runs if run.suffix != ".html")  # pages are where a shell's * finds runs
    show_runs(runs)
    print(f"The page: {write_report(runs, output, figures)}")


def show_runs(runs: list[Path]) -> None:
    """Print the table of runs, and how to read it."""
    table = summary_table(collect(runs))
    print_table("", table, summary_notes(table), whole="the page")
