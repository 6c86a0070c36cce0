"""`sparsam reproduce --from`: the tables and figures of runs that are in a folder, and the times of their steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sparsam.cli.analysis import status
from sparsam.cli.paper_figures import redraw_figure
from sparsam.cli.table import print_table
from sparsam.errors import UserValueError
from sparsam.reproduce.comparison import EPOCHS, compare, find_runs, other_epochs
from sparsam.reproduce.document import results_page
from sparsam.reproduce.experiments import Experiment, file_suffix
from sparsam.reproduce.table import paper_notes, paper_table
from sparsam.reproduce.times import measure_times, runs_to_time
from sparsam.runs.files import replace_file
from sparsam.runs.run import Run


def runs_in(folder: Path, option: str = "--from") -> list[Run]:
    """Read the finished runs in a folder that an option names."""
    if not folder.is_dir():
        raise UserValueError(f"{option} must be a folder with runs, but {folder} is none")
    return find_runs(folder)


def write_page(experiments: Sequence[Experiment], names: Sequence[str], folder: Path, file: Path) -> None:
    """Write the tables from the runs in a folder to one page."""
    tables = [experiment for experiment in experiments if experiment.shows is None]
    if not tables:
        raise UserValueError("--markdown writes tables, but only figures are named")
    replace_file(file, results_page(tables, runs_in(folder), names=names, folder=folder, file=file))
    print(f"The tables: {file}")


def show_folder(experiments: Sequence[Experiment], folder: Path, changes: list[str], output: Path) -> None:
    """Print the tables from the runs in a folder, and draw the figures from what was measured of them."""
    runs = runs_in(folder)
    found = {experiment: compare(experiment, runs, changes) for experiment in experiments}
    missing = {
        experiment: f"There is no run of {experiment.name} in {folder}." + _others(experiment, runs, changes)
        for experiment, results in found.items()
        if not any(result.method for result in results)
    }
    changed = [experiment for experiment in experiments if experiment.heading(changes) != experiment.heading()]
    if changed and len(missing) == len(experiments):
        raise UserValueError("\n".join(missing.values()).replace("There is", f"with {' '.join(changes)} there is"))
    for experiment, results in found.items():
        whole = "" if changes or experiment.shows else "--markdown"  # which takes no changes, and no figures
        table = paper_table(experiment, results)
        print_table(experiment.heading(changes), table, paper_notes(table), whole)
        if experiment in missing:
            print(missing[experiment])
            continue
        if experiment.shows is not None:
            redraw_figure(experiment, results, output / (experiment.name + file_suffix(experiment.rows, changes)))
        if experiment not in changed and (others := _others(experiment, runs, changes)):
            print(others.strip())


def _others(experiment: Experiment, runs: Sequence[Run], changes: list[str]) -> str:
    """Say how runs of other numbers of epochs are shown, if there are any."""
    found = sorted(other_epochs(experiment, runs, changes))
    if not found:
        return ""
    scaled = any(change.partition("=")[0] == EPOCHS for change in changes)
    own = {row.recipe().train.epochs for row in experiment.rows} if scaled else set()
    ways = dict.fromkeys("leave out --epochs" if epochs in own else f"use --epochs {epochs}" for epochs in found)
    return f" There are runs of {' and '.join(map(str, found))} epochs: {' or '.join(ways)}."


def time_folder(experiments: Sequence[Experiment], folder: Path, changes: list[str], device: Any, rounds: int) -> None:
    """Measure the times that the runs in a folder lack, and write them into their summaries."""
    planned = runs_to_time(experiments, runs_in(folder), changes)
    with status(f"{len(planned)} runs: times"):
        others = measure_times(experiments, planned, changes, device=device, rounds=rounds)
    print_other_devices(others)


def print_other_devices(devices: Iterable[str]) -> None:
    """Name the devices whose runs have no times because they are not this one."""
    for device in devices:
        print(f"No times were measured of runs that were trained on {device}, another device than this.")
