"""Compare training runs: numbers for a table, and one HTML page to look at."""

from sparsam.report.collect import Method, Run, Statistic, collect, group_runs, read_run
from sparsam.report.page import write_report
from sparsam.report.record import ReportError
from sparsam.report.table import Cell, Table, summary_table

__all__ = [
    "Cell",
    "Method",
    "ReportError",
    "Run",
    "Statistic",
    "Table",
    "collect",
    "group_runs",
    "read_run",
    "summary_table",
    "write_report",
]
