"""`sparsam recipes`: the recipes of the package."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sparsam.cli.console import plain_console
from sparsam.errors import UserValueError
from sparsam.runs.library import packaged_recipes

METHOD = re.compile(r"-(sgd|sam|ssam)(-.*)?$")  # what follows data and network in a name


def recipes(
    text: Annotated[str, typer.Argument(help="Only those with this text in their name or description.")] = "",
) -> None:
    """List the recipes that come with the package, grouped by data and network.

    Examples:
    ```
    sparsam recipes
    sparsam recipes digits
    ```
    """
    found = [item for item in packaged_recipes().items() if text.lower() in " ".join(item).lower()]
    if not found:
        raise UserValueError(f"no recipe has {text!r} in its name or description; `sparsam recipes` lists all")
    table = Table("Recipe", "What it is", box=SIMPLE_HEAD, pad_edge=False)
    table.columns[0].no_wrap = True
    groups = [list(group) for _, group in groupby(found, key=lambda item: METHOD.sub("", item[0]))]
    for i, group in enumerate(groups):
        if i:
            table.add_row()
        for name, comment in group:
            table.add_row(name, comment)
    plain_console().print(table)
