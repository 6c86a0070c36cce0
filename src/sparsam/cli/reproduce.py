"""`sparsam reproduce`: the paper's tables and figures by name."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import rich
import typer

from sparsam.cli.analysis import Device, find_device
from sparsam.cli.options import Set, overrides
from sparsam.cli.table import show_table
from sparsam.errors import UserValueError

if TYPE_CHECKING:
    from sparsam.reproduce.experiments import Experiment
    from sparsam.runs.run import Run
    from sparsam.training.turns import PlannedRun

TIMED_AT_ONCE = 4  # methods whose steps are timed in turn; each has a network of its own in memory


class Engine(StrEnum):
    """Who trains the runs."""

    local = "local"
    ray = "ray"


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="table1 ... table9, figure1 ... figure5, tables, figures, all; or files (*.toml)."),
    ] = None,
    list_rows: Annotated[bool, typer.Option("--list", help="Show all rows, train nothing.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the runs, and the hours from a measured step; train nothing.")
    ] = False,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="Show the runs in a folder, train nothing.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Only rows with this text in their name; may hold * and be repeated."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each row, with seeds 0, 1, ...")] = 1,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Train for so many epochs: scaled down, and labelled so.")
    ] = None,
    settings: Set = None,
    engine: Annotated[Engine, typer.Option(help="local: this process. ray: tasks of a Ray cluster.")] = Engine.local,
    address: Annotated[str | None, typer.Option(help="With --engine ray: an existing cluster, such as auto.")] = None,
    retries: Annotated[
        int, typer.Option(min=0, help="With --engine ray: how often a run goes on after its worker died.")
    ] = 3,
    at_once: Annotated[int, typer.Option(min=1, help="Runs that share a GPU.")] = 1,
    part: Annotated[
        str | None, typer.Option(metavar="K/N", help="Train only the K-th of N parts of the runs (array jobs).")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Keep finished runs and go on with stopped ones; --no-resume refuses if there are any.")
    ] = True,
    rounds: Annotated[
        int, typer.Option(min=0, help="Time the steps of all methods in turn, in so many rounds; 0: do not.")
    ] = 30,
    samples: Annotated[int, typer.Option(min=1, help="Training images that figures are measured over.")] = 10_000,
    points: Annotated[int, typer.Option(min=2, help="Points on each axis of a landscape.")] = 50,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write.")] = Path("runs/reproduce"),
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --from: write all tables to one Markdown page.")
    ] = None,
    device: Device = None,
) -> None:
    """Train what a table or a figure of the paper needs, and set the result beside the paper's numbers.

    The paper is Mi et al., NeurIPS 2022; docs/reproduce.md has more. Rows that tables share are trained once. The same
    command again goes on where it was. Rows of the table that are not in the paper are marked as ours.

    Examples:
    ```
    sparsam reproduce --list
    sparsam reproduce table1 --dry-run
    sparsam reproduce table1 --from results/
    sparsam reproduce table1 --only cifar10 --seeds 3 --set data.root=DATA --set train.precision=bf16
    sparsam reproduce table9 --epochs 30 --engine ray --address auto --set data.root=/shared/DATA
    ```
    """
    from sparsam.reproduce.experiments import chosen, find_experiments

    if not names and not list_rows:
        raise UserValueError("reproduce needs the name of a table or a figure, such as table1; --list shows them")
    experiments = chosen(find_experiments(names or ["all"]), only or [])
    changes = overrides(settings, train__epochs=epochs)
    if markdown is not None and source is None:
        raise UserValueError("--markdown goes with --from; other results are written as Markdown in --output")
    if list_rows:
        _list(experiments, changes)
    elif source is not None:
        _show_folder(experiments, source, changes, markdown)
    else:
        planned = _plan(experiments, seeds, output, changes, part)
        if dry_run:
            _estimate(planned, device)
            return
        _check(planned, at_once, resume=resume)
        place = find_device(device)
        _train(planned, engine, place, at_once, address, retries)
        if part is not None:
            rich.print("This part is trained. When all parts are, the same command without --part shows the tables.")
            return
        _measure(experiments, planned, changes, place, rounds)
        _show(experiments, planned, changes, output, place, samples, points)


def _plan(
    experiments: Sequence[Experiment], seeds: int, output: Path, changes: list[str], part: str | None
) -> list[PlannedRun]:
    from sparsam.reproduce.plan import part_of, plan_runs

    return part_of(plan_runs(experiments, seeds, output, changes), part)


def _check(planned: Sequence[PlannedRun], at_once: int, *, resume: bool) -> None:
    from sparsam.runs.directory import RunDirectory
    from sparsam.training.turns import check_planned

    check_planned(planned, at_once)
    existing = [str(run.path) for run in planned if RunDirectory(run.path).exists]
    if existing and not resume:
        raise UserValueError(
            f"--no-resume starts anew, but there are runs already, such as {existing[0]}; choose another --output"
        )


def _train(
    planned: Sequence[PlannedRun], engine: Engine, device: Any, at_once: int, address: str | None, retries: int
) -> None:
    from sparsam.reproduce.ray_engine import train_with_ray
    from sparsam.training.progress import LogProgress, suitable_progress
    from sparsam.training.turns import train_runs

    if engine is Engine.ray:
        train_with_ray(planned, device=device, at_once=at_once, address=address, retries=retries)
        return
    if address is not None:
        raise UserValueError("--address goes with --engine ray")
    progress = LogProgress if at_once > 1 else suitable_progress
    train_runs(planned, device=device, at_once=at_once, progress=lambda: progress(epochs=False))


def _measure(
    experiments: Sequence[Experiment], planned: Sequence[PlannedRun], changes: list[str], device: Any, rounds: int
) -> None:
    """Measure the times that the tables have."""
    from sparsam.reproduce.fisher_time import add_fisher_times
    from sparsam.training.turns import time_steps

    rows = [row for experiment in experiments for row in experiment.rows if row.seconds is not None]
    timed = {row.recipe(changes).name for row in rows}
    add_fisher_times([run.path for run in planned if run.recipe.name in timed], device)
    if rounds:
        by_name: dict[str, list[PlannedRun]] = {}
        for run in planned:
            by_name.setdefault(run.recipe.name, []).append(run)
        methods = list(by_name.values())
        for start in range(0, len(methods), TIMED_AT_ONCE):
            together = [run for runs in methods[start : start + TIMED_AT_ONCE] for run in runs]
            time_steps(together, device=device, rounds=rounds)


def _show(
    experiments: Sequence[Experiment],
    planned: Sequence[PlannedRun],
    changes: list[str],
    output: Path,
    device: Any,
    samples: int,
    points: int,
) -> None:
    """Print the tables, draw the figures, and write both."""
    from sparsam.cli.paper_figures import draw_figure
    from sparsam.report import write_report
    from sparsam.report.text import comma_separated, markdown
    from sparsam.reproduce.comparison import compare
    from sparsam.reproduce.table import paper_table
    from sparsam.runs.files import replace_file
    from sparsam.runs.run import read_run

    runs = [read_run(run.path) for run in planned]
    tables = {}
    for experiment in experiments:
        results = compare(experiment, runs, changes)
        title = heading(experiment, changes)
        tables[title] = table = paper_table(results)
        _print_table(title, table)
        if experiment.shows is not None:
            draw_figure(experiment, results, output, device, samples, points)
        replace_file(output / f"{experiment.name}.md", f"{title}\n\n{markdown(table)}\n")
        replace_file(output / f"{experiment.name}.csv", comma_separated(table))
    page = write_report([run.path for run in planned], output / "report.html", tables=tables)
    rich.print(f"Tables as Markdown and CSV, and the page: {page}")


def _show_folder(experiments: Sequence[Experiment], folder: Path, changes: list[str], markdown: Path | None) -> None:
    """Print the tables from the runs in a folder."""
    from sparsam.reproduce.comparison import compare, find_runs, other_epochs
    from sparsam.reproduce.document import results_page
    from sparsam.reproduce.table import paper_table
    from sparsam.runs.files import replace_file

    if not folder.is_dir():
        raise UserValueError(f"--from must be a folder with runs, but {folder} is none")
    runs: list[Run] = find_runs(folder)
    if markdown is not None:
        replace_file(markdown, results_page(experiments, runs, folder, markdown))
        rich.print(f"The tables: {markdown}")
        return
    for experiment in experiments:
        _print_table(heading(experiment, changes), paper_table(compare(experiment, runs, changes)))
        others = [] if changes else list(other_epochs(experiment, runs))
        if others:
            rich.print(f"[dim]There are also runs of {', '.join(map(str, others))} epochs: --epochs shows them.[/dim]")


def heading(experiment: Experiment, changes: Sequence[str]) -> str:
    """Return the title of a table; a scaled-down one says so."""
    label = f" (scaled down: {', '.join(changes)})" if (changes := _significant(changes)) else ""
    return f"{experiment.name}: {experiment.title}{label}"


def _significant(changes: Sequence[str]) -> list[str]:
    from sparsam.runs.same import INCIDENTAL

    return [change for change in changes if change.partition("=")[0] not in INCIDENTAL]


def _print_table(title: str, table: Any) -> None:
    console = rich.get_console()
    console.print(f"\n[bold]{title}[/bold]", highlight=False)
    show_table(table, console)


def _list(experiments: Sequence[Experiment], changes: list[str]) -> None:
    from sparsam.report.table import NONE, Cell, Table

    for experiment in experiments:
        rows = tuple(
            (
                Cell(row.recipe(changes).name),
                Cell("ours" if row.paper is None else f"{row.paper:.2f}"),
                Cell(NONE if row.flops is None else f"{row.flops:.2f}×"),
                Cell(NONE if row.seconds is None else f"{row.seconds:g} s"),
            )
            for row in experiment.rows
        )
        columns = ("Row", "Paper, %", "FLOPs (theory)", "Fisher, paper")
        _print_table(heading(experiment, changes), Table(columns, rows))


def _estimate(planned: Sequence[PlannedRun], device: str | None) -> None:
    from sparsam.report.table import Cell, Table
    from sparsam.reproduce.cost import estimate

    place = find_device(device)
    with rich.get_console().status("measuring a step of each network"):
        found = estimate(planned, place)
    rows = tuple(
        (Cell(e.run.path.name), Cell(f"{e.steps:,}"), Cell(f"{1000 * e.seconds:.3g}"), Cell(f"{e.hours:.2f}"))
        for e in found
    )
    _print_table("Runs", Table(("Run", "Steps", "ms a step", "Hours"), rows))
    unit = "GPU-hours" if place.type == "cuda" else f"hours on {place}"
    rich.print(f"{len(found)} runs, {sum(e.hours for e in found):.1f} {unit}, by a step measured on random images")
