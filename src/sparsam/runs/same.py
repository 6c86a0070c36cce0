"""Which settings make two runs different, and which do not."""

from __future__ import annotations

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


def different_settings(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the settings in which two recipes ask for different experiments, with both values."""
    found = differences(completed(one), completed(other))
    return {key: values for key, values in found.items() if key not in INCIDENTAL}


def completed(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe of an older version with the defaults of the settings that it lacks."""
    defaults = Recipe().to_dict()
    tables = {key: {**table, **recipe.get(key, {})} for key, table in defaults.items() if isinstance(table, dict)}
    return {**defaults, **recipe, **tables}
