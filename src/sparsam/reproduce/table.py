"""The table of a reproduction: the paper's number, ours, the difference."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from sparsam.report.table import NONE, Cell, Table, spread, times
from sparsam.reproduce.comparison import Result
from sparsam.reproduce.experiments import Experiment

FISHER_SECONDS = "Fisher information, s"  # the label of a run's further number


def paper_table(experiment: Experiment, results: Sequence[Result]) -> Table:
    """Return one row for each result. Those that the paper lacks are marked, if it has any."""
    printed = any(result.row.paper is not None for result in results)
    timed = any(result.row.seconds is not None for result in results)
    fisher = ("Fisher, paper", "Fisher, ours") if timed else ()
    set_against = any(result.other for result in results)
    against = (f"Minus {experiment.against.name} (95 % interval)",) if experiment.against and set_against else ()
    columns = ("Row", "Paper, %", "Ours, %", "n", *against, "Difference", "FLOPs (theory)", "Time × SGD", *fisher)
    rows = (_row(result, printed=printed, timed=timed, against=bool(against)) for result in results)
    return Table(columns, tuple(rows))


def _row(result: Result, *, printed: bool, timed: bool, against: bool) -> tuple[Cell, ...]:
    row, accuracy = result.row, result.accuracy
    own = ["ours"] if printed and row.paper is None else []
    return (
        Cell(row.name, ", ".join([*own, *row.defaults])),
        Cell(NONE if row.paper is None else f"{row.paper:.2f}"),
        Cell(spread(accuracy, 100, ".2f"), "; ".join(result.method.notes) if result.method else ""),
        Cell(str(accuracy.n) if accuracy else NONE),
        *((_advantage(result),) if against else ()),
        Cell(NONE if result.difference is None else f"{result.difference:+.2f}"),
        Cell(times(result.flops)),
        Cell(times(result.time)),
        *(_fisher_times(result) if timed else ()),
    )


def _fisher_times(result: Result) -> tuple[Cell, Cell]:
    paper, ours = result.row.seconds, result.further(FISHER_SECONDS)
    return Cell(NONE if paper is None else f"{paper:g} s"), Cell(NONE if ours is None else f"{ours:.3g} s")


def _advantage(result: Result) -> Cell:
    """Return a difference with its interval, if it has one."""
    found = result.advantage
    if found is None:
        return Cell(NONE)
    interval = " ({:+.2f} to {:+.2f})".format(*found.interval) if found.interval else ""
    return Cell(f"{found.value:+.2f}{interval}")


def comma_separated(results: Sequence[Result]) -> str:
    """Return the results for other programs: plain numbers, accuracies in percent, nothing where there is none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    further = ("fisher_seconds_paper", "fisher_seconds", "advantage", "advantage_low", "advantage_high")
    writer.writerow(("row", "run", "paper", "ours", "deviation", "n", "difference", "flops", "time_ratio", *further))
    for result in results:
        row, accuracy = result.row, result.accuracy
        deviation = accuracy.deviation if accuracy else None
        advantage = result.advantage
        interval = advantage.interval if advantage else None
        numbers = (
            row.paper,
            accuracy and 100 * accuracy.mean,
            None if deviation is None else 100 * deviation,
            accuracy and accuracy.n,
            result.difference,
            result.flops,
            result.time,
            row.seconds,
            result.further(FISHER_SECONDS),
            advantage and advantage.value,
            *(interval or (None, None)),
        )
        cells = ("" if number is None else f"{number:.6g}" for number in numbers)
        writer.writerow((row.name, result.recipe.name, *cells))
    return text.getvalue()
