"""Scores that a user's function gives: asked for, matched to parameters, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

Scores = Mapping[Tensor, Tensor] | Iterable[Tensor]
ScoreFunction = Callable[[list[Tensor]], Scores] | Callable[[], Scores]


def check_score_function(scores: object) -> None:
    """Refuse what cannot be called."""
    if not callable(scores):
        raise TypeError(
            f"scores must be a function of a list of parameters that returns one tensor for each, but is {scores!r}"
        )


def scores_for(params: Sequence[Tensor], scores: ScoreFunction) -> list[Tensor]:
    """Call `scores` and return one checked tensor for each parameter.

    The function gets the parameters and returns one tensor for each in the same order, or a mapping from
    parameter to tensor, in which case order plays no part. A function without arguments is called so.
    """
    with torch.no_grad():
        given = scores(list(params)) if _takes_argument(scores) else scores()  # type: ignore[call-arg]
    if isinstance(given, Mapping):
        missing = [i for i, p in enumerate(params) if p not in given]
        if missing:
            raise ValueError(f"scores has no entry for parameter {missing[0]} of shape {_shape(params[missing[0]])}")
        tensors = [given[p] for p in params]
    else:
        tensors = list(given)
        if len(tensors) != len(params):
            raise ValueError(
                f"scores must return one tensor for each of the {len(params)} parameters that require a "
                f"gradient, but returned {len(tensors)}"
            )
    for i, (score, p) in enumerate(zip(tensors, params, strict=True)):
        if not isinstance(score, Tensor) or score.shape != p.shape:
            got = _shape(score) if isinstance(score, Tensor) else type(score).__name__
            raise ValueError(f"scores[{i}] must have the shape {_shape(p)} of its parameter, but has {got}")
    _refuse_nan(tensors)
    return tensors


def _refuse_nan(tensors: list[Tensor]) -> None:
    bad = torch.stack([t.isnan().any().to(tensors[0].device) for t in tensors]).tolist()
    if any(bad):
        raise ValueError(f"scores[{bad.index(True)}] holds NaN, so its weights cannot be ranked")


def _takes_argument(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind([])
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def _shape(t: Tensor) -> tuple[int, ...]:
    return tuple(t.shape)
