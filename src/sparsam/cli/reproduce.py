"""`sparsam reproduce`: the paper's tables and figures by name."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import rich
import typer

from sparsam.cli.analysis import Device, find_device
from sparsam.cli.options import Set, ShareStart, continued_by_same_command, given_options, overrides
from sparsam.cli.paper_figures import draw_figure
from sparsam.cli.reproduce_folder import print_other_devices, runs_in, show_folder, time_folder, write_page
from sparsam.cli.table import print_table, print_title
from sparsam.errors import UserRuntimeError, UserValueError
from sparsam.report import write_report
from sparsam.report.table import NONE, Cell, Table
from sparsam.reproduce.comparison import compare
from sparsam.reproduce.cost import estimate, roughly
from sparsam.reproduce.document import table_page
from sparsam.reproduce.earlier import read_finished, with_earlier_rows
from sparsam.reproduce.experiments import Experiment, chosen, file_suffix, find_experiments
from sparsam.reproduce.plan import part_of, plan_runs, without_known
from sparsam.reproduce.ray_engine import train_with_ray
from sparsam.reproduce.table import FLOPS, comma_separated, fisher_heading, paper_notes, paper_table, reference_heading
from sparsam.reproduce.times import measure_times
from sparsam.runs.directory import RunDirectory
from sparsam.runs.files import replace_file
from sparsam.runs.run import Run
from sparsam.training.planned import PlannedRun, check_planned
from sparsam.training.progress import LogProgress, suitable_progress
from sparsam.training.shared_start import SharedStart
from sparsam.training.turns import train_runs


class Engine(StrEnum):
    """Who trains the runs."""

    local = "local"
    ray = "ray"


OF_LIST = ("names", "list_rows", "only")  # what goes with --list
OF_TRAINING = (  # what does not go with --from
    "dry_run",
    "seeds",
    "engine",
    "address",
    "retries",
    "at_once",
    "share_start",
    "part",
    "known",
    "resume",
    "samples",
    "points",
)
OF_TIMING = ("rounds", "device")  # what goes with --from only where it has --time-steps
OF_RAY = ("address", "retries")  # what goes with --engine ray


def reproduce(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="table1 ... table9, figure1 ... figure5, tables, figures, all; or files (*.toml)."),
    ] = None,
    list_rows: Annotated[bool, typer.Option("--list", help="Show all rows, train nothing.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the runs, and their time by measured steps; train nothing.")
    ] = False,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="Show the runs in a folder, train nothing.")
    ] = None,
    timed: Annotated[
        bool,
        typer.Option("--time-steps", help="With --from: also time the steps of the runs on this device, in turn."),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Only rows with this text in their name; may hold * and be repeated."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each row, with seeds 0, 1, ...")] = 1,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Train for so many epochs, scaled down and labelled so; with --from: show such runs."),
    ] = None,
    settings: Set = None,
    engine: Annotated[Engine, typer.Option(help="local: this process. ray: tasks of a Ray cluster.")] = Engine.local,
    address: Annotated[str | None, typer.Option(help="With --engine ray: an existing cluster, such as auto.")] = None,
    retries: Annotated[
        int, typer.Option(min=0, help="With --engine ray: how often a run goes on after its worker died.")
    ] = 3,
    at_once: Annotated[int, typer.Option(min=1, help="Runs that share a GPU.")] = 1,
    share_start: ShareStart = False,
    part: Annotated[
        str | None,
        typer.Option(metavar="K/N", help="Train one of N parts of the runs, K from 0 (array jobs)."),
    ] = None,
    known: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Runs in this folder are not trained again; tables have them too."),
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
    sparsam reproduce table1 --from results/ --time-steps --set data.root=DATA
    sparsam reproduce table1 --only cifar10- --seeds 3 --known results/ --set data.root=DATA
    sparsam reproduce table9 --epochs 30 --engine ray --address auto
    ```
    """
    if not names and not list_rows:
        raise UserValueError("reproduce needs the name of a table or a figure, such as table1; --list shows them")
    experiments = chosen(find_experiments(names or ["all"]), only or [])
    changes = overrides(settings, train__epochs=epochs)
    given = given_options(context)
    if share_start and engine is not Engine.local:
        raise UserValueError("--share-start goes with --engine local: tasks of a cluster know nothing of each other")
    if timed:
        _check_timed(source, rounds, {"--list": list_rows, "--dry-run": dry_run, "--markdown": markdown is not None})
    if list_rows and (others := [option for name, option in given.items() if name not in OF_LIST]):
        raise UserValueError(f"--list shows all rows and trains nothing, so leave out {', '.join(others)}")
    if source is not None and (others := [option for name, option in given.items() if name in OF_TRAINING]):
        raise UserValueError(f"--from shows runs and trains nothing, so leave out {', '.join(others)}")
    if source is not None and not timed and (others := [option for name, option in given.items() if name in OF_TIMING]):
        raise UserValueError(f"--from measures nothing without --time-steps, so leave out {', '.join(others)}")
    if engine is not Engine.ray and (others := [option for name, option in given.items() if name in OF_RAY]):
        raise UserValueError(f"{others[0]} goes with --engine ray")
    if markdown is not None and source is None:
        raise UserValueError("--markdown goes with --from")
    if markdown is not None and changes:
        raise UserValueError("--markdown writes all runs, however many epochs they have: leave out --epochs and --set")
    if list_rows:
        _list(experiments)
        return
    if source is not None:
        if timed:
            time_folder(experiments, source, changes, find_device(device), rounds)
        if markdown is not None:
            write_page(experiments, names or [], source, markdown)
        else:
            show_folder(experiments, source, changes, output)
        return
    planned = part_of(plan_runs(experiments, seeds, output, changes), part)
    elsewhere: list[Run] = []
    if known is not None:
        if any(experiment.shows is not None for experiment in experiments):
            raise UserValueError("--known goes with tables: figures need the weights of all runs")
        planned, elsewhere = without_known(planned, runs_in(known, "--known"))
        print(f"{len(elsewhere)} runs are in {known} already")
    _check(planned, at_once if engine is Engine.local else 1, resume=resume)
    if dry_run:
        _estimate(planned, device, share_start=share_start)
        return
    _announce(planned, share_start=share_start)
    failed = _train(planned, engine, device, at_once, address, retries, share_start=share_start)
    if part is None:
        finished = [run for run in planned if RunDirectory(run.path).finished]
        place = find_device(None if engine is Engine.ray else device)
        print_other_devices(measure_times(experiments, finished, changes, device=place, rounds=rounds))
        _show(experiments, elsewhere, changes, output, place, samples, points)
    elif not failed:
        print(f"Part {part} is trained. When all parts are, the same command without --part shows the tables.")
    if failed:
        raise UserRuntimeError(
            f"{len(failed)} of {len(planned)} runs failed; the same command goes on with them\n"
            + "\n".join(_grouped(failed))
        )


def _check_timed(source: Path | None, rounds: int, others: dict[str, bool]) -> None:
    """Refuse what does not go with --time-steps."""
    if source is None:
        raise UserValueError("--time-steps goes with --from: runs that are trained now are timed afterwards anyway")
    for option in (option for option, given in others.items() if given):
        raise UserValueError(f"--time-steps does not go with {option}: time the steps first, with a command of its own")
    if rounds == 0:
        raise UserValueError("--rounds must be at least 1 for --time-steps, but is 0")


def _grouped(failed: Sequence[str]) -> list[str]:
    """Say each error once, with the runs that have it: the first ones by name."""
    runs: dict[str, list[str]] = {}
    for text in failed:
        run, _, error = text.partition(": ")
        runs.setdefault(error, []).append(run)
    shown = 3
    return [
        f"{'; '.join(names[:shown])}{f' and {len(names) - shown} more' if len(names) > shown else ''}: {error}"
        for error, names in runs.items()
    ]


def _check(planned: Sequence[PlannedRun], at_once: int, *, resume: bool) -> None:
    """Refuse what cannot be trained."""
    check_planned(planned, at_once)
    existing = [run.path for run in planned if RunDirectory(run.path).exists]
    if existing and not resume:
        raise UserValueError(
            f"--no-resume starts anew, but there are runs already, such as {existing[0]}; choose another --output"
        )


def _announce(planned: Sequence[PlannedRun], *, share_start: bool) -> None:
    """Say what there is to do."""
    existing = [run.path for run in planned if RunDirectory(run.path).exists]
    finished = sum(RunDirectory(path).finished for path in existing)
    unfinished = [RunDirectory(path) for path in existing if not RunDirectory(path).finished]
    started = sum(run.only_started for run in unfinished)
    shared = f", {started} whose first steps another run has taken" if started else ""
    print(
        f"{len(planned)} runs: {finished} finished, {len(unfinished) - started} to go on with{shared}, "
        f"{len(planned) - len(existing)} new"
    )
    if share_start and (count := _sharing(planned)):
        print(f"{count} of them wait for another to take their first steps (--share-start)")


def _sharing(planned: Sequence[PlannedRun]) -> int:
    """Return how many runs begin with steps that another one takes."""
    return SharedStart([run for run in planned if not RunDirectory(run.path).finished]).count


def _train(
    planned: Sequence[PlannedRun],
    engine: Engine,
    device: str | None,
    at_once: int,
    address: str | None,
    retries: int,
    *,
    share_start: bool,
) -> list[str]:
    """Train; return which runs failed, and why."""
    if engine is Engine.ray:
        return train_with_ray(planned, device=device, at_once=at_once, address=address, retries=retries)
    progress = LogProgress if at_once > 1 else suitable_progress
    with continued_by_same_command():
        return train_runs(
            planned,
            device=find_device(device),
            at_once=at_once,
            keep_going=True,
            share_start=share_start,
            progress=lambda: progress(ends=True),
        )


def _show(
    experiments: Sequence[Experiment],
    elsewhere: Sequence[Run],
    changes: list[str],
    output: Path,
    device: Any,
    samples: int,
    points: int,
) -> None:
    """Print the tables, draw the figures, and write both."""
    whole = [with_earlier_rows(experiment, output, changes) for experiment in experiments]
    runs = [*read_finished(whole, output, changes), *elsewhere]
    for experiment, all_rows in zip(experiments, whole, strict=True):
        results = compare(all_rows, runs, changes)
        title, name = all_rows.heading(changes), experiment.name + file_suffix(all_rows.rows, changes)
        table = paper_table(experiment, results)
        replace_file(output / f"{name}.md", table_page(title, table))
        replace_file(output / f"{name}.csv", comma_separated(results))
        if experiment.shows is None:
            print_table(title, table, paper_notes(table), whole="the page")
            if found := [run.directory for result in results if result.method for run in result.method.runs]:
                page = write_report(found, output / f"{name}.html", tables={title: table})
                print(f"As a page, and beside it as Markdown and CSV: {page}")
        else:
            print_title(title)
            draw_figure(experiment, results, output / name, device, samples, points)


def _list(experiments: Sequence[Experiment]) -> None:
    for experiment in experiments:
        rows = tuple(
            (
                Cell(row.name, ", ".join(row.defaults)),
                Cell(NONE if row.paper is None else f"{row.paper:.2f}"),
                Cell(NONE if row.flops is None else f"{row.flops:.2f}×"),
                Cell(NONE if row.seconds is None else f"{row.seconds:g} s"),
            )
            for row in experiment.rows
        )
        columns = ("Row", reference_heading(experiment), FLOPS, fisher_heading(experiment))
        print_table(experiment.heading(), Table(columns, rows))


def _estimate(planned: Sequence[PlannedRun], device: str | None, *, share_start: bool) -> None:
    place = find_device(device)
    waiting = [run for run in planned if not RunDirectory(run.path).finished]
    with rich.get_console().status("measuring steps of each network"):
        found = estimate(waiting, place)
    rows = tuple(
        (Cell(e.run.path.name), Cell(f"{e.steps:,}"), Cell(f"{1000 * e.seconds:,.2f}"), Cell(roughly(e.total)))
        for e in found
    )
    if rows:
        print_table("Runs", Table(("Run", "Steps", "ms a step", "Time"), rows))
    finished = len(planned) - len(waiting)
    done = f"; {finished} more are finished" if finished else ""
    total = roughly(sum(e.total for e in found))
    where = "one GPU" if place.type == "cuda" else place
    print(f"{len(found)} runs, {total} on {where}, roughly: by steps measured on random images{done}")
    if share_start and (count := _sharing(waiting)):
        print(f"{count} of them take less, since another takes their first steps (--share-start)")
