"""Tables and figures as data: a list of rows, each a recipe and the paper's number."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from sparsam.runs.recipe import Recipe, load_recipe, relevant_overrides
from sparsam.runs.same import different_settings
from sparsam.runs.schema import RecipeError

PAPER = Path(__file__).with_name("paper.toml")
ALL = ("tables", "figures", "all")
FIGURES = ("curves", "sparsity", "gradients", "landscape", "hessian")
LENGTHS = ("train.epochs", "train.max_steps", "data.limit")  # settings that make a run smaller
NUMBER = (int, float)
TABLE = {"title": str, "shows": str, "rows": list, "rows_of": list, "against": str}
ROW = {"recipe": str, "set": list, "paper": NUMBER, "flops": NUMBER, "seconds": NUMBER}
ROWS = 'rows, such as rows = [{ recipe = "digits-sam" }]'  # what a table needs, in words
TEXTS = ("set", "rows_of")
WORDS = {str: "a text", list: "a list", NUMBER: "a number"}


@dataclass(frozen=True)
class Row:
    """One row: a recipe of the package, what it changes, and what the paper has.

    Args:
        source: The recipe's name, or a file.
        overrides: `key=value`.
        paper: The accuracy in percent; None: the row is ours.
        flops: The theoretical cost relative to SGD.
        seconds: The time to compute the Fisher information.
    """

    source: str
    overrides: tuple[str, ...] = ()
    paper: float | None = None
    flops: float | None = None
    seconds: float | None = None

    @property
    def name(self) -> str:
        """The recipe's name, and what differs from it."""
        return self.recipe().name

    def changed(self, overrides: Iterable[str]) -> dict[str, tuple[Any, ...]]:
        """Return the settings that overrides change, each with the old and the new value."""
        return different_settings(self.recipe().to_dict(), self.recipe(overrides).to_dict())

    @property
    def defaults(self) -> list[str]:
        """The overrides that are the recipe's own values, so that the name does not show them."""
        changed = different_settings(_plain(self.source).to_dict(), self.recipe().to_dict())
        return [text for text in self.overrides if text.partition("=")[0] not in changed]

    def recipe(self, overrides: Iterable[str] = ()) -> Recipe:
        """Return the recipe. Its name says in what it differs from the one that it is made from.

        Args:
            overrides: Further `key=value`; those that have no meaning for the row are left out.

        >>> Row("cifar10-resnet18-ssam-f", ("mask.sparsity=0.9", "mask.samples=128")).recipe(["train.epochs=30"]).name
        'cifar10-resnet18-ssam-f-sparsity0.9-epochs30'
        """
        plain = _plain(self.source)
        recipe = load_recipe(self.source, [*self.overrides, *self.relevant(overrides)])
        changed = different_settings(plain.to_dict(), recipe.to_dict())
        return replace(recipe, name="-".join([plain.name, *(_tag(key, new) for key, (_, new) in changed.items())]))

    def relevant(self, overrides: Iterable[str]) -> list[str]:
        """Return the overrides that have a meaning for the row."""
        return relevant_overrides(self.source, overrides, first=self.overrides)


@dataclass(frozen=True)
class Experiment:
    """A table or a figure."""

    name: str
    title: str
    rows: tuple[Row, ...]
    shows: str | None = None
    """What a figure draws, one of :data:`FIGURES`; None: it is a table."""
    against: Row | None = None
    """The row that all others are set against."""
    of_paper: bool = False
    """Whether it is the paper's; else it is from a file of one's own."""
    whole: tuple[Row, ...] = ()
    """All rows, where :func:`chosen` has kept some of them."""

    def heading(self, overrides: Iterable[str] = ()) -> str:
        """Return the name and the title, and what overrides make different from the paper."""
        overrides, found, smaller = list(overrides), {}, False
        for row in self.rows:
            for key, (old, new) in row.changed(overrides).items():
                found[key] = f"{key} {new}" + ("" if old is None else f" instead of {old}")
                smaller |= key in LENGTHS and (old is None or new < old)
        label = f" ({'scaled down' if smaller else 'changed'}: {', '.join(found.values())})" if found else ""
        return self.name + (f": {self.title}" if self.title else "") + label


def find_experiments(names: Sequence[str]) -> list[Experiment]:
    """Return tables and figures of the paper by name, and those of files (*.toml) of the same form.

    Args:
        names: Such as table1 and figure3; tables, figures or all; or files.
    """
    paper = read_experiments(PAPER)
    found: dict[str, Experiment] = {}
    for name in names:
        if Path(name).suffix == ".toml":
            found |= read_experiments(Path(name))
        elif name in ALL:
            kind = "" if name == "all" else name.removesuffix("s")
            found |= {key: experiment for key, experiment in paper.items() if key.startswith(kind)}
        elif name in paper:
            found[name] = paper[name]
        else:
            close = difflib.get_close_matches(name, [*paper, *ALL], 1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join((*paper, *ALL))}, or a file (*.toml)"
            raise RecipeError(f"there is no table or figure named {name!r}; {hint}")
    return list(found.values())


def read_experiments(path: Path) -> dict[str, Experiment]:
    """Read a file of tables and figures."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecipeError(f"there is no file {path}") from error
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from error
    if not content:
        raise RecipeError(f"{path} has no table; a table is [NAME], and below it {ROWS}")
    return {name: _experiment(path, name, content) for name in content}


def _experiment(path: Path, name: str, content: dict[str, Any]) -> Experiment:
    where, values = f"{name} in {path}", content[name]
    if not isinstance(values, dict) or not values.keys() & {"rows", "rows_of"}:
        raise RecipeError(f"{where} must be a table with rows or rows_of")
    _check_types(where, values, TABLE)
    shows = values.get("shows")
    if shows is not None and shows not in FIGURES:
        raise RecipeError(f"shows of {where} must be one of {', '.join(FIGURES)}, but is {shows!r}")
    rows = tuple(_row(f"row {i} of {where}", row) for i, row in enumerate(values.get("rows", ()), 1))
    for other in values.get("rows_of", ()):
        if other not in content or other == name:
            raise RecipeError(f"rows_of of {where} must name other tables of the file, but has {other!r}")
        rows += tuple(row for row in _experiment(path, other, content).rows if row.paper is not None)
    if not rows:
        raise RecipeError(f"{where} has no row; a table needs {ROWS}, or rows_of tables whose rows have a paper number")
    against = values.get("against")
    found = next((row for row in rows if row.name == against), None)
    if against is not None and found is None:
        names = ", ".join(row.name for row in rows)
        raise RecipeError(f"against of {where} must be the name of one of its rows ({names}), but is {against!r}")
    return Experiment(name, values.get("title", ""), rows, shows, found, path == PAPER)


def _row(where: str, values: Any) -> Row:
    if not isinstance(values, dict) or "recipe" not in values:
        raise RecipeError(f"{where} must have a recipe, but is {values!r}")
    _check_types(where, values, ROW)
    rest = {key: None if values.get(key) is None else float(values[key]) for key in ("paper", "flops", "seconds")}
    row = Row(values["recipe"], tuple(values.get("set", ())), **rest)
    try:
        row.recipe()
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from error
    return row


def _check_types(where: str, values: dict[str, Any], types: dict[str, Any]) -> None:
    for key, value in values.items():
        if key not in types:
            raise RecipeError(f"{where} has an unknown key {key}; known: {', '.join(types)}")
        expected = types[key]
        if not isinstance(value, expected) or (key in TEXTS and not all(isinstance(text, str) for text in value)):
            words = "a list of texts" if key in TEXTS else WORDS[expected]
            raise RecipeError(f"{key} of {where} must be {words}, but is {value!r}")


def chosen(experiments: Sequence[Experiment], only: Sequence[str]) -> list[Experiment]:
    """Keep some rows. A text that is a row's name keeps that row; any other keeps the rows that contain it.

    Args:
        experiments: Tables and figures.
        only: The texts, which may hold * and ?; none: all rows are kept.
    """
    if not only:
        return list(experiments)
    names = {row.name for experiment in experiments for row in experiment.rows}
    patterns = [text if text in names else f"*{text}*" for text in only]
    kept = []
    for experiment in experiments:
        rows = tuple(row for row in experiment.rows if any(fnmatch(row.name, text) for text in patterns))
        if rows:
            kept.append(replace(experiment, rows=rows, whole=experiment.rows))
    if not kept:
        raise RecipeError(f"--only {' '.join(only)} leaves no row; --list shows their names")
    return kept


def file_suffix(rows: Iterable[Row], overrides: Iterable[str]) -> str:
    """Return what overrides add to the names of files about some rows: the settings that they change in any of them.

    >>> rows = [Row("digits-sgd"), Row("digits-thrifty", ("schedule.fraction=0.5",))]
    >>> file_suffix(rows, ["train.epochs=2", "sam.rho=0.3"])
    '-rho0.3-epochs2'
    """
    overrides = list(overrides)
    new = {key: value for row in rows for key, (_, value) in row.changed(overrides).items()}
    return "".join(f"-{_tag(key, new[key])}" for key in sorted(new))  # in one order, whichever rows there are


@cache
def _plain(source: str) -> Recipe:
    return load_recipe(source)


def _tag(key: str, value: Any) -> str:
    """Return a changed setting as a part of a name.

    >>> _tag("mask.sparsity", 0.9), _tag("mask.interval_epochs", None), _tag("mask.criterion", "sharpest")
    ('sparsity0.9', 'interval-none', 'sharpest')
    """
    word = key.rpartition(".")[2].removesuffix("_epochs")
    if value is None:
        return f"{word}-none"
    return value if isinstance(value, str) else f"{word}{value:g}"
