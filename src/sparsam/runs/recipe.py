"""A recipe: everything that defines a training run, in one small TOML file.

A recipe may extend another one: it then has all of that one's settings but those it gives itself. A table with another
name keeps only what has a meaning for that name.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sparsam.runs.config import (
    BASE_METHODS,
    DENSE_METHODS,
    SPARSE_METHODS,
    AscentConfig,
    DataConfig,
    MaskConfig,
    ModelConfig,
    OptimizerConfig,
    SamConfig,
    ScheduleConfig,
    TrainConfig,
)
from sparsam.runs.library import find_recipe
from sparsam.runs.schema import RecipeError, all_keys, as_table, build, has_meaning, merge, parse_overrides

THRIFTY = ("suffix", "friendly", "last-steps")

__all__ = ["Recipe", "RecipeError", "load_recipe", "recipe_from", "relevant_overrides"]


@dataclass(frozen=True)
class Recipe:
    """One training run."""

    name: str = "run"
    model: ModelConfig = field(default_factory=partial(build, ModelConfig, {}))
    data: DataConfig = field(default_factory=partial(build, DataConfig, {}))
    optimizer: OptimizerConfig = field(default_factory=partial(build, OptimizerConfig, {}))
    sam: SamConfig = field(default_factory=partial(build, SamConfig, {}))
    mask: MaskConfig = field(default_factory=partial(build, MaskConfig, {}))
    ascent: AscentConfig = field(default_factory=partial(build, AscentConfig, {}))
    schedule: ScheduleConfig = field(default_factory=partial(build, ScheduleConfig, {}))
    train: TrainConfig = field(default_factory=partial(build, TrainConfig, {}))

    @property
    def method(self) -> str:
        """What people call it: SGD, SAM, SSAM-F, ..."""
        if not self.sam.enabled:
            return BASE_METHODS[self.optimizer.name]
        if self.mask.name == "dense":
            name = DENSE_METHODS.get(self.ascent.name, f"SAM, {self.ascent.name}")
        else:
            name = SPARSE_METHODS.get(self.mask.name, f"SSAM, {self.mask.name}")
        policies = self.mask.name, self.ascent.name, self.schedule.name
        if policies == THRIFTY and not self.mask.inner and not self.schedule.before:
            name = "Thrifty SAM"
        share = "" if self.sam.share == 1 else " on a share"
        return ("A" if self.sam.adaptive else "") + name + share

    @property
    def evaluated_on(self) -> str:
        """Which images the accuracy is measured on."""
        return images_to_evaluate(self.data.validation)

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain values, every default written out."""
        return dataclasses.asdict(self)


def images_to_evaluate(validation: int | None) -> str:
    """Return which images the accuracy is measured on, given `data.validation`."""
    return "test" if validation is None else "validation"


OF_SAM = ("mask", "ascent", "schedule")  # tables that have no meaning without SAM


def load_recipe(source: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe, apply `key=value` overrides and check the result.

    Args:
        source: The name of a recipe of the package, or a path that ends in .toml.
        overrides: Such as `train.epochs=10`. The value none takes an optional setting away.

    Raises:
        RecipeError: Something is not allowed, or an override has no meaning for the recipe.
    """
    overrides = list(overrides)
    values = merge(Recipe, _read(source), parse_overrides(overrides))
    if not _has_sam(values):
        _check_need_no_sam(overrides)
    return recipe_from(values)


def recipe_from(values: dict[str, Any]) -> Recipe:
    """Build a recipe from nested plain values, and refuse what is not allowed."""
    recipe: Recipe = build(Recipe, values)
    _check_together(recipe)
    return recipe


def relevant_overrides(source: str | Path, overrides: Iterable[str], first: Iterable[str] = ()) -> list[str]:
    """Return the overrides that have a meaning for a recipe: SGD has no rho, SAM no sparsity, and only SSAM-C a cut.

    Args:
        source: As in :func:`load_recipe`.
        overrides: As there.
        first: Overrides that the recipe has had before.
    """
    overrides = list(overrides)
    values = merge(Recipe, _read(source), parse_overrides([*first, *overrides]))
    sam = _has_sam(values)

    def is_relevant(override: str) -> bool:
        key = override.partition("=")[0].split(".")
        return (sam or not _needs_sam(override)) and has_meaning(Recipe, values, key)

    return [override for override in overrides if is_relevant(override)]


def _has_sam(values: dict[str, Any]) -> bool:
    return as_table(values.get("sam", {}), "sam.").get("enabled") is not False


def _needs_sam(override: str) -> bool:
    """Return whether an override has no meaning without SAM. Of the table `sam`, only `enabled` has one."""
    layer = parse_overrides([override])
    return not layer.keys().isdisjoint(OF_SAM) or bool(as_table(layer.get("sam", {}), "sam.").keys() - {"enabled"})


def _check_need_no_sam(overrides: Iterable[str]) -> None:
    """Refuse overrides that would have no effect. Unknown keys are refused elsewhere, where similar ones are named."""
    known = set(all_keys(Recipe, repeats=1))
    for key in (override.partition("=")[0] for override in overrides if _needs_sam(override)):
        if key in known:
            raise RecipeError(
                f"{key} has no meaning where sam.enabled is false; set sam.enabled=true too, or choose a recipe that "
                f"has SAM"
            )


def _read(source: str | Path, beside: Path | None = None, readers: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file and, under it, the one it extends; `readers` are those that extend this one."""
    path = find_recipe(source, beside)
    if path.resolve() in readers:
        raise RecipeError(f"{path} extends itself")
    try:
        values = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from error
    parent = values.pop("extends", None)
    values.setdefault("name", path.stem)
    if parent is None:
        return values
    if not isinstance(parent, str):
        raise RecipeError(f"extends in {path} must be the name or the path of a recipe, but is {parent!r}")
    try:
        under = _read(parent, path.parent, (*readers, path.resolve()))
    except RecipeError as error:
        raise RecipeError(f"extends in {path}: {error}") from error
    return merge(Recipe, under, values)


def _check_together(recipe: Recipe) -> None:
    """Refuse settings that are allowed alone but not together."""
    if not recipe.sam.enabled:
        for table in OF_SAM:
            if getattr(recipe, table) != getattr(Recipe(), table):
                raise RecipeError(f"{table} has no meaning where sam.enabled is false; leave the table out")
    data = recipe.data
    if data.image_size and data.resize and data.resize < data.image_size:
        raise RecipeError(f"data.resize must be at least data.image_size, {data.image_size}, but is {data.resize}")
    if recipe.mask.cut is not None and recipe.train.precision == "fp16":
        raise RecipeError("train.precision must be fp32 or bf16 for mask.name = suffix: fp16 steps have no closure")
    ascents = {"ascent": recipe.ascent, "schedule.before": recipe.schedule.before}
    for key, ascent in ascents.items():
        if ascent and ascent.name == "momentum" and recipe.optimizer.momentum == 0:
            raise RecipeError(f"optimizer.momentum must be above 0 for {key}.name = momentum, but is 0")
    ramp = recipe.sam.ramp_epochs
    if ramp and recipe.schedule.before:
        raise RecipeError(
            f"sam.ramp_epochs must be 0 with schedule.before, whose steps would have rho = 0, but is {ramp:g}"
        )
    if ramp and recipe.ascent.rho is not None:
        raise RecipeError(
            f"sam.ramp_epochs must be 0 with ascent.rho, because the ramp is that of sam.rho, but is {ramp:g}"
        )
