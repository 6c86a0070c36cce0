"""`sparsam recipes`: the recipes of the package."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def recipes() -> None:
    """List the recipes that come with the package.

    Example:
    ```
    sparsam recipes
    ```
    """
    from sparsam.runs.library import packaged_recipes

    table = Table("Recipe", "What it is", box=SIMPLE_HEAD, pad_edge=False)
    table.columns[0].no_wrap = True
    for name, comment in packaged_recipes().items():
        table.add_row(name, comment)
    Console(highlight=False).print(table)
