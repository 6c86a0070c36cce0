"""Settings: what policies (masks, ascents, schedules) are made of, and which ones differ."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Setting = int | float | str | None | dict[str, "Setting"]


class Policy:
    """An object that holds settings and no state: a mask, an ascent or a schedule."""

    def settings(self) -> dict[str, Setting]:
        """Return what a resumed run must have in common with the saved one; a subclass adds its own."""
        return {"type": type(self).__name__}

    def __repr__(self) -> str:
        return _described(self.settings())


def _described(settings: dict[str, Setting]) -> str:
    rest = {key: value for key, value in settings.items() if key != "type"}
    values = (f"{key}={_described(value) if isinstance(value, dict) else repr(value)}" for key, value in rest.items())
    return f"{settings['type']}({', '.join(values)})"


def differences(*settings: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the keys in which nested settings differ, with the value of each (None where it has none).

    >>> differences({"name": "a", "train": {"epochs": 1, "seed": 0}}, {"name": "a", "train": {"epochs": 2, "seed": 0}})
    {'train.epochs': (1, 2)}
    """
    flat = [dict(flatten_settings(values)) for values in settings]
    keys = dict.fromkeys(key for values in flat for key in values)
    values_of = {key: tuple(values.get(key) for values in flat) for key in keys}
    return {key: values for key, values in values_of.items() if any(value != values[0] for value in values)}


def flatten_settings(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield nested settings with their keys joined by dots."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten_settings(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
