"""The page: the scores, the metrics they come from, rounded weights, the searches of rho, and paired comparisons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf
from statistics import fmean, median

from sparsam.report.method import Statistic
from sparsam.report.table import NONE, Cell, Table, spread
from sparsam.report.text import markdown

from ..methods import METHODS
from ..runs import SEARCH_SEEDS, SEEDS
from ..training import BITS
from .scores import Result, Row, Score, Workbook

FIXED = [Row(name) for name in METHODS]
SEARCHED = [Row(name, searched=True) for name, method in METHODS.items() if method.search]
ROUNDED = [Row(name) for name in ("base", "decay-10", "thrifty-1.15", "share-8")]  # and SAM
COMPARISONS: list[tuple[str, str, str | None]] = [  # a question, a row, and the row to compare with; None is SAM
    ("Ascent: gradient of the batch or F-SAM's direction?", "gradient-1.15", "thrifty-1.15"),
    ("Ascent: gradient of the batch or F-SAM's direction?", "gradient-1.35", "thrifty-1.35"),
    ("Part of the batch or late layers in late steps?", "share-8", "thrifty-1.15"),
    ("Part of the batch or late layers in late steps?", "share-4-late", "thrifty-1.15"),
    ("Ascent: gradient of the share or of the batch?", "share-8", "share-8-batch"),
    ("Train longer instead?", "base-2", None),
    ("Average the weights instead?", "average", None),
    ("Decay the weights more instead?", "decay-10", None),
    ("Perturb for parts of the batch (m-sharpness)?", "groups-8", None),
]
DIGITS = {"%": 2, "MSE": 4, "bits": 4}

PAGE = """# Cost to SAM

SAM takes two passes in a step. This page compares cheaper ways to train: the share of SAM's gain that each keeps, and
its cost. This command makes the page from the runs in this folder, in [benchmarks/](../../benchmarks):

    python -m cost_to_sam report

The **score** of a method is its gain over the base optimizer as a percentage of SAM's gain with the ρ that was best on
validation data. 0 % is the base optimizer, 100 % is SAM. Intervals are 95 % intervals of differences paired by seed. A
method is *not worse* than SAM if the lower end of the interval of its difference to SAM is above −10 % of SAM's gain.
[MARGINS.md](../../benchmarks/cost_to_sam/MARGINS.md) has all rules.

## Workloads

{workloads}

A gain is in the workload's unit, and positive is better. Workloads on which SAM does not help have no score.
{provisional}
## Score

Cost is relative to the base optimizer: counted in passes of the forward and backward computation, and
[measured](#time). The median over workloads, with the range in parentheses. Scores have their interval in parentheses,
and their number of seeds n if it is not {seeds}.

### One setting for all workloads

{fixed}

### ρ searched on validation data

{searched}

## Test metric after the last epoch

Mean ± standard deviation over seeds, with n in parentheses.

{last}

## Test metric after the epoch that is best on validation data

Mean ± standard deviation over seeds, with n in parentheses.

{best}

## Rounded weights

Change of the test metric when the weight matrices are rounded after the last epoch, with one scale for each output.
Mean ± standard deviation over seeds, with n in parentheses.

{rounded}

## Search of ρ

The metric on validation data, seed {search_seeds}. The best is bold. While the best was at an end, the search went on
beyond it. The last two columns are the scores at the default ρ and at the best ρ.

{rhos}

## Comparisons

The first row minus the second, in the workload's unit; positive is better. *Not worse* has the margin of the score.
*Worse* says that the interval is below 0. All other differences are *unclear*.

{comparisons}

## Time

`python -m cost_to_sam measure` lets each method take its steps in turn with the base optimizer, round after round. c is
the median over the rounds of the ratio in a round. If a fraction q of a training's steps are the method's own, its cost
is 1 + q (c − 1).

{times}

## Runs

{runs}
"""


def page(books: Sequence[Workbook], measured: dict[str, Result]) -> str:
    """Return the page as Markdown."""
    provisional = [book.name for book in books if not book.sam.searched]
    note = (
        f"\nSAM's ρ has not been searched on {', '.join(provisional)}. Its default stands in.\n" if provisional else ""
    )
    return PAGE.format(
        seeds=len(SEEDS),
        search_seeds=" and ".join(map(str, SEARCH_SEEDS)),
        workloads=workloads(books),
        provisional=note,
        fixed=scores(books, FIXED),
        searched=scores(books, SEARCHED),
        last=metrics(books, "last"),
        best=metrics(books, "best"),
        rounded=rounded(books),
        rhos="\n\n".join(
            searches(books, radii) for radii in dict.fromkeys(METHODS[row.method].search for row in SEARCHED)
        ),
        comparisons=comparisons(books),
        times="\n\n".join(times(books, found) for found in measured.values()) or NONE,
        runs=runs(books),
    )


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    return markdown(Table(tuple(columns), tuple(tuple(map(Cell, row)) for row in rows)))


def workloads(books: Sequence[Workbook]) -> str:
    """Return a table of the workloads and of SAM's gain on each."""
    rows = []
    for book in books:
        task = (type(book.workload).__doc__ or "").splitlines()[0].rstrip(".")
        rho = book.best.get("sam")
        helps = NONE if book.gain is None else "yes" if book.helped else "no"
        rows.append((book.name, task, NONE if rho is None else f"{rho:g}", _difference(book, book.gain), helps))
    return _table(("Workload", "Task", "ρ of SAM", "Gain of SAM", "SAM helps"), rows)


def scores(books: Sequence[Workbook], rows: Sequence[Row]) -> str:
    """Return a table of costs, scores and the number of workloads on which a row is not worse than SAM."""
    helped = [book for book in books if book.helped]
    lines = []
    for row in rows:
        counted, measured = (_costs(cost(row) for book in books if (cost := getattr(book, kind))) for kind in KINDS)
        verdicts = [verdict for book in helped if (verdict := book.is_not_worse(row)) is not None]
        count = f"{sum(verdicts)} of {len(verdicts)}" if verdicts else NONE
        lines.append((METHODS[row.method].title, counted, measured, *(_share(book, row) for book in helped), count))
    names = [book.name for book in helped]
    return _table(("Method", "Cost (counted)", "Cost (measured)", *names, "Not worse than SAM"), lines)


KINDS = ("counted", "measured")


def _costs(values: Iterable[float | None]) -> str:
    """Return the median and the range of costs."""
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    low, high = f"{min(known):.2f}", f"{max(known):.2f}"
    return f"{median(known):.2f}×" + (f" ({low} to {high})" if low != high else "")


def _share(book: Workbook, row: Row) -> str:
    """Return a row's score in words, with the radius that was found for it."""
    found = book.share(row)
    if found is None:
        return NONE
    notes = [f"n {found.seeds}"] if found.seeds < len(SEEDS) else []
    notes += [f"ρ {book.best[row.method]:g}"] if row.searched else []
    if found.gain == -inf:
        return ", ".join(["diverges", *notes])
    interval = found.interval
    ends = (
        f" ({_signed(interval[0], 0)} to {_signed(interval[1], 0)})" if interval and interval[0] < interval[1] else ""
    )
    return ", ".join([f"{_signed(found.gain, 0)} %{ends}", *notes])


def metrics(books: Sequence[Workbook], epoch: str) -> str:
    """Return a table of the test metric after the last epoch, or after the best one on validation data."""
    rows = [
        (
            row.title,
            *(_spread(book, [result["test"][epoch] for result in book.rows.get(row, {}).values()]) for book in books),
        )
        for row in (*FIXED, *SEARCHED)
    ]
    return _table(("Method", *map(_with_unit, books)), rows)


def rounded(books: Sequence[Workbook]) -> str:
    """Return a table of what rounding the weights does to the test metric."""
    lines = []
    for bits in BITS:
        rows = [(row.title, [row] * len(books)) for row in ROUNDED]
        rows.append((f"{METHODS['sam'].title}, ρ searched", [book.sam for book in books]))
        for title, keys in rows:
            changes = (
                _spread(book, [_change(result, bits) for result in book.rows.get(key, {}).values()], sign="+")
                for book, key in zip(books, keys, strict=True)
            )
            lines.append((str(bits), title, *changes))
    return _table(("Bits", "Method", *map(_with_unit, books)), lines)


def _change(result: dict, bits: int) -> float | None:
    before, after = result["test"]["last"], result["rounded"][str(bits)]
    return None if before is None or after is None else after - before


def searches(books: Sequence[Workbook], begun: Sequence[float]) -> str:
    """Return a table of the searches that began with some radii."""
    rows = [row for row in SEARCHED if METHODS[row.method].search == begun]
    radii = sorted({rho for book in books for row in rows for rho in book.radii[row.method]})
    lines = [
        (
            _with_unit(book),
            METHODS[row.method].title,
            *(_validation(book, row.method, rho) for rho in radii),
            f"{METHODS[row.method].rho:g}",
            *(_share(book, kept) for kept in (Row(row.method), row)),
        )
        for book in books
        for row in rows
    ]
    columns = (
        "Workload",
        "Method",
        *(f"ρ {rho:g}" for rho in radii),
        "Default ρ",
        "Score at the default ρ",
        "Score at the best ρ",
    )
    return _table(columns, lines)


def _validation(book: Workbook, method: str, rho: float) -> str:
    values = book.validation(method, rho)
    if not values:
        return NONE
    known = [value for value in values if value is not None]
    text = f"{fmean(known):.{_digits(book)}f}" if len(known) == len(values) else "diverges"
    text = f"**{text}**" if book.best.get(method) == rho else text
    return text + (f" (n {len(values)})" if len(values) < len(SEARCH_SEEDS) else "")


def comparisons(books: Sequence[Workbook]) -> str:
    """Return a table of paired differences of rows, with the verdict of each."""
    lines = []
    for question, name, against in COMPARISONS:
        row, other = Row(name), Row(against) if against else Row("sam", searched=True)
        costs = (_costs(book.counted(key) for book in books) for key in (row, other))
        cells, verdicts = [], []
        for book in books:
            reference = other if against else book.sam
            verdicts.append(book.is_not_worse(row, reference))
            cells.append(_compared(book, book.score(row, reference), verdicts[-1]))
        known = [verdict for verdict in verdicts if verdict is not None]
        count = f"{sum(known)} of {len(known)}" if known else NONE
        lines.append((question, row.title, other.title, *costs, *cells, count))
    columns = ("Question", "First row", "Second row", "Cost of the first", "Cost of the second")
    return _table((*columns, *map(_with_unit, books), "Not worse"), lines)


def _compared(book: Workbook, found: Score | None, verdict: bool | None) -> str:
    if found is None or verdict is None or found.interval is None:
        return _difference(book, found)
    return f"{_difference(book, found)}: " + (
        "not worse" if verdict else "worse" if found.interval[1] < 0 else "unclear"
    )


def _difference(book: Workbook, found: Score | None) -> str:
    """Return a difference in the workload's unit with its interval."""
    if found is None:
        return NONE
    note = f", n {found.seeds}" if found.seeds < len(SEEDS) else ""
    if abs(found.gain) == inf:
        return ("diverges" if found.gain < 0 else "the second diverges") + note
    value, *ends = (f"{_signed(number, _digits(book), '+')}" for number in (found.gain, *(found.interval or ())))
    return value + (f" ({' to '.join(ends)})" if ends else "") + note


def runs(books: Sequence[Workbook]) -> str:
    """Return a table of where the runs ran, and from which source."""
    keys = ("processor", "python", "torch", "git")
    found = Counter(
        (*(str(result["environment"].get(key)) for key in keys), result["source"])
        for book in books
        for result in book.found
    )
    rows = [(*about, str(count)) for about, count in sorted(found.items())]
    return _table(("Processor", "Python", "torch", "Commit of sparsam", "Hash of the benchmark", "Runs"), rows)


def times(books: Sequence[Workbook], found: Result) -> str:
    """Return a table of what the methods cost on a machine."""
    names = [book.name for book in books if book.name in found["costs"]]
    rows = [
        (method.title, *(f"{cost['cost']:.2f}×" if (cost := found["costs"][name].get(key)) else NONE for name in names))
        for key, method in METHODS.items()
    ]
    where = (
        f"{found['device']}, {found['threads']} thread, {found['rounds']} rounds of {found['steps']} steps, "
        f"torch {found['torch']}, commit {found['git']}:"
    )
    return f"{where}\n\n{_table(('Method', *names), rows)}"


def _spread(book: Workbook, values: Sequence[float | None], sign: str = "") -> str:
    """Return mean, standard deviation and n."""
    if not values:
        return NONE
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"diverges ({len(values)})"
    return (
        spread(Statistic.of(known), 1, f"{sign}z.{_digits(book)}f", f".{_digits(book)}f").replace("-", "−")
        + f" ({len(values)})"
    )


def _signed(value: float, digits: int, sign: str = "") -> str:
    """Return a number with a true minus and without −0."""
    return f"{value:{sign}z.{digits}f}".replace("-", "−")


def _digits(book: Workbook) -> int:
    return DIGITS[book.workload.unit]


def _with_unit(book: Workbook) -> str:
    return f"{book.name}, {book.workload.unit}"
