"""Scores that a user's function gives: asked for, matched to parameters, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsam.distributed.shards import part_of, totals
from sparsam.errors import UserTypeError, UserValueError

Scores = Mapping[Tensor, Tensor] | Iterable[Tensor]
ScoreFunction = Callable[[list[Tensor]], Scores] | Callable[[], Scores]


def check_score_function(scores: object) -> None:
    """Refuse what cannot be called."""
    if not callable(scores):
        raise UserTypeError(
            f"scores must be a function of a list of parameters that returns one tensor for each, such as "
            f"lambda params: [p.abs() for p in params], but is a {type(scores).__name__}"
        )


def ask(scores: ScoreFunction, params: Sequence[Tensor]) -> list[Tensor]:
    """Call the user's function and return one checked tensor for each parameter."""
    function: Callable[..., Scores] = scores
    with torch.no_grad():
        return match(function(list(params)) if _takes_argument(function) else function(), params)


def match(scores: Scores, params: Sequence[Tensor]) -> list[Tensor]:
    """Return one score tensor for each parameter: by identity from a mapping, else in the order given.

    Of a sharded parameter (a DTensor) it is the local part. Its scores may be whole or sharded as it is.
    """
    if isinstance(scores, Mapping):
        for i, p in enumerate(params):
            if p not in scores:
                raise UserValueError(f"scores has no entry for parameter {i} of shape {tuple(p.shape)}")
        tensors = [scores[p] for p in params]
    else:
        tensors = list(scores)
    if len(tensors) != len(params):
        raise UserValueError(
            f"scores must return one tensor for each of the {len(params)} parameters that require a gradient, but "
            f"returned {len(tensors)}"
        )
    for i, (score, p) in enumerate(zip(tensors, params, strict=True)):
        if not isinstance(score, Tensor) or score.shape != p.shape:
            got = tuple(score.shape) if isinstance(score, Tensor) else type(score).__name__
            raise UserValueError(f"scores[{i}] must have the shape {tuple(p.shape)} of its parameter, but has {got}")
    parts = [part_of(score, p) for score, p in zip(tensors, params, strict=True)]
    holds_nan = totals(torch.stack([t.isnan().any().to(parts[0].device) for t in parts]).long(), params).tolist()
    if any(holds_nan):
        first = next(i for i, count in enumerate(holds_nan) if count)
        raise UserValueError(f"scores[{first}] holds NaN, so its weights cannot be ranked")
    return parts


def _takes_argument(function: Callable[..., Any]) -> bool:
    """Tell whether a function wants the parameters: whether it has a positional argument without default."""
    try:
        arguments = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        return True
    wanted = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return any(
        a.kind is inspect.Parameter.VAR_POSITIONAL or (a.kind in wanted and a.default is inspect.Parameter.empty)
        for a in arguments
    )
