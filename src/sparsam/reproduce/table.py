"""The table of a reproduction: the paper's number, ours, the difference."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from sparsam.report.table import NONE, TRAIN_LOSS, TRAIN_LOSS_NOTE, Cell, Table, spread, step_ratio, times
from sparsam.reproduce.comparison import Result
from sparsam.reproduce.experiments import Experiment

PAPER, REFERENCE, FLOPS, TIME = "Paper, %", "Reference, %", "FLOPs (theory)", "Time × SGD"  # headings
INTERVAL = "(95 % interval)"  # how the heading of a difference from another row ends
FISHER_SECONDS = "Fisher information, s"  # the label of a run's further number


def paper_table(experiment: Experiment, results: Sequence[Result]) -> Table:
    """Return one row for each result. Those that the paper lacks are marked in its own tables, if it has any.

    Empty columns are left out, but not those of our accuracies.
    """
    printed = experiment.of_paper and any(result.row.paper is not None for result in results)
    timed = any(result.row.seconds is not None for result in results)
    fisher = (fisher_heading(experiment), "Fisher, ours") if timed else ()
    against = (f"Minus {experiment.against.name} {INTERVAL}",) if experiment.against else ()
    always = ("Row", _ours(results), "n")
    losses = () if experiment.of_paper else (TRAIN_LOSS,)
    columns = ("Row", reference_heading(experiment), *always[1:], *against, "Difference", *losses, FLOPS, TIME, *fisher)
    rows = [_row(result, experiment, printed=printed, timed=timed) for result in results]
    kept = [i for i, heading in enumerate(columns) if heading in always or any(row[i].text != NONE for row in rows)]
    return Table(tuple(columns[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in rows))


def paper_notes(table: Table) -> dict[str, str]:
    """Return what a reader of such a table must know, by the heading that it is about."""
    notes = {}
    for i, heading in enumerate(table.columns):
        varies = any(" ± " in row[i].text for row in table.rows)
        if heading == PAPER:
            notes[heading] = "Paper: the highest accuracy of all epochs."
        elif heading.startswith("Ours"):
            spread = ", mean ± standard deviation over n seeds" if varies else ""
            notes[heading] = f"Ours: the accuracy of the last epoch{spread}."
        elif heading.endswith(INTERVAL) and any("(" in row[i].text for row in table.rows):
            notes[heading] = "Interval: holds the true difference with 95 % confidence, by Welch's t-test."
        elif heading == TRAIN_LOSS:
            notes[heading] = TRAIN_LOSS_NOTE
        elif heading == FLOPS:
            notes[heading] = "FLOPs: by the paper's formula, which is not for rows with a cut."
        elif heading == TIME and varies:
            notes[heading] = "Time: of a step, ± half of the range between the quartiles."
    return notes


def reference_heading(experiment: Experiment) -> str:
    """Name the column of the numbers that ours are compared with."""
    return PAPER if experiment.of_paper else REFERENCE


def fisher_heading(experiment: Experiment) -> str:
    """Name the column of the times that ours are compared with."""
    return f"Fisher, {'paper' if experiment.of_paper else 'reference'}"


def _ours(results: Sequence[Result]) -> str:
    """Name the column of our accuracies after the images, if these are not the test images."""
    images = {result.recipe.evaluated_on for result in results} - {"test"}
    return f"Ours ({images.pop()}), %" if images else "Ours, %"


def _row(result: Result, experiment: Experiment, *, printed: bool, timed: bool) -> tuple[Cell, ...]:
    row, accuracy = result.row, result.accuracy
    own = ["ours"] if printed and row.paper is None else []
    return (
        Cell(row.name, ", ".join([*own, *row.defaults])),
        Cell(NONE if row.paper is None else f"{row.paper:.2f}"),
        Cell(spread(accuracy, 100, ".2f"), "; ".join(result.method.notes) if result.method else ""),
        Cell(str(accuracy.n) if accuracy else NONE),
        *((_advantage(result),) if experiment.against else ()),
        Cell(NONE if result.difference is None else f"{result.difference:+.2f}"),
        *(() if experiment.of_paper else (Cell(spread(result.train_loss, 1, ".3g", ".2g")),)),
        Cell(times(result.flops)),
        Cell(step_ratio(result.method.step_ratio if result.method else None)),
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
    plain = ("paper", "ours", "deviation", "n", "difference", "train_loss", "flops", "time_ratio")
    further = ("fisher_seconds_paper", "fisher_seconds", "advantage", "advantage_low", "advantage_high")
    writer.writerow(("row", "run", *plain, *further))
    for result in results:
        row, accuracy, loss = result.row, result.accuracy, result.train_loss
        deviation = accuracy.deviation if accuracy else None
        advantage = result.advantage
        interval = advantage.interval if advantage else None
        numbers = (
            row.paper,
            accuracy and 100 * accuracy.mean,
            None if deviation is None else 100 * deviation,
            accuracy and accuracy.n,
            result.difference,
            loss and loss.mean,
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
