r"""SAM on a share of the batch: the two passes see only some of its rows, and the rest adds its gradient at w.

With :math:`g_s` the mean gradient of the first n of N rows and :math:`g_r` that of the others, a step is

.. math::  \epsilon = \rho\,\frac{g_s(w)}{\lVert g_s(w)\rVert_2}\odot m, \qquad
           w \leftarrow B\Big(w,\ \frac{n}{N}\,g_s(w + \epsilon) + \Big(1 - \frac{n}{N}\Big)\,g_r(w)\Big)

It costs 1 + n/N passes in place of 2. n is round(share * N), and at least 1. With gradient accumulation the rows are
whole micro-batches: of k of them, n is round(share * k), and at least 1.
"""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, Sequence
from copy import copy
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from sparsam.checks import check_number
from sparsam.distributed.shards import local_parts, mean_over_holders
from sparsam.errors import UserRuntimeError, UserTypeError, UserValueError

T = TypeVar("T")

EXAMPLE = """
    def closure(rows):  # rows(t): the rows of t that this call is for
        opt.zero_grad()
        loss = loss_fn(model(rows(x)), rows(y))
        loss.backward()
        return loss"""


class Rows:
    """Take the rows of a batch that a call of the closure is for.

    Args:
        start: The share of the batch where these rows begin.
        end: The share where they end.

    >>> share, rest = Rows(0, 1 / 4), Rows(1 / 4, 1)
    >>> x = torch.arange(6)
    >>> share(x), rest(x)
    (tensor([0, 1]), tensor([2, 3, 4, 5]))
    """

    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, end
        self.total: int | None = None  # the rows of the batch, once they are known
        self.accumulates = False  # whether they are micro-batches, whose losses are divided by their number already

    def __call__(self, batch: T) -> T:
        """Return these rows of a tensor, or of each tensor in a list, tuple or dict."""
        if self.start == 0 and self.end == 1:
            return batch
        if isinstance(batch, UserDict):  # as tokenizers of transformers return
            part = copy(batch)
            part.update(self(dict(batch)))
            return part
        for t in tree_leaves(batch):
            if isinstance(t, Tensor):
                self._note(t)
        if self.total is None:
            raise UserTypeError(
                f"rows takes a tensor, or a list, tuple or dict of tensors, but was given a {type(batch).__name__}"
            )
        begin, stop = _row(self.start, self.total), _row(self.end, self.total)
        return tree_map(lambda leaf: leaf[begin:stop] if isinstance(leaf, Tensor) else leaf, batch)  # type: ignore[no-any-return]

    def micro_batches(self, batches: Sequence[T]) -> list[T]:
        """Return which micro-batches of a step a call is for; of a single one return these rows.

        As always with gradient accumulation, divide each loss by the number of all of them.
        """
        if not isinstance(batches, Sequence):
            raise UserTypeError(
                f"rows.micro_batches takes a list, but was given a {type(batches).__name__}; make a list of it before "
                f"the step, since each call of the closure needs it"
            )
        if len(batches) == 1:
            return [self(batches[0])]
        indices: list[int] = self(torch.arange(len(batches), device="cpu")).tolist()
        self.accumulates = len(indices) < len(batches)
        return [batches[i] for i in indices]

    @property
    def count(self) -> int:
        """How many rows these are, of a batch that is known."""
        assert self.total is not None  # on_rows() has checked it
        return _row(self.end, self.total) - _row(self.start, self.total)

    def _note(self, t: Tensor) -> None:
        if t.dim() == 0:
            raise UserValueError("rows takes tensors with a row for each sample, but was given one without dimensions")
        if self.total is None:
            self.total = len(t)
        elif self.total != len(t):
            raise UserValueError(
                f"rows takes tensors of one batch, but was given tensors of {self.total} and of {len(t)} rows; with "
                f"gradient accumulation go through `rows.micro_batches(list_of_batches)`, since a share is whole ones"
            )


WHOLE = Rows(0, 1)


def split(share: float) -> tuple[Rows, Rows]:
    """Return the rows of the share and those of the rest."""
    return Rows(0, share), Rows(share, 1)


def fraction(rows: Rows) -> float:
    """Return which part of the batch these rows are; of the share it is n / N."""
    return rows.count / (rows.total or 1)


def weights(share: Rows, params: Sequence[Tensor] = ()) -> tuple[float | Tensor, float | Tensor]:
    """Return by what the gradients and losses of the share and of the rest are multiplied.

    Processes that hold parts of the parameters have gradients that are means over all of them. So they multiply by the
    mean of their fractions, which differ where their batches differ in size.
    """
    if share.accumulates:
        return 1, 1
    by_share = mean_over_holders(fraction(share), params)
    return by_share, 1 - by_share


def on_rows(closure: Callable[[Rows], T], rows: Rows, like: Rows | None = None) -> Callable[[], T]:
    """Return a closure without an argument, which computes these rows.

    Args:
        closure: The user's.
        rows: What it is called with.
        like: Rows of an earlier call of the step, which must have been of the same batch.
    """

    @wraps(closure)
    def call() -> T:
        result = closure(rows)
        if rows.total is None:
            raise UserRuntimeError(
                f"the closure must compute the rows that it is called for, but did not call rows:{EXAMPLE}"
            )
        if like is not None and rows.total != like.total:
            raise UserRuntimeError(
                f"the closure must compute one batch in all calls of a step, but had {like.total} rows first and "
                f"{rows.total} then: take the batch before the step"
            )
        return result

    return call


@torch.no_grad()
def scale(params: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply the gradients."""
    if grads := [p.grad for p in params if p.grad is not None]:
        torch._foreach_mul_(local_parts(grads), factor)


@torch.no_grad()
def mix(
    params: Sequence[Tensor], of_share: Sequence[Tensor | None], by_share: float | Tensor, by_rest: float | Tensor
) -> None:
    """Let each gradient be by_share * (that of the share) + by_rest * (the one in `.grad`); None counts as 0."""
    both = [(p.grad, g) for p, g in zip(params, of_share, strict=True) if p.grad is not None and g is not None]
    only_share = [(p, g) for p, g in zip(params, of_share, strict=True) if p.grad is None and g is not None]
    scale(params, by_rest)
    if both:
        rest, share = (local_parts(list(grads)) for grads in zip(*both, strict=True))
        torch._foreach_mul_(share, by_share)
        torch._foreach_add_(rest, share)
    for p, g in only_share:
        p.grad = g * by_share


def mean_loss(of_share: Any, of_rest: Any, by_share: float | Tensor, by_rest: float | Tensor) -> Any:
    """Return the loss at w of the whole batch; None if a closure returned none."""
    if of_share is None or of_rest is None:
        return None
    losses = [loss.detach() if isinstance(loss, Tensor) else loss for loss in (of_share, of_rest)]
    for loss in losses:
        if not isinstance(loss, Tensor | float | int):
            raise UserTypeError(
                f"with share= the closure must return the loss alone, a tensor, a number or None, but returned a "
                f"{type(loss).__name__}; keep other outputs in a list outside of it"
            )
    return by_share * losses[0] + by_rest * losses[1]


def check_share_of_batch(share: object) -> None:
    """Raise an error unless the share is a number in (0, 1]."""
    check_number("share", share, "a number in (0, 1]", lambda value: 0 < value <= 1)


def check_without_closure(share: float) -> None:
    """Raise an error if a loop without a closure has a share: it would compute the whole batch twice."""
    if share < 1:
        raise UserRuntimeError(
            f"share={share:g} works in step(closure): first_step() and perturbed() take whatever gradients there are. "
            f"Leave share= out and let the loop itself compute the share, as in docs/shares.md, or pass a closure"
        )


def check_takes_rows(closure: Any) -> None:
    """Raise an error if a closure cannot be called with one argument."""
    try:
        inspect.signature(closure).bind(None)
    except TypeError as error:
        raise UserTypeError(
            f"with share= the closure must take one argument, the rows that a call is for, but cannot be called with "
            f"one ({error}):{EXAMPLE}\n(In Lightning, derive from sparsam.integrations.lightning.SAMModule.)"
        ) from error
    except ValueError:
        return  # it does not say what it takes


def _row(share: float, total: int) -> int:
    """Return how many rows a share is."""
    return total if share == 1 else 0 if share == 0 else max(1, round(share * total))
