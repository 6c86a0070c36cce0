"""JSON files of runs. An error names the file and the key."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sparsam.runs.files import RunError, read_text


@dataclass(frozen=True)
class Record:
    """A JSON object. Its errors name the file it was read from."""

    source: str
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a file."""
        return cls.parse(read_text(path), str(path))

    @classmethod
    def parse(cls, text: str, source: str) -> Record:
        """Parse a text. Errors call it `source`."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RunError(f"{source} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise RunError(f"{source} must hold a JSON object, but holds {shown(values)}")
        return cls(source, values)

    def get(self, key: str) -> Any:
        """Return the value of a dotted key."""
        value: Any = self.values
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                raise RunError(f"{self.source} has no {key!r}")
            value = value[part]
        return value

    def wrong(self, key: str, allowed: str) -> RunError:
        """Return the error for a value that is not allowed."""
        return RunError(f"{self.source}: {key} must be {allowed}, but is {shown(self.get(key))}")

    def text(self, key: str) -> str:
        """Return a text that is not empty."""
        value = self.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text")
        return value

    def flag(self, key: str) -> bool:
        """Return true or false."""
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def number(self, key: str, *, finite: bool = True) -> float:
        """Return a number."""
        value = self.get(key)
        if not is_number(value) or (finite and not math.isfinite(value)):
            raise self.wrong(key, "a number")
        return float(value)

    def optional(self, key: str) -> float | None:
        """Return a number, None where it is missing or null."""
        return None if self.values.get(key) is None else self.number(key)

    def numbers(self, key: str) -> list[float]:
        """Return numbers, at least one."""
        values = self.get(key)
        if not isinstance(values, list) or not values or not all(is_number(v) and math.isfinite(v) for v in values):
            raise self.wrong(key, "a list of numbers")
        return [float(value) for value in values]

    def whole(self, key: str) -> int:
        """Return a whole number."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(key, "a whole number")
        return value

    def time(self, key: str) -> datetime:
        """Return an ISO time."""
        text = self.text(key)
        try:
            return datetime.fromisoformat(text)
        except ValueError as error:
            raise self.wrong(key, "an ISO time") from error


def is_number(value: Any) -> bool:
    """Tell whether a value is a JSON number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """Return a value as text for an error message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
