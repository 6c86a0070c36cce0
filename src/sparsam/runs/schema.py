"""Dataclasses as the schema of nested settings: types, what is allowed, and what has a meaning for which name.

A table is a dataclass. Each field declares, with :func:`setting`, what is allowed. A field may have a meaning for some
values of the table's `name` only: `mask.samples` has one for `mask.name = "fisher"`. Values come from TOML, JSON or the
command line; errors name the key, what was given and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from typing import Any

from sparsam.errors import UserValueError

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
REQUIRED = object()  # the default of a setting that must be given
SIMILAR = 0.6  # from here on a misspelled name is taken for another, as in difflib
NONE = "none"  # TOML has no null: this text stands for it, where a setting may be None


class RecipeError(UserValueError):
    """A recipe that cannot be used. The message names the key and what is allowed."""


# ------------------------------------------------------------------------------------------------- declaring fields


def setting(
    default: Any,
    allowed: str = "",
    holds: Callable[[Any], bool] = lambda value: True,
    names: Sequence[str] | None = None,
) -> Any:
    """Declare a field.

    Args:
        default: Its value where it is not given; :data:`REQUIRED`: it must be given.
        allowed: What is allowed, in words.
        holds: The same as a test.
        names: For which names of its table it has a meaning; it is None for the others. None: for all.
    """
    metadata = {"default": default, "allowed": allowed, "holds": holds, "names": names}
    return field(default=None if names or default is REQUIRED else default, metadata=metadata)


def one_of(default: str, choices: Sequence[str], names: Sequence[str] | None = None) -> Any:
    """Declare a field with a fixed list of values."""
    return setting(default, f"one of {', '.join(choices)}", lambda value: value in choices, names)


def share(default: Any, names: Sequence[str] | None = None, *, zero: bool = True) -> Any:
    """Declare a number in [0, 1], or in (0, 1] where it cannot be zero."""
    if zero:
        return setting(default, "a number in [0, 1]", lambda value: 0 <= value <= 1, names)
    return setting(default, "a number in (0, 1]", lambda value: 0 < value <= 1, names)


def positive(default: Any) -> Any:
    """Declare a finite number above 0."""
    return setting(default, "a number > 0", lambda value: 0 < value < math.inf)


def not_negative(default: Any, names: Sequence[str] | None = None) -> Any:
    """Declare a finite number that is not negative."""
    return setting(default, "a number >= 0", lambda value: 0 <= value < math.inf, names)


def whole(default: Any, least: int = 1, names: Sequence[str] | None = None) -> Any:
    """Declare a whole number of at least `least`."""
    return setting(default, f"a whole number >= {least}", lambda value: value >= least, names)


# -------------------------------------------------------------------------------------------------- building tables


def build(schema: Any, values: Any, prefix: str = "", root: Any = None) -> Any:
    """Build a table from plain values, and refuse what the schema does not allow.

    Args:
        schema: The dataclass.
        values: A dictionary, or a text, which is the table's name.
        prefix: The key of the table with a dot after it.
        root: The dataclass of all tables, where a key that is unknown here is looked for; None: this one.
    """
    values, root = as_table(values, prefix), root or schema
    fields = {f.name: f for f in dataclasses.fields(schema)}
    for key, value in values.items():
        if key not in fields:
            path = prefix + key + _first_key(value)
            raise RecipeError(f"unknown key {path}; {_did_you_mean(path, [prefix + name for name in fields], root)}")
    complete: dict[str, Any] = {}
    for f in dataclasses.fields(schema):  # the name, which decides about the others, comes first
        value, key = values.get(f.name), f"{prefix}{f.name}"
        names = f.metadata.get("names")
        if names is not None and complete["name"] not in names:
            if value is not None:
                raise RecipeError(
                    f"{key} has no meaning for {prefix}name = {complete['name']}, only for {', '.join(names)}; "
                    f"leave it out"
                )
            complete[f.name] = None
        elif f.name not in values:
            complete[f.name] = _default(f, key, prefix, complete)
        else:
            complete[f.name] = _checked(schema, f, value, key, root)
    return schema(**complete)


def as_table(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return a table as a dictionary; a text in its place is its name."""
    if isinstance(values, str):
        return {"name": values}
    if not isinstance(values, dict):
        raise RecipeError(f"{prefix.removesuffix('.')} must be a table of settings, but is {values!r}")
    return values


def _default(f: dataclasses.Field[Any], key: str, prefix: str, complete: dict[str, Any]) -> Any:
    default = f.metadata.get("default", f.default)
    if default is REQUIRED:
        raise RecipeError(f"{key} must be given for {prefix}name = {complete['name']}: {f.metadata['allowed']}")
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else default


def _checked(schema: Any, f: dataclasses.Field[Any], value: Any, key: str, root: Any) -> Any:
    expected, _ = _type(schema, f.name)
    optional = _may_be_none(schema, f)
    if optional and (value is None or value == NONE):
        return None
    if dataclasses.is_dataclass(expected):
        return build(expected, value, f"{key}.", root)
    if isinstance(value, dict) and value:
        raise RecipeError(f"unknown key {key}.{next(iter(value))}")
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not expected or not f.metadata.get("holds", lambda value: True)(value):
        allowed = f.metadata.get("allowed") or WORDS[expected]
        raise RecipeError(f"{key} must be {allowed}{' or none' if optional else ''}, but is {value!r}")
    return value


def _may_be_none(schema: Any, f: dataclasses.Field[Any]) -> bool:
    """Return whether None is allowed even where the setting has a meaning."""
    _, optional = _type(schema, f.name)
    names, default = f.metadata.get("names"), f.metadata.get("default")
    return optional and (names is None or default is None)


@functools.cache
def _hints(schema: Any) -> dict[str, Any]:
    return typing.get_type_hints(schema)


def _type(schema: Any, name: str) -> tuple[Any, bool]:
    """Return the type of a field without None, and whether it may be None."""
    hint = _hints(schema)[name]
    if isinstance(hint, types.UnionType):
        (expected,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
        return expected, True
    return hint, False


def _first_key(value: Any) -> str:
    """Return the first key of a table, with a dot before it, and of what it holds; nothing for other values."""
    if not isinstance(value, dict) or not value:
        return ""
    key, inner = next(iter(value.items()))
    return f".{key}{_first_key(inner)}"


def _did_you_mean(key: str, known: Iterable[str], root: Any) -> str:
    """Suggest the keys that are most like a whole key; if there is none, like the rest of it without its first table.

    Args:
        key: The unknown key, from the root on.
        known: The keys of its table, which are listed if no other key is similar.
        root: The dataclass of all tables.
    """
    parts = key.split(".")
    for start in range(len(parts)):
        tail = parts[start:]
        close = _closest(tail, all_keys(root, repeats=int(len(tail) > 1)))
        if close:
            return f"did you mean {' or '.join(close)}?"
    return f"known keys: {', '.join(known)}"


def _closest(parts: Sequence[str], keys: Iterable[str]) -> list[str]:
    """Return the keys that end most like some parts; each part must be similar."""
    likeness = {}
    for key in keys:
        end = key.split(".")[-len(parts) :]
        ratios = [difflib.SequenceMatcher(None, own, given).ratio() for own, given in zip(end, parts, strict=False)]
        if len(end) == len(parts) and min(ratios) >= SIMILAR:
            likeness[key] = sum(ratios)
    best = max(likeness.values(), default=0.0)
    return [key for key, found in likeness.items() if found == best]


def all_keys(schema: Any, prefix: str = "", repeats: int = 0, outer: tuple[Any, ...] = ()) -> Iterator[str]:
    """Yield the keys of a table and of those in it, `repeats` times also of a table inside one like itself."""
    for f in dataclasses.fields(schema):
        key, (expected, _) = prefix + f.name, _type(schema, f.name)
        yield key
        if dataclasses.is_dataclass(expected) and outer.count(expected) <= repeats:
            yield from all_keys(expected, f"{key}.", repeats, (*outer, expected))


# ------------------------------------------------------------------------------------------------- layers of values


def merge(schema: Any, under: Any, over: Any, prefix: str = "") -> dict[str, Any]:
    """Lay values over others. Where a table gets another name, what has no meaning for that name falls away."""
    under, over = as_table(under, prefix), as_table(over, prefix)
    fields = {f.name: f for f in dataclasses.fields(schema)}
    result = dict(under)
    if "name" in over and over["name"] != under.get("name"):
        result = {key: value for key, value in under.items() if _has_meaning(fields.get(key), over["name"])}
    for key, value in over.items():
        expected = _type(schema, key)[0] if key in fields else None
        nested = dataclasses.is_dataclass(expected) and key in result and value not in (None, NONE)
        result[key] = merge(expected, result[key], value, f"{prefix}{key}.") if nested else value
    return result


def has_meaning(schema: Any, values: Any, key: Sequence[str]) -> bool:
    """Return whether a setting has a meaning for the names in some values.

    A key that is in no table has one here, since :func:`build` refuses it.

    Args:
        schema: The dataclass of the values.
        values: A table of plain values.
        key: The parts of the setting's key.
    """
    table, (first, *rest) = as_table(values), key
    fields = {f.name: f for f in dataclasses.fields(schema)}
    if first not in fields:
        return True
    if not _has_meaning(fields[first], table.get("name", fields["name"].default if "name" in fields else None)):
        return False
    expected = _type(schema, first)[0]
    return not rest or not dataclasses.is_dataclass(expected) or has_meaning(expected, table.get(first) or {}, rest)


def _has_meaning(f: dataclasses.Field[Any] | None, name: Any) -> bool:
    names = None if f is None else f.metadata.get("names")
    return names is None or name in names


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Return `key=value` texts as nested values."""
    layer: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise RecipeError(f"an override must have the form key=value, such as train.epochs=10, but is {override!r}")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text  # a text without quotes
        *tables, last = key.split(".")
        place = layer
        for table in tables:
            inner = place.setdefault(table, {})
            if not isinstance(inner, (dict, str)):
                raise RecipeError(f"unknown key {key}")
            place[table] = place = as_table(inner)
        place[last] = value
    return layer


def written(value: Any) -> str:
    """Return a value as an override has it.

    >>> [written(value) for value in (2.0, None, True, "layer2")]
    ['2', 'none', 'true', 'layer2']
    """
    if value is None or isinstance(value, bool):
        return NONE if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
