"""The score: each method's share of SAM's gain, and which rows are not worse than others. MARGINS.md has the rules."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite, nan
from statistics import median
from typing import Any, NamedTuple

from sparsam.reproduce.comparison import Difference

from ..methods import METHODS
from ..runs import SEARCH_SEEDS, searches
from ..workloads import WORKLOADS

MARGIN = 0.1  # of SAM's gain
Result = dict[str, Any]  # the content of a file


class Row(NamedTuple):
    """A row of the tables: a method at its one radius, or at the radius that a search found."""

    method: str
    searched: bool = False

    @property
    def title(self) -> str:
        """The name of the row where both kinds of rows are in a table."""
        return METHODS[self.method].title + (", ρ searched" if self.searched else "")


BASE = Row("base")


class Score(NamedTuple):
    """The paired difference of two rows in the metric's unit. Positive is better, −inf is a training that diverged."""

    gain: float
    interval: tuple[float, float] | None
    seeds: int


class Workbook:
    """The runs of one workload.

    Args:
        workload: Its name.
        found: All runs of all workloads.
        times: What the methods' steps took on a machine, if that is known.
    """

    def __init__(self, workload: str, found: Iterable[Result], times: Result | None = None) -> None:
        self.costs: dict[str, Any] = (times or {"costs": {}})["costs"].get(workload, {})
        self.name, self.workload = workload, WORKLOADS[workload]
        self.found = [result for result in found if result["workload"] == workload]
        found = {method: search for (name, method), search in searches(self.found).items() if name == workload}
        self.radii = {method: radii for method, (radii, _) in found.items()}
        self.best = {method: best for method, (_, best) in found.items() if best is not None}
        self.rows: dict[Row, dict[int, Result]] = {}
        for result in self.found:
            name, rho = result["method"], result["rho"]
            for searched, chosen in ((False, METHODS[name].rho), (True, self.best.get(name, nan))):
                if rho == chosen:
                    self.rows.setdefault(Row(name, searched), {})[result["seed"]] = result

    def score(self, row: Row, other: Row) -> Score | None:
        """Return the paired difference of two rows; None where they have no seed in common."""
        ours, others = self.rows.get(row, {}), self.rows.get(other, {})
        pairs = [(ours[seed]["test"]["last"], others[seed]["test"]["last"]) for seed in ours.keys() & others.keys()]
        if not pairs:
            return None
        for side, worst in ((0, -inf), (1, inf)):
            if any(pair[side] is None for pair in pairs):
                return Score(worst, (worst, worst), len(pairs))
        sign = -1 if self.workload.lower_is_better else 1
        differences = [sign * (one - two) / 100 for one, two in pairs]
        found = Difference.of(differences, [0.0, 0.0])  # against a constant, Welch's t-test is the paired t-test
        same = (found.value, found.value) if len(pairs) > 1 else None  # where all seeds differ by the same amount
        return Score(found.value, found.interval or same, len(pairs))

    @property
    def sam(self) -> Row:
        """SAM's row: with the searched radius if there is one."""
        return Row("sam", Row("sam", True) in self.rows)

    @property
    def gain(self) -> Score | None:
        """SAM's gain over the base optimizer."""
        return self.score(self.sam, BASE)

    @property
    def helped(self) -> float | None:
        """SAM's gain if SAM helps on this workload, else None."""
        whole = self.gain
        helps = whole and whole.interval and isfinite(whole.gain) and whole.interval[0] > 0
        return whole.gain if whole and helps else None

    def share(self, row: Row) -> Score | None:
        """Return a row's gain as a percentage of SAM's; None without a gain or where SAM does not help."""
        whole, own = self.helped, self.score(row, BASE)
        if whole is None or own is None:
            return None
        interval = own.interval and (100 * own.interval[0] / whole, 100 * own.interval[1] / whole)
        return Score(100 * own.gain / whole, interval, own.seeds)

    def is_not_worse(self, row: Row, other: Row | None = None) -> bool | None:
        """Return whether a row is not worse than SAM, or than another row; None where that is not known."""
        other = other or self.sam
        whole, own = self.helped, self.score(row, other)
        if row == other or whole is None or own is None or own.interval is None:
            return None
        return own.interval[0] > -MARGIN * whole

    def counted(self, row: Row) -> float | None:
        """Return the cost of a row in passes of the base optimizer."""
        costs = [result["cost"]["counted"] for result in self.rows.get(row, {}).values()]
        return median(costs) if costs else None

    def measured(self, row: Row) -> float | None:
        """Return the cost of a row in time, in steps of the base optimizer."""
        cost = self.costs.get(row.method)
        return cost and cost["cost"]

    def validation(self, method: str, rho: float) -> list[float | None]:
        """Return the metric on validation data of a search's runs with a radius."""
        return [
            result["validation"]["last"]
            for result in self.found
            if (result["method"], result["rho"]) == (method, rho) and result["seed"] in SEARCH_SEEDS
        ]
