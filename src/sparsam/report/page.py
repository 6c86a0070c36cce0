"""One HTML page that compares runs. It asks for nothing from outside and works from a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sparsam.errors import UserValueError
from sparsam.report.analysis_section import figures_html, results_html
from sparsam.report.collect import collect
from sparsam.report.embedding import write_page
from sparsam.report.figures import find_figures
from sparsam.report.method import Method
from sparsam.report.result_summaries import read_results
from sparsam.report.styles import Style, styles
from sparsam.report.table import Cell, Table, accuracy_label, summary_table
from sparsam.runs.run import Run

SCRIPTS = ("elements.js", "numbers.js", "interactive.js", "line_chart.js", "heat_map.js", "page.js")


def write_report(
    runs: list[Path], destination: Path, figures: Path | None = None, tables: Mapping[str, Table] | None = None
) -> Path:
    """Write one self-contained page that compares training runs.

    Args:
        runs: Run directories. Those of one recipe are seeds of one method.
        destination: The file to write, or a directory, in which it is named `report.html`.
        figures: The folder in which commands have drawn the runs; default: see :func:`~.figures.find_figures`.
        tables: Further tables by their titles, which come first.

    Returns:
        The path of the page.

    Raises:
        RunError: A run cannot be read.
        UserValueError: There is no run, or the page cannot be written.
    """
    destination = Path(destination)
    if destination.is_dir():
        destination = destination / "report.html"
    methods = collect(runs)
    shown = [run for method in methods for run in method.runs]
    drawn = find_figures(shown, destination, figures)
    looks = styles([method.method for method in methods])
    try:
        write_page(
            destination,
            "page.html",
            styles=["page.css"],
            scripts=SCRIPTS,
            data=_data(methods, looks),
            title=escape(", ".join(dict.fromkeys(run.setup for run in shown))),
            sentence=escape(_sentence(methods)),
            facts="\n".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in _facts(shown)),
            tables="\n".join(_further(i, title, table) for i, (title, table) in enumerate((tables or {}).items())),
            table=_table(summary_table(methods), looks),
            minima=figures_html(drawn, destination),
            recipes="\n".join(
                _details(method, run, look, results_html(read_results(run.directory), destination))
                for method, look in zip(methods, looks, strict=True)
                for run in method.runs
            ),
        )
    except OSError as error:
        raise UserValueError(f"{destination} cannot be written: {error}") from error
    return destination


def _sentence(methods: Sequence[Method]) -> str:
    planned = [run.planned_epochs for method in methods for run in method.runs if run.planned_epochs is not None]
    epochs = f" for {_range(planned, 'epoch')}" if planned else ""
    seeds = _range([len(method.seeds) for method in methods], "seed")
    if len(methods) == 1:
        return f"{methods[0].label}, trained{epochs} with {seeds}: accuracy, time and what is perturbed."
    return (
        f"{len(methods)} methods, each trained{epochs} with {seeds}, compared by accuracy, time and what they perturb."
    )


def _range(numbers: Sequence[int], noun: str) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low if low == high else f'{low} to {high}'} {noun}{'' if high == 1 else 's'}"


def _facts(runs: Sequence[Run]) -> Iterable[tuple[str, str]]:
    dates = sorted({run.started.date() for run in runs})
    yield "Date", " to ".join(dict.fromkeys(f"{date:%Y-%m-%d}" for date in (dates[0], dates[-1])))
    yield "Hardware", _distinct(_hardware(run.environment) for run in runs)
    yield "Precision", _distinct(run.recipe["train"]["precision"] for run in runs)
    yield (
        "Versions",
        ", ".join(f"{key} {_distinct(run.environment[key] for run in runs)}" for key in ("sparsam", "torch", "python")),
    )
    commits = [commit for run in runs for commit in run.commits if commit]
    if commits:
        yield "Commit", _distinct(commits)


def _hardware(environment: dict[str, Any]) -> str:
    device, threads = environment["device"], environment.get("threads")
    if device != "cpu":
        return str(device)
    name = str(environment.get("processor") or "CPU")
    return f"{name}, {threads} {'thread' if threads == 1 else 'threads'}" if threads else name


def _distinct(texts: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(texts))


def _swatch(look: Style) -> str:
    return (
        f'<svg class="swatch {look.classes}" viewBox="0 0 26 8" aria-hidden="true">'
        f'<line class="line" x1="1" x2="25" y1="4" y2="4"/></svg>'
    )


def _further(number: int, title: str, table: Table) -> str:
    return (
        f'<section class="card" aria-labelledby="table-{number}"><h2 id="table-{number}">{escape(title)}</h2>'
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="table-{number}">'
        f'<table class="numbers">{_table(table)}</table></div></section>'
    )


def _table(table: Table, looks: Sequence[Style] = ()) -> str:
    head = "".join(f'<th scope="col">{escape(label)}</th>' for label in table.columns)
    swatches = [_swatch(look) for look in looks] or [""] * len(table.rows)
    rows = "\n".join(
        f'<tr><th scope="row">{swatch}{_cell(row[0])}</th>'
        + "".join(f"<td>{_cell(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for swatch, row in zip(swatches, table.rows, strict=True)
    )
    return f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>"


def _cell(cell: Cell) -> str:
    note = f"<small>{escape(cell.note)}</small>" if cell.note else ""
    return f"<span>{escape(cell.text)}</span>{note}"


def _details(method: Method, run: Run, look: Style, results: str) -> str:
    state = "" if run.finished else ' <em class="badge">unfinished</em>'
    plain = {key: value for key, value in run.recipe.items() if not isinstance(value, dict)}
    sections = {"recipe": plain, **{k: v for k, v in run.recipe.items() if isinstance(v, dict)}}
    sections["environment"] = run.environment
    lists = "\n".join(f"<section><h3>{escape(k)}</h3>{_list(v)}</section>" for k, v in sections.items())
    return (
        f"<details><summary>{_swatch(look)}<span>{escape(method.label)}, seed {run.seed}{state}</span>"
        f'<span class="folder">{escape(run.directory.resolve().name)}</span></summary>'
        f'{results}<div class="settings">{lists}</div></details>'
    )


def _list(values: dict[str, Any]) -> str:
    shown = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in values.items()}
    return f"<dl>{''.join(f'<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>' for k, v in shown.items())}</dl>"


def _data(methods: Sequence[Method], looks: Sequence[Style]) -> dict[str, Any]:
    return {"accuracy": accuracy_label(methods), "methods": list(map(_series, methods, looks))}


def _series(method: Method, look: Style) -> dict[str, Any]:
    density = method.density()
    return {
        "label": method.label,
        "style": look.classes,
        "runs": [
            {
                "seed": run.seed,
                "finished": run.finished,
                "epoch": [epoch.epoch for epoch in run.metrics],
                "accuracy": [epoch.test_accuracy for epoch in run.metrics],
                # JSON has no NaN; the page draws a gap.
                "loss": [epoch.train_loss if math.isfinite(epoch.train_loss) else None for epoch in run.metrics],
                "elapsed": [epoch.elapsed for epoch in run.metrics],
                "timed": run.seconds is not None,  # runs that shared a device say nothing of time
            }
            for run in method.seeds
        ],
        "density": density
        and {
            "layers": density.layers,
            "epochs": density.epochs,
            "shares": [[None if s is None else round(s, 4) for s in row] for row in density.shares],
            "seeds": density.seeds,
        },
    }
