"""Compare training runs: a table, figures, and one HTML page."""

from sparsam.report.collect import collect, group_runs
from sparsam.report.method import Method, Statistic
from sparsam.report.page import write_report
from sparsam.report.table import Cell, Table, summary_table

__all__ = [
    "Cell",
    "Method",
    "Statistic",
    "Table",
    "collect",
    "group_runs",
    "summary_table",
    "write_report",
]
