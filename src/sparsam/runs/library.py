"""Where recipes are: those of the package by name, others by path."""

from __future__ import annotations

import difflib
from pathlib import Path

from sparsam.runs.schema import RecipeError

PACKAGED = Path(__file__).parents[1] / "recipes"


def packaged_recipes() -> dict[str, str]:
    """Return the names of the recipes that come with the package, each with the first line of its comment."""
    return {path.stem: _comment(path) for path in sorted(PACKAGED.glob("*.toml"), key=lambda path: path.stem)}


def find_recipe(source: str | Path, beside: Path | None = None) -> Path:
    """Return the file of a recipe.

    Args:
        source: The name of a recipe of the package, or a path that ends in .toml.
        beside: The folder that a relative path starts from; None: the working directory.
    """
    if Path(source).suffix == ".toml":
        path = (beside or Path()) / source
        if not path.is_file():
            raise RecipeError(f"there is no recipe at {path}{_did_you_mean(path)}")
        return path
    path = PACKAGED / f"{source}.toml"
    if "/" in str(source) or not path.is_file():
        raise RecipeError(f"there is no recipe named {str(source)!r}{_did_you_mean(Path(f'{source}.toml'))}")
    return path


def _did_you_mean(path: Path) -> str:
    """Suggest recipes of the package, and files beside a path, that have a similar name."""
    files = {file.stem: str(file) for file in path.parent.glob("*.toml")} if path.parent.is_dir() else {}
    known = files | {name: name for name in packaged_recipes()}
    close = [path.stem] if path.stem in known else difflib.get_close_matches(path.stem, known, 3)
    if not close:
        return "; `sparsam recipes` lists those of the package"
    return f"; did you mean {' or '.join(known[name] for name in close)}?"


def _comment(path: Path) -> str:
    first = path.read_text().partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
