"""Which settings make two runs different, and which do not."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from sparsam.runs.recipe import Recipe
from sparsam.settings import differences

# How and where a run is computed, which of the seeds it is, what is kept of it.
INCIDENTAL = frozenset(
    {
        "name",
        "data.root",
        "data.workers",
        "mask.inner.seed",
        "mask.seed",
        "train.channels_last",
        "train.checkpoint_epochs",
        "train.checkpoint_steps",
        "train.compile",
        "train.cuda_graph",
        "train.deterministic",
        "train.precision",
        "train.seed",
        "train.tensorboard",
        "train.threads",
    }
)


def different_settings(*recipes: dict[str, Any], ignored: Collection[str] = INCIDENTAL) -> dict[str, tuple[Any, ...]]:
    """Return the settings in which recipes ask for different experiments, with the value of each."""
    found = differences(*map(_completed, recipes))
    return {key: values for key, values in found.items() if key not in ignored}


def _completed(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe of an older version with the defaults of the settings that it lacks."""
    defaults = _defaults()
    tables = {key: {**table, **recipe.get(key, {})} for key, table in defaults.items() if isinstance(table, dict)}
    return {**defaults, **recipe, **tables}


@cache
def _defaults() -> dict[str, Any]:
    return Recipe().to_dict()
