"""Walking autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples, dicts and data classes that torch knows."""
    if len(values) == 1 and isinstance(values[0], Tensor):
        return [values[0]]
    return [leaf for leaf in leaves_in(*values) if isinstance(leaf, Tensor)]


def leaves_in(*values: Any) -> list[Any]:
    """Return everything in nested lists, tuples, dicts and data classes that torch knows."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, (Tensor, bool, int, float, str)) or value is None:
            found.append(value)
        elif type(value) in (tuple, list):  # torch's own walk takes ten times as long
            found += leaves_in(*value) if value else ()
        elif type(value) is dict:
            found += leaves_in(*value.values()) if value else ()
        else:
            found += tree_leaves(value)
    return found


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a value with other tensors in place of those in it; what holds no tensors stays the object that it is."""
    if isinstance(value, Tensor):
        return function(value)
    if not tensors_in(value):
        return value
    if type(value) in (tuple, list):
        return type(value)(map_tensors(function, item) for item in value)
    if type(value) is dict:
        return {key: map_tensors(function, item) for key, item in value.items()}
    return tree_map_only(Tensor, function, value)


def reachable_nodes(tensors: Iterable[Tensor], stop: Collection[Node] = ()) -> set[Node]:
    """Return every node that a backward pass from the tensors would reach; parameters are nodes with a `variable`.

    Args:
        tensors: Where the backward pass starts.
        stop: Nodes at which it ends; they are not among the result.
    """
    found: set[Node] = set()
    todo = [node_of(t) for t in tensors]
    while todo:
        node = todo.pop()
        if node is not None and node not in found and node not in stop:
            found.add(node)
            todo += [next_node for next_node, _ in node.next_functions]
    return found


def parameters_of(nodes: Iterable[Node]) -> set[Tensor]:
    """Return the parameters whose gradients nodes take."""
    return {leaf for node in nodes if (leaf := leaf_of(node)) is not None}


def node_of(tensor: Tensor) -> Node | None:
    """Return the node that made a tensor; of a parameter the one that takes its gradient; None where there is none."""
    made_by = tensor.grad_fn
    if made_by is not None:
        return made_by
    if not tensor.requires_grad or tensor._is_view():  # a view that was made without gradients
        return None
    return get_gradient_edge(tensor).node


def leaf_of(node: Node) -> Tensor | None:
    """Return the parameter whose gradient a node takes, if it is such a node."""
    return getattr(node, "variable", None)


def is_parameter(node: Node) -> bool:
    """Tell whether a node takes the gradient of a parameter, or of autocast's cast of one."""
    if leaf_of(node) is not None:
        return True
    sources = [source for source, _ in node.next_functions if source is not None]
    return node.name().startswith("ToCopyBackward") and all(leaf_of(source) is not None for source in sources)
