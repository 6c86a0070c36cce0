"""Which settings differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys, tables and all, in which nested settings differ from the first.

    >>> differing([{"name": "a", "train": {"epochs": 1, "seed": 0}}, {"name": "a", "train": {"epochs": 2, "seed": 0}}])
    ['train.epochs']
    """
    flat = [dict(_flatten(values)) for values in settings]
    keys = dict.fromkeys(key for values in flat for key in values)
    return [key for key in keys if any(values.get(key) != flat[0].get(key) for values in flat)]


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
