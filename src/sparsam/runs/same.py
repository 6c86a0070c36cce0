"""Which settings make two runs different, and which do not."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from sparsam.runs.recipe import Recipe
from sparsam.settings import differences, flatten_settings

SEEDS = frozenset({"train.seed", "mask.seed", "mask.inner.seed"})
# Where a run is computed, and what is kept and measured of it.
PLACE = frozenset(
    {
        "data.root",
        "data.workers",
        "train.checkpoint_epochs",
        "train.checkpoint_steps",
        "train.refresh_batchnorm",
        "train.tensorboard",
        "train.threads",
    }
)
# In what way a run is computed: this changes times and memory, and the result by rounding alone.
COMPUTATION = frozenset(
    {
        "train.channels_last",
        "train.compile",
        "train.cuda_graph",
        "train.deterministic",
        "train.precision",
    }
)
INCIDENTAL = frozenset({"name", *SEEDS, *PLACE, *COMPUTATION})


def different_settings(*recipes: dict[str, Any], ignored: Collection[str] = INCIDENTAL) -> dict[str, tuple[Any, ...]]:
    """Return the settings in which recipes ask for different experiments, with the value of each."""
    found = differences(*map(_completed, recipes))
    return {key: values for key, values in found.items() if key not in ignored}


def settings_of(recipe: dict[str, Any], ignored: Collection[str] = INCIDENTAL) -> frozenset[tuple[str, Any]]:
    """Return what recipes have in common if and only if :func:`different_settings` finds nothing."""
    flat = dict(flatten_settings(_completed(recipe)))
    return frozenset(
        (key, str(value) if isinstance(value, list) else value)  # a list has no hash
        for key, value in flat.items()
        if key not in ignored and value is not None
    )


def _completed(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe of an older version with the defaults of the settings that it lacks."""
    defaults = _defaults()
    tables = {key: {**table, **recipe.get(key, {})} for key, table in defaults.items() if isinstance(table, dict)}
    return {**defaults, **recipe, **tables}


@cache
def _defaults() -> dict[str, Any]:
    return Recipe().to_dict()
