"""What runs are called in tables and figures, and in which order they come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from sparsam.errors import UserValueError
from sparsam.report.styles import place
from sparsam.runs.directory import RunDirectory, directories_in
from sparsam.runs.results import result_files
from sparsam.runs.run import read_method


def names_of(runs: Sequence[Path]) -> list[str]:
    """Return the names of directories, with their parents where the names alone would be the same.

    >>> names_of([Path("runs/sgd"), Path("runs/sam")]), names_of([Path("a/sam"), Path("b/sam")])
    (['sgd', 'sam'], ['a/sam', 'b/sam'])
    """
    paths = [run.resolve().parts for run in runs]
    longest = max(map(len, paths))
    enough = (n for n in range(1, longest) if len({parts[-n:] for parts in paths}) == len(set(paths)))
    length = next(enough, longest)
    return ["/".join(parts[-length:]) for parts in paths]


def with_inner(runs: Iterable[Path]) -> list[Path]:
    """Return runs, each once, and in place of a folder that is no run those in it, at any depth."""
    return list({path.resolve(): path for run in runs for path in _runs_in(run)}.values())


def _runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder. What is not there is taken for a run, and refused when it is read.

    So is a folder with results alone: figures can be drawn from it.
    """
    found = directories_in(folder)
    if not found and folder.is_dir() and not result_files(folder):
        raise UserValueError(
            f"{folder} has no runs in it, and is not one itself; give a run, which is a folder with a recipe.json, or "
            f"a folder of runs"
        )
    return found or [folder]


def ordered(runs: Iterable[Path]) -> list[Path]:
    """Return runs by method, SGD first, then by recipe and seed. What is not a run comes last.

    A folder of runs stands for these.
    """
    return sorted(with_inner(runs), key=_key)


def _key(run: Path) -> tuple[object, ...]:
    directory = RunDirectory(run)
    if not directory.exists:
        return place("~"), "", 0, ""
    recipe = directory.read("recipe.json")
    seed = recipe.values.get("train", {}).get("seed", 0)
    return place(read_method(run)), recipe.text("name"), seed, str(run)
