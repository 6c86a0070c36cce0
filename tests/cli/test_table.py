"""Tables in terminals of any width: whole numbers, names broken at hyphens, notes where there is room."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from sparsam.cli.table import print_table, show_table
from sparsam.report.table import Cell, Table

NAMES = {"cifar10-resnet18-sgd": "ours", "cifar10-resnet18-ssam-f-sparsity0.95": "", "cifar10-resnet18-sam": "ours"}
COLUMNS = ("Row", "Paper, %", "Ours, %", "n", "Difference", "FLOPs (theory)")
NUMBERS = ("96.66", "95.12 ± 0.31", "3", "-1.54", "1.33×")


def shown(width, names=NAMES):
    """Return the lines of a table without the spaces at their ends."""
    rows = tuple((Cell(name, note), *map(Cell, NUMBERS)) for name, note in names.items())
    out = StringIO()
    show_table(Table(COLUMNS, rows), Console(file=out, width=width))
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", range(50, 140, 3))
def test_lines_fit_and_numbers_are_whole(width):
    lines = shown(width)
    assert max(map(len, lines)) <= width
    assert [line.count("95.12 ± 0.31") for line in lines if "96.66" in line] == [1, 1, 1]
    assert sum("ours" in line for line in lines) in (1, 2)  # once for both rows, or beside each


def test_a_name_that_does_not_fit_is_broken_after_a_hyphen():
    lines = shown(70)
    (first,) = (i for i, line in enumerate(lines) if line.startswith(" cifar10-resnet18-ssam"))
    pieces = [line.split()[0] for line in lines[first : first + 2]]
    assert pieces == ["cifar10-resnet18-ssam-f-", "sparsity0.95"]


def test_notes_stand_beside_the_names_or_once_below():
    assert sum(line.startswith(" cifar10-resnet18-sgd (ours) ") for line in shown(120)) == 1
    assert shown(65)[-1] == " cifar10-resnet18-sgd, cifar10-resnet18-sam: ours"
    long = {**NAMES, "cifar10-resnet18-sam": "a note that is longer than the room beside its name would be"}
    below = shown(120, long)
    assert " cifar10-resnet18-sgd: ours" in below
    assert f" cifar10-resnet18-sam: {long['cifar10-resnet18-sam']}" in below
    assert not any("(ours)" in line for line in below)


def test_a_broken_name_keeps_its_note():
    name = "cifar100-resnet18-thrifty-layer2-fraction0.469-rho0.1-validation5000-epochs60-refresh_batchnorm100"
    assert shown(120, {"cifar100-resnet18-sgd": "ours", name: "ours"})[-1].strip().endswith("ours")


@pytest.mark.parametrize(
    ("width", "whole", "line"),
    [
        (100, "the page", ""),
        (66, "the page", "Left out for width: FLOPs (theory); a wider terminal or the page shows it."),
        (
            52,
            "--markdown",
            "Left out for width: Difference, FLOPs (theory); a wider terminal or --markdown shows them.",
        ),
        (52, "", "Left out for width: Difference, FLOPs (theory); a wider terminal shows them."),
    ],
)
def test_columns_that_do_not_fit_are_named(monkeypatch, width, whole, line):
    """An empty one is not: nobody misses it."""
    out = StringIO()
    monkeypatch.setattr("rich.get_console", lambda: Console(file=out, width=width))
    cells = (Cell("cifar10-resnet18-sgd"), *map(Cell, NUMBERS), Cell("–"))
    notes = {"Ours, %": "Ours: that of the last.", "FLOPs (theory)": "FLOPs: theory.", "Empty": "Empty: nothing."}
    print_table("A table", Table((*COLUMNS, "Empty"), (cells,)), notes, whole)
    words = "Ours: that of the last." if line else "Ours: that of the last. FLOPs: theory."
    text = " ".join(out.getvalue().split())
    assert text.endswith(f"1.33× {words}" if not line else f"{words} {line}")
    assert ("1.33×" in text) == (not line)


@pytest.mark.parametrize("width", [60, 130])
def test_brackets_and_colons_of_users_are_no_markup(monkeypatch, width):
    out = StringIO()
    monkeypatch.setattr("rich.get_console", lambda: Console(file=out, width=width))
    cells = (Cell("sam [rho]", "[dim]ours[/dim]"), Cell("1 [bold]", ":key: [note]"))
    print_table("rho [small] on :key: [/dim]", Table(("Row", "Ours [%]"), (cells,)), {"Ours [%]": "Ours [%]: [best]."})
    lines = out.getvalue().splitlines()
    assert lines[1] == "rho [small] on :key: [/dim]"
    for text in ("sam [rho] ([dim]ours[/dim])", "1 [bold]", "Ours [%]", "Ours [%]: [best]."):
        assert any(text in line for line in lines)
    assert any(":key: [note]" in line for line in lines[2:]) == (width >= 118)


def test_a_table_without_rows():
    assert not any(line.strip() for line in shown(80, {}))
