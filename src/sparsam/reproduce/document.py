"""A page in Markdown: tables with our numbers beside the paper's, and what is known about the differences."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sparsam.report.table import Table
from sparsam.report.text import markdown
from sparsam.reproduce.comparison import Result, compare, other_epochs
from sparsam.reproduce.experiments import Experiment
from sparsam.reproduce.table import FISHER_SECONDS, paper_notes, paper_table
from sparsam.runs.run import Run

WIDTH = 120  # of a line
SHORTEST = 0.1  # of the rows' own epochs; shorter runs were made to time steps

HEAD = """# {title}

`sparsam reproduce {names} --from {folder} --markdown {file}` writes this page from the runs in `{folder}`. There are
runs of {found} of {total} rows. `sparsam reproduce {table} --only ROW` trains one.
"""
OF_PAPER = """
Mi et al., "Make Sharpness-Aware Minimization Stronger: A Sparsified Perturbation Approach", NeurIPS 2022. The paper has
the highest accuracy of all epochs on the test images; ours is that of the last epoch, as mean ± sample standard
deviation over n seeds. FLOPs are theoretical, by the paper's formula, which is not for SSAM-C and thrifty SAM. Times
are measured; tables without any have no column for them. Rows marked "ours" are not in the paper. A + after a commit:
the run was made with changes to it.
"""
OF_OWN = """
Accuracies are those of the last epoch, as mean ± sample standard deviation over n seeds. References are numbers from
the table's file. FLOPs are theoretical, by a formula that is not for SSAM-C and thrifty SAM. Times are measured.
A + after a commit: the run was made with changes to it.
"""


def results_page(
    tables: Sequence[Experiment], runs: Sequence[Run], *, names: Sequence[str], folder: Path, file: Path
) -> str:
    """Return the page.

    Args:
        tables: What to show.
        runs: Finished runs of any kind.
        names: What the tables were asked for by.
        folder: Where the runs are; notes/NAME.md in it is printed under the table NAME.
        file: The name of the page.
    """
    results = {result.recipe.name: result for table in tables for result in compare(table, runs)}
    found = sum(result.method is not None for result in results.values())
    of_paper = any(table.of_paper for table in tables)
    head = HEAD.format(
        title="The paper's tables, and ours" if of_paper else "Tables",
        names=" ".join(names),
        folder=folder,
        file=file,
        found=found,
        total=len(results),
        table="TABLE" if of_paper else " ".join(names),
    )
    words = OF_PAPER if of_paper else OF_OWN
    return "\n".join([head + words, *(_section(table, runs, folder) for table in tables)])


def table_page(title: str, table: Table) -> str:
    """Return one table as a page of its own, with what a reader must know below it."""
    return f"# {title}\n\n{markdown(table)}\n\n{_filled(' '.join(paper_notes(table).values()))}\n"


def _section(experiment: Experiment, runs: Sequence[Run], folder: Path) -> str:
    parts = [
        f"## {experiment.name.capitalize().replace('Table', 'Table ')}"
        + (f": {experiment.title}" if experiment.title else ""),
        *_tables(experiment, runs),
    ]
    note = folder / "notes" / f"{experiment.name}.md"
    if note.is_file():
        parts.append(note.read_text(encoding="utf-8").strip())
    return "\n\n".join(parts) + "\n"


def _tables(experiment: Experiment, runs: Sequence[Run]) -> Iterator[str]:
    full = compare(experiment, runs)
    yield markdown(paper_table(experiment, full))
    yield from _made_on(full)
    for epochs in other_epochs(experiment, runs):
        if epochs < SHORTEST * min(result.recipe.train.epochs for result in full):
            continue
        found = [r for r in compare(experiment, runs, [f"train.epochs={epochs}"]) if r.method]
        whose = "the paper's " if experiment.of_paper else ""
        yield f"**With {epochs} epochs** instead of {whose}{_epochs(full)}:"
        yield markdown(paper_table(experiment, found))
        yield from _made_on(found)


def _made_on(results: Sequence[Result]) -> Iterator[str]:
    """Say on what the runs were made, and with what their times were measured."""
    runs = [run for result in results if result.method for run in result.method.counted]
    if not runs:
        return
    times = [run.measured.get(key, {}) for run in runs for key in _timed(run)]
    facts = [
        _distinct(run.environment["device"] for run in runs),
        f"torch {_distinct(run.environment['torch'] for run in runs)}",
        f"precision {_distinct(run.recipe['train']['precision'] for run in runs)}",
        f"commit {_distinct(commit for run in runs for commit in run.commits)}",
    ]
    if times:
        torch, commit = (_distinct(about.get(key) for about in times) for key in ("torch", "git"))
        facts.append(f"times: torch {torch}, commit {commit}")
    yield _filled(f"Made on: {'; '.join(facts)}.")


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _distinct(texts: Iterable[str | None]) -> str:
    return ", ".join(sorted({text or "unknown" for text in texts}))


def _timed(run: Run) -> list[str]:
    """Return which numbers of a run are times that were measured after it."""
    fisher = [FISHER_SECONDS] if FISHER_SECONDS in run.extra else []
    return ["step_ratio", *fisher] if run.step_ratio else fisher


def _epochs(results: Sequence[Result]) -> str:
    return " or ".join(map(str, sorted({result.recipe.train.epochs for result in results})))
