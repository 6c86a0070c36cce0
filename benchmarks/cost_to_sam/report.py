"""The table and the picture: each method's share of SAM's gain, against its cost. MARGINS.md has the rules."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from sparsam.report.table import NONE, Cell, Table
from sparsam.report.text import markdown
from sparsam.reproduce.comparison import Difference

from .methods import METHODS
from .runs import best_radii
from .workloads import WORKLOADS

MARGIN = 0.1  # of SAM's gain
Key = tuple[str, bool]  # a method, and whether its radius was searched


class Score(NamedTuple):
    """What a method brings on a workload, in the metric's unit: positive is better."""

    gain: float
    interval: tuple[float, float] | None
    seeds: int


class Workbook:
    """The runs of one workload.

    Args:
        workload: Its name.
        found: All runs that there are.
    """

    def __init__(self, workload: str, found: Iterable[dict[str, Any]]) -> None:
        self.sign = -1 if WORKLOADS[workload].lower_is_better else 1
        found = [result for result in found if result["workload"] == workload]
        best = best_radii(found)
        self.rows: dict[Key, dict[int, dict[str, Any]]] = {}
        for result in found:
            name, rho = result["method"], result["rho"]
            for searched, chosen in ((False, METHODS[name].rho), (True, best.get((workload, name), nan))):
                if rho == chosen:
                    self.rows.setdefault((name, searched), {})[result["seed"]] = result

    def score(self, key: Key, other: Key) -> Score | None:
        """Return the paired difference of two rows; None where they have no seed in common."""
        ours, others = self.rows.get(key, {}), self.rows.get(other, {})
        pairs = [(ours[seed]["test"]["last"], others[seed]["test"]["last"]) for seed in ours.keys() & others.keys()]
        if not pairs:
            return None
        if any(one is None or two is None for one, two in pairs):  # a training diverged
            return Score(-inf, (-inf, -inf), len(pairs))
        differences = [self.sign * (one - two) / 100 for one, two in pairs]
        found = Difference.of(differences, [0.0, 0.0])  # against a constant, Welch's t-test is the paired t-test
        return Score(found.value, found.interval, len(pairs))

    @property
    def sam(self) -> Key:
        """SAM's row: with the searched radius if there is one."""
        return ("sam", True) if ("sam", True) in self.rows else ("sam", False)

    @property
    def gain(self) -> Score | None:
        """SAM's gain over the base optimizer."""
        return self.score(self.sam, ("base", False))

    def share(self, key: Key) -> str:
        """Return a row's share of SAM's gain in percent with its interval, in words."""
        whole, own = self.gain, self.score(key, ("base", False))
        if own is None or whole is None or whole.interval is None or whole.interval[0] <= 0:
            return NONE
        if own.gain == -inf:
            return "diverges"
        interval = ""
        if own.interval:
            low, high = (100 * end / whole.gain for end in own.interval)
            interval = f" ({low:.0f} to {high:.0f})"
        return f"{100 * own.gain / whole.gain:.0f} %{interval}"

    def is_not_worse(self, key: Key, other: Key | None = None) -> bool | None:
        """Return whether a row is not worse than SAM, or than another row; None where that is not known."""
        whole, own = self.gain, self.score(key, other or self.sam)
        if whole is None or own is None or own.interval is None:
            return None
        return own.interval[0] > -MARGIN * whole.gain


def table(found: list[dict[str, Any]]) -> Table:
    """Return a row for each method, searched radii apart."""
    books = {name: Workbook(name, found) for name in WORKLOADS}
    keys = [(name, searched) for searched in (False, True) for name in METHODS]
    rows = []
    for key in keys:
        runs = [run for book in books.values() for run in book.rows.get(key, {}).values()]
        if not runs:
            continue
        title = METHODS[key[0]].title + (", rho searched" if key[1] else "")
        cost = fmean(run["cost"]["counted"] for run in runs)
        verdicts = [verdict for book in books.values() if (verdict := book.is_not_worse(key)) is not None]
        counts = f"{sum(verdicts)} of {len(verdicts)}" if verdicts else NONE
        shares = (book.share(key) for book in books.values())
        rows.append(tuple(map(Cell, (title, f"{cost:.2f}", *shares, counts))))
    return Table(("Method", "Cost, × base (counted)", *WORKLOADS, "Not worse than SAM"), tuple(rows))


def write(found: list[dict[str, Any]], picture: Path) -> None:
    """Print the table and draw the picture: a line of points for each workload."""
    from matplotlib.figure import Figure

    print(markdown(table(found)))
    figure = Figure(figsize=(8, 4.5))
    axes = figure.add_subplot()
    for name in WORKLOADS:
        book = Workbook(name, found)
        whole = book.gain
        if whole is None or whole.gain <= 0:
            continue
        points = [
            (fmean(run["cost"]["counted"] for run in book.rows[key].values()), 100 * score.gain / whole.gain)
            for key in book.rows
            if (score := book.score(key, ("base", False)))
        ]
        axes.plot(*zip(*sorted(points), strict=True), "o", label=name, alpha=0.7)
    axes.set(xlabel="counted cost, × base optimizer", ylabel="gain, % of SAM's")
    axes.axhline(100, color="0.7", linewidth=1, zorder=0)
    axes.legend()
    figure.savefig(picture)
    print(picture)
