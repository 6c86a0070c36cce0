"""A recipe: everything that defines a training run, in one small TOML file.

The dataclasses below are the schema. Each field has a type, a default and what is allowed; a file that has an unknown
key, a wrong type or an impossible value is refused with the key and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsam.errors import UserValueError

MASKS = ("dense", "random", "fisher", "dynamic", "norm", "budget")
BUDGET_KEYS = ("budget", "cut", "full", "full_rho", "late", "late_share", "momentum_rho", "norm", "within")
WITHIN = ("", "random", "fisher", "dynamic", "norm")
OPTIMIZERS = ("sgd", "adam", "adamw")
DATA = ("digits", "cifar10", "cifar100", "imagefolder")
PRECISIONS = ("fp32", "bf16", "fp16")


class RecipeError(UserValueError):
    """A recipe that cannot be used; the message names the key and what is allowed."""


def _setting(default: Any, allowed: str = "", holds: Callable[[Any], bool] = lambda value: True) -> Any:
    """Declare a field with what is allowed, in words and as a test."""
    return field(default=default, metadata={"allowed": allowed, "holds": holds})


def _one_of(default: str, choices: tuple[str, ...]) -> Any:
    return _setting(default, f"one of {', '.join(c or 'nothing' for c in choices)}", lambda value: value in choices)


def _share(default: float) -> Any:
    return _setting(default, "a number in [0, 1]", lambda value: 0 <= value <= 1)


def _positive(default: float) -> Any:
    return _setting(default, "a number > 0", lambda value: 0 < value < math.inf)


def _not_negative(default: float) -> Any:
    return _setting(default, "a number >= 0", lambda value: 0 <= value < math.inf)


def _whole(default: int, least: int = 1) -> Any:
    return _setting(default, f"a whole number >= {least}", lambda value: value >= least)


@dataclass(frozen=True)
class Model:
    """The network."""

    name: str = "resnet-small"
    stem: str = _one_of("cifar", ("cifar", "imagenet"))


@dataclass(frozen=True)
class Data:
    """The images and what happens to them."""

    name: str = _one_of("digits", DATA)
    root: str = "data"
    batch_size: int = _whole(128)
    validation: int = _whole(0, 0)
    validation_seed: int = _whole(0, 0)
    crop_padding: int = _whole(0, 0)
    flip: bool = False
    cutout: int = _whole(0, 0)
    cutout_probability: float = _share(1.0)
    image_size: int = _whole(224)
    resize: int = _whole(256)
    workers: int = _whole(4, 0)
    skip_corrupt: bool = False


@dataclass(frozen=True)
class Optimizer:
    """The base optimizer and its learning rate, which follows a cosine to 0."""

    name: str = _one_of("sgd", OPTIMIZERS)
    lr: float = _positive(0.05)
    momentum: float = _share(0.9)
    weight_decay: float = _not_negative(1e-3)


@dataclass(frozen=True)
class Sam:
    """Sharpness-aware minimization; without it the base optimizer trains alone."""

    enabled: bool = True
    rho: float = _not_negative(0.1)
    adaptive: bool = False


@dataclass(frozen=True)
class Mask:
    """Which weights are perturbed."""

    kind: str = _one_of("dense", MASKS)
    sparsity: float = _share(0.5)
    interval_epochs: int = _whole(1, 0)
    samples: int = _whole(128)
    drop: float = _share(0.5)
    criterion: str = _one_of("flattest", ("flattest", "sharpest", "random"))
    seed: int = _whole(0, 0)
    budget: float = _setting(1.25, "a number > 1", lambda value: 1 < value < math.inf)
    cut: str = ""
    full: float = _share(0.0)
    full_rho: float = _not_negative(0.0)
    late: bool = False
    late_share: float = _share(0.0)
    momentum_rho: float = _not_negative(0.0)
    norm: str = _one_of("perturbed", ("perturbed", "whole"))
    within: str = _one_of("", WITHIN)


@dataclass(frozen=True)
class Train:
    """How long, on what and how exactly."""

    epochs: int = _whole(200)
    seed: int = _whole(0, 0)
    precision: str = _one_of("fp32", PRECISIONS)
    channels_last: bool = True
    label_smoothing: float = _share(0.0)
    cuda_graph: bool = True
    compile: bool = False
    deterministic: bool = False
    tensorboard: bool = False
    checkpoint_epochs: int = _whole(1, 0)
    checkpoint_steps: int = _whole(0, 0)


@dataclass(frozen=True)
class Recipe:
    """One training run."""

    name: str = "run"
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    sam: Sam = field(default_factory=Sam)
    mask: Mask = field(default_factory=Mask)
    train: Train = field(default_factory=Train)

    @property
    def method(self) -> str:
        """What people call it: SGD, SAM, SSAM-F, ..."""
        if not self.sam.enabled:
            return {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[self.optimizer.name]
        name = {
            "dense": "SAM",
            "fisher": "SSAM-F",
            "dynamic": "SSAM-D",
            "random": "SSAM, random",
            "norm": "SAM-ON",
            "budget": "SSAM-C",
        }
        return ("A" if self.sam.adaptive else "") + name[self.mask.kind]

    @property
    def evaluated_on(self) -> str:
        """Which images the accuracy is measured on."""
        return "validation" if self.data.validation else "test"

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain values, every default written out."""
        return dataclasses.asdict(self)


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a TOML file, apply `key=value` overrides and check the result."""
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"there is no recipe at {path}{_similar_files(path)}")
    values = _read(path)
    values.setdefault("name", path.stem)
    for override in overrides or []:
        _override(values, override)
    return recipe_from(values)


def recipe_from(values: dict[str, Any]) -> Recipe:
    """Build a recipe from nested plain values, refusing what the schema does not allow."""
    recipe: Recipe = _build(Recipe, values, "")
    _check_together(recipe)
    return recipe


def _read(path: Path, readers: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file and, under it, the one it extends; `readers` are those that extend this one."""
    if path.resolve() in readers:
        raise RecipeError(f"{path} extends itself")
    try:
        values = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from error
    parent = values.pop("extends", None)
    if parent is None:
        return values
    if not isinstance(parent, str) or not (path.parent / parent).is_file():
        raise RecipeError(f"extends in {path} must name a recipe beside it, but is {parent!r}")
    under = _read(path.parent / parent, (*readers, path.resolve()))
    under.pop("name", None)
    for key, value in values.items():
        table = under.get(key)
        under[key] = {**table, **value} if isinstance(table, dict) and isinstance(value, dict) else value
    return under


def _build(schema: Any, values: dict[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(schema)
    fields = {f.name: f for f in dataclasses.fields(schema)}
    given = {}
    for key, value in values.items():
        if key not in fields:
            close = difflib.get_close_matches(key, fields, 1)
            hint = (
                f"did you mean {prefix}{close[0]}?" if close else f"known keys: {', '.join(prefix + k for k in fields)}"
            )
            raise RecipeError(f"unknown key {prefix}{key}; {hint}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise RecipeError(f"{prefix}{key} must be a table of settings, but is {value!r}")
            given[key] = _build(hints[key], value, f"{prefix}{key}.")
        else:
            given[key] = _checked(f"{prefix}{key}", value, hints[key], fields[key].metadata)
    return schema(**given)


def _checked(key: str, value: Any, kind: type, metadata: types.MappingProxyType[Any, Any]) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]
    allowed = metadata.get("allowed") or words
    if type(value) is not kind or not metadata.get("holds", lambda value: True)(value):
        raise RecipeError(f"{key} must be {allowed}, but is {value!r}")
    return value


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"an override must have the form key=value, such as train.epochs=10, but is {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # an unquoted text
    *tables, last = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise RecipeError(f"unknown key {key}")
    values[last] = value


def _check_together(recipe: Recipe) -> None:
    if not recipe.sam.enabled and recipe.mask != Mask():
        raise RecipeError("mask has no meaning where sam.enabled is false; leave the table out")
    mask = recipe.mask
    for key in BUDGET_KEYS:
        if mask.kind != "budget" and getattr(mask, key) != getattr(Mask(), key):
            raise RecipeError(f"mask.{key} has a meaning for mask.kind = budget only, but that is {mask.kind}")
    if recipe.sam.enabled and mask.kind == "budget":
        if recipe.train.precision == "fp16":
            raise RecipeError("train.precision must be fp32 or bf16 for mask.kind = budget: fp16 steps have no closure")
        for key in ("late_share", "momentum_rho"):
            if getattr(mask, key) and not mask.late:
                raise RecipeError(f"mask.{key} has a meaning for mask.late = true only, but that is false")
        if mask.late and mask.full:
            raise RecipeError(f"mask.full must be 0 for mask.late = true, but is {mask.full:g}")
        if not mask.cut and 1 + mask.full > mask.budget:
            raise RecipeError(f"mask.budget must be above 1 + mask.full, {1 + mask.full:g}, but is {mask.budget:g}")
        if mask.full_rho and not mask.full:
            raise RecipeError(
                "mask.full_rho is the radius of full steps, but mask.full is 0: leave it out, or set it to 0"
            )
        if mask.momentum_rho and recipe.optimizer.name == "sgd" and not recipe.optimizer.momentum:
            raise RecipeError("optimizer.momentum must be above 0 for mask.momentum_rho, but is 0")
    unused = [key for key in ("crop_padding", "flip", "cutout") if getattr(recipe.data, key)]
    if recipe.data.name == "imagefolder" and unused:
        raise RecipeError(
            f"data.{unused[0]} has no meaning for imagefolder, which always crops, resizes and flips; leave it out"
        )
    if recipe.data.name == "imagefolder" and recipe.data.resize < recipe.data.image_size:
        raise RecipeError(
            f"data.resize must be at least data.image_size, {recipe.data.image_size}, but is {recipe.data.resize}"
        )


def _similar_files(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    names = [p.name for p in path.parent.glob("*.toml")]
    close = difflib.get_close_matches(path.name, names, 3, 0.3)
    return f"; did you mean {' or '.join(str(path.parent / name) for name in close)}?" if close else ""
