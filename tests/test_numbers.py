"""The numbers on the pages are those of the committed files, and no measured number lacks a file.

claims.py has the numbers of README.md, results/README.md and results/notes/. benchmarks/front_page.py makes the table
and the pictures of README.md. RESULTS.md, which includes results/notes/, is compared in test_reproduce_command.py.
"""

from __future__ import annotations

from functools import cache

import pytest
from committed import RESULTS, ROOT, front_page
from page_numbers import Page, PageTable, Sentence, TableOf, numbers_in

from claims import CLAIMS, SETTINGS
from sparsam.runs.directory import RunDirectory, directories_in

PAGES = ["README.md", "results/README.md", *(str(p.relative_to(ROOT)) for p in sorted(RESULTS.glob("notes/*.md")))]
SENTENCES = [claim for claim in CLAIMS if isinstance(claim, Sentence)]
TABLES = [claim for claim in CLAIMS if isinstance(claim, TableOf)]


@cache
def page(name: str) -> Page:
    return Page((ROOT / name).read_text(encoding="utf-8"), generated=(front_page.START, front_page.END))


def find_table(claim: TableOf) -> PageTable | None:
    found = [t for t in page(claim.page).tables if t.heading == claim.heading and t.columns[1:] == [*claim.columns]]
    return found[0] if len(found) == 1 else None


def wrong(where, numbers, values):
    """Return a line for each number that is not the value from the files."""
    printed = [number.text for number in numbers]
    if len(printed) != len(values):
        return [f"{where}: the numbers {printed}, but the files have {len(values)}: {values}"]
    return [
        f"{where}: {number.text}, but the files have {value:.6g}"
        for number, value in zip(numbers, values, strict=True)
        if not number.agrees(value)
    ]


def fail(lines, remedy="correct the page, or the claim in tests/claims.py"):
    if lines:
        pytest.fail("\n".join([*lines, remedy]), pytrace=False)


@pytest.mark.parametrize("claim", SENTENCES, ids=lambda claim: f"{claim.page}: {claim.text}")
def test_sentence(claim):
    found = page(claim.page).find(claim.text)
    assert found, f"{claim.page} does not say {claim.text!r}: change or delete this claim in tests/claims.py"
    values = claim.values()
    lines = [line for each in found for line in wrong(f"{claim.page}:{each.numbers[0].line}", each.numbers, values)]
    fail(lines)


@pytest.mark.parametrize(
    "claim", TABLES, ids=lambda claim: f"{claim.page}: {claim.heading}: {', '.join(claim.columns)}"
)
def test_table(claim):
    table = find_table(claim)
    assert table, (
        f"{claim.page} does not have one table with the columns {[*claim.columns]} under {claim.heading!r}: change or "
        f"delete this claim in tests/claims.py"
    )
    rows = [row.cells[0] for row in table.rows]
    assert rows == [*claim.rows], f"{claim.page} has other rows than the claim: change one of them in tests/claims.py"
    lines = [
        line
        for row, key in zip(table.rows, claim.rows.values(), strict=True)
        for (column, values), cell in zip(claim.columns.items(), row.cells[1:], strict=True)
        for line in wrong(f"{claim.page}:{row.line}: {column}", numbers_in(cell), values(key))
    ]
    fail(lines)


@pytest.mark.parametrize("name", PAGES)
def test_every_measured_number_has_a_claim(name):
    phrases = [*(claim.text for claim in SENTENCES if claim.page == name), *SETTINGS]
    found = [each for phrase in phrases for each in page(name).find(phrase)]
    tables = [table for claim in TABLES if claim.page == name and (table := find_table(claim))]
    lines = {row.line for table in tables for row in table.rows}
    without = [
        f"{name}:{number.line}: {number.text} needs a claim or a setting in tests/claims.py"
        for number in page(name).measured()
        if number.line not in lines and not any(each.start <= number.start < each.end for each in found)
    ]
    fail(without, "a claim says which file a number comes from, a setting says that it is not measured")


def test_every_setting_is_on_a_page():
    gone = [phrase for phrase in SETTINGS if not any(page(name).find(phrase) for name in PAGES)]
    fail(gone, "no page has these phrases any more: delete them from SETTINGS in tests/claims.py")


def test_summaries_are_the_last_lines_of_the_metrics():
    wrong = [
        str(path.relative_to(ROOT))
        for path in directories_in(RESULTS)
        if RunDirectory(path).summary()["test_accuracy"] != RunDirectory(path).metrics()[-1]["test_accuracy"]
    ]
    fail(wrong, "test_accuracy of these runs' summary.json is not that of the last line of metrics.jsonl")


def test_the_front_page_is_up_to_date():
    names = [path.name for path in front_page.outdated(front_page.measure())]
    assert not names, f"{', '.join(names)}: run python benchmarks/front_page.py"
