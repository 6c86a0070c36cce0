"""What runs are called in tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def names_of(runs: Sequence[Path]) -> list[str]:
    """Return the names of directories, with those around them where they would be the same.

    >>> names_of([Path("runs/sgd"), Path("runs/sam")]), names_of([Path("a/sam"), Path("b/sam")])
    (['sgd', 'sam'], ['a/sam', 'b/sam'])
    """
    paths = [run.resolve().parts for run in runs]
    longest = max(map(len, paths))
    enough = (n for n in range(1, longest) if len({parts[-n:] for parts in paths}) == len(set(paths)))
    length = next(enough, longest)
    return ["/".join(parts[-length:]) for parts in paths]
