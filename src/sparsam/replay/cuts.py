"""Where a model can be cut, which is found by running it.

Autograd numbers its nodes in the order of their making. The input of a module is a *cut* if every edge of the graph
that leads from a node made after the module was called to one made before it ends at that input and starts inside the
call: then nothing else is carried past the cut but parameters, and a parameter that is used on both sides counts as
lying before it.

What is computed between the call of the module and the arrival of the gradient at its input is the part of a step that
follows the cut: one pass, forward and backward, gives it for all cuts at once. :mod:`sparsam.replay.counting` counts
it, and :mod:`sparsam.step_cost` takes the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparsam.inventory import is_compiled
from sparsam.replay.autograd_graph import leaf_of, node_of, reachable_nodes, tensors_in
from sparsam.replay.calls import Call, intercepted
from sparsam.replay.recording import Kept, in_backward, keep, same_tensors

T = TypeVar("T")


def weight_count(params: Iterable[Tensor]) -> int:
    """Return how many weights some parameters have."""
    return sum(p.numel() for p in params)


class _Visit(NamedTuple):
    """The first call of a module: autograd's counter before and after it, and its input."""

    name: str
    start: int
    end: int
    input: Kept


class Found(NamedTuple):
    """The cuts of a model."""

    after: dict[str, frozenset[Tensor]]
    """By name, the earliest first, the parameters that are used after the cut and nowhere before. Only those that
    require a gradient count. The name "" stands for all that are used."""
    unsure: frozenset[str]
    """Those that an output goes past if the loss uses it: it is made before them, and the model does not go on with it.
    Empty where the pass returns its loss, which tells."""


def parameters_after(model: nn.Module, run: Callable[[], Any]) -> Found:
    """Run one pass, and find the cuts."""
    visits: dict[str, _Visit] = {}
    roots: list[Tensor] = []
    outputs: list[Tensor] = []
    first_use: dict[Tensor, int] = {}

    def visit(name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start, value = _node_count(), keep((args, kwargs))
        if in_backward():  # checkpointing: what lies inside is no cut
            if name in visits and not same_tensors(visits[name].input.value, value.value):
                del visits[name]
            return call(*args, **kwargs)
        output = call(*args, **kwargs)
        if not torch.is_grad_enabled():  # its parameters will not be found in the graph
            first_use.update({p: start - 1 for p in model.get_submodule(name).parameters() if p.requires_grad})
        else:
            visits.setdefault(name, _Visit(name, start, _node_count(), value))
        if not name:
            roots.extend(tensors_in(output))
            outputs.extend(t for t in _entries(output) if isinstance(t, Tensor))
        return output

    # Inside of what is compiled nobody can stand, and torch.compile would try to compile this file.
    inside = {
        part for module in model.modules() if is_compiled(module) for part in module.modules() if part is not module
    }
    visible = {module: partial(visit, name) for name, module in model.named_modules() if module not in inside}
    with intercepted(visible):
        loss = run()
    nodes = reachable_nodes([*roots, *tensors_in(loss)])
    edges = [
        (node._sequence_nr(), target._sequence_nr(), target)
        for node in nodes
        if leaf_of(node) is None
        for target, _ in node.next_functions
        if target is not None
    ]
    for number, _, target in edges:
        leaf = leaf_of(target)
        if leaf is not None:
            first_use[leaf] = min(number, first_use.get(leaf, number))
    inner = [edge for edge in edges if leaf_of(edge[2]) is None]
    sources, targets = (np.array([edge[k] for edge in inner], dtype=np.int64) for k in (0, 1))

    ends = {node_of(t) for t in outputs} - {edge[2] for edge in inner} if loss is None else set()
    earliest = min((end._sequence_nr() for end in ends if end is not None and leaf_of(end) is None), default=math.inf)

    def is_cut(visit: _Visit) -> bool:
        inputs = {node_of(t) for t in tensors_in(visit.input.value)}
        crossing = np.flatnonzero((sources >= visit.start) & (targets < visit.start))
        return visit.input.unchanged and all(sources[i] < visit.end and inner[i][2] in inputs for i in crossing)

    by_place: dict[int, str] = {}
    for v in sorted(visits.values(), key=lambda v: (v.start, -v.end, v.name.count("."))):  # the outermost first
        if v.name and is_cut(v):
            by_place.setdefault(v.start, v.name)
    # Of cuts with the same parameters after them the last counts, of those that are sure.
    by_parameters = {
        frozenset(p for p, use in first_use.items() if use >= start): start
        for start in sorted(by_place, key=lambda start: (start <= earliest, start))
    }
    after = {start: params for params, start in by_parameters.items() if weight_count(params)}
    return Found(
        {"": frozenset(first_use), **{by_place[start]: after[start] for start in sorted(after)}},
        frozenset(by_place[start] for start in after if start > earliest),
    )


def _entries(output: Any) -> Iterable[Any]:
    """Return what a model has returned, one by one. What lies deeper, such as caches and hidden states, is left out."""
    if isinstance(output, Mapping):
        return output.values()
    return output if isinstance(output, (tuple, list)) else (output,)


def _node_count() -> int:
    """Return the number that autograd's next node will have."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def spans_after(
    model: nn.Module, names: list[str], run: Callable[[], Any], now: Callable[[], T]
) -> dict[str, tuple[T, T]]:
    """Run one pass; return what `now` gave at the first call of each module, and at the gradient of its input.

    Where the input needs no gradient, the second is that of the end of the pass. The name "" stands for the whole pass.
    """
    called: dict[str, T] = {}
    arrived: dict[str, T] = {}
    hooks: list[RemovableHandle] = []

    def stamp(name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name not in called:
            called[name] = now()
            for t in tensors_in(args, kwargs):
                if t.requires_grad:
                    hook = t.register_hook(lambda _: arrived.update({name: now()}))  # type: ignore[no-untyped-call]
                    hooks.append(hook)
        return call(*args, **kwargs)

    with intercepted({model.get_submodule(name): partial(stamp, name) for name in names}):
        start = now()
        run()
        end = now()
    for hook in hooks:  # those of parameters and batches would stay
        hook.remove()
    return {"": (start, end), **{name: (called[name], arrived.get(name, end)) for name in names}}
