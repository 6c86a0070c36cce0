"""The summary table as text, the same for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsam.report.method import Method, Statistic
from sparsam.step_cost import StepRatio

NONE = "–"
TRAIN_LOSS, TRAIN_LOSS_NOTE = "Training loss", "Training loss: the mean over the steps of the last epoch."
STEP_TIME = "Step time (measured)"


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and a remark that is shown smaller."""

    text: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Headings and rows; each row starts with the method."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def summary_table(methods: Sequence[Method]) -> Table:
    """Return one row for each method. Further numbers of the runs become columns at the end.

    Empty columns are left out, but not that of the accuracy.
    """
    further = list(dict.fromkeys(label for method in methods for label in method.extra))
    columns = (
        "Method",
        "Seeds",
        f"{accuracy_label(methods)}, %",
        TRAIN_LOSS,
        "Perturbed (mean of steps), %",
        "FLOPs (theory)",
        STEP_TIME,
        "Peak memory, MB",
        "Training time",
        "Weight decay",
        "ρ",
        *further,
    )
    rows = [_row(method, methods, further) for method in methods]
    filled = [i for i in range(len(columns)) if i <= 2 or any(row[i] != Cell(NONE) for row in rows)]
    return Table(tuple(columns[i] for i in filled), tuple(tuple(row[i] for i in filled) for row in rows))


def summary_notes(table: Table) -> dict[str, str]:
    """Return what a reader of a summary table must know, by the heading that it is about."""
    notes = {}
    for i, heading in enumerate(table.columns):
        varies = any(" ± " in row[i].text for row in table.rows)
        if "ccuracy" in heading and varies:
            notes[heading] = "±: the standard deviation over seeds."
        elif heading == TRAIN_LOSS:
            notes[heading] = TRAIN_LOSS_NOTE
        elif heading == STEP_TIME and varies:
            notes[heading] = "Step time: relative to the base optimizer, ± half of the range between the quartiles."
        elif heading.startswith("Loss rise"):
            notes[heading] = "Loss rise: how much the training loss grows within ρ of the weights; lower is flatter."
    return notes


def accuracy_label(methods: Sequence[Method]) -> str:
    """Name the accuracy after the images it was measured on."""
    images = {run.evaluated_on for method in methods for run in method.runs}
    return f"{images.pop().capitalize()} accuracy" if len(images) == 1 else "Accuracy"


def duration(seconds: float) -> str:
    """Return a time as people write it.

    >>> [duration(s) for s in (8.04, 59.96, 192, 4320)]
    ['8.0 s', '1 min 0 s', '3 min 12 s', '1 h 12 min']
    """
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def _milliseconds(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} ms"


def _row(method: Method, methods: Sequence[Method], further: Sequence[str]) -> tuple[Cell, ...]:
    accuracy, memory, seconds = method.accuracy, method.peak_memory_mb, method.seconds
    return (
        Cell(method.label, "; ".join(_notes(method, methods))),
        Cell(str(len(method.counted))),
        Cell(spread(accuracy, 100, ".2f"), _best(method)),
        Cell(spread(method.train_loss, 1, ".3g", ".2g")),
        Cell(_scaled(method.perturbed, 100, ".1f")),
        Cell(times(method.theoretical_flops.mean if method.theoretical_flops else None)),
        _step_cell(method),
        Cell(_scaled(memory, 1, ",.0f")),
        Cell(duration(seconds.mean) if seconds else NONE),
        Cell(_values(method.weight_decay)),
        Cell(_values(method.rho), ", ".join(method.other_radii)),
        *(Cell(_further(method, label)) for label in further),
    )


def _further(method: Method, label: str) -> str:
    """Return a further number of a method, and of how many seeds it is if some lack it."""
    found, seeds = method.extra.get(label), len(method.counted)
    some = f" ({found.n} of {seeds} seeds)" if found and found.n < seeds else ""
    return spread(found, 1, ".4g", ".2g") + some


def _step_cell(method: Method) -> Cell:
    """Say what a step takes: in turn with the base optimizer's, with half of the quartiles' range, or in the run."""
    ratio, step = method.step_ratio, method.step_ms
    if ratio is None:
        return Cell(times(method.relative_step), _milliseconds(step) if step else "")
    return Cell(step_ratio(ratio), f"median of {ratio.rounds} rounds")


def _notes(method: Method, methods: Sequence[Method]) -> list[str]:
    """Return remarks: the network, the data and the images if rows differ in them, and the notes of the method."""
    notes: list[str] = []
    for words in (lambda run: run.setup, lambda run: f"{run.evaluated_on} images"):
        if len({words(run) for other in methods for run in other.runs}) > 1:
            notes += dict.fromkeys(words(run) for run in method.counted)
    return [*notes, *method.notes]


def _best(method: Method) -> str:
    best = method.best_accuracy
    if not best:
        return ""
    epoch = f" (epoch {method.counted[0].best_epoch})" if best.n == 1 else ""
    return f"best {100 * best.mean:.2f}{epoch}"


def spread(statistic: Statistic | None, scale: float, form: str, spread_form: str = "") -> str:
    """Return a mean and, where there are several values, their standard deviation."""
    text = _scaled(statistic, scale, form)
    if statistic is None or statistic.deviation is None:
        return text
    return f"{text} ± {scale * statistic.deviation:{spread_form or form}}"


def _scaled(statistic: Statistic | None, scale: float, form: str) -> str:
    return f"{scale * statistic.mean:{form}}" if statistic else NONE


def times(ratio: float | None) -> str:
    """Return a ratio as people write it."""
    return NONE if ratio is None else f"{ratio:.2f}×"


def step_ratio(ratio: StepRatio | None) -> str:
    """Return the median of a step's ratios with half of the quartiles' range.

    >>> step_ratio(StepRatio(1.83, 1.79, 1.85, 30))
    '1.83× ± 0.03'
    """
    return NONE if ratio is None else f"{times(ratio.median)} ± {ratio.spread:.2f}"


def _values(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values) or NONE
