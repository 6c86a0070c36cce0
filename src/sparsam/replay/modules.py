"""Finding modules of a model, by name and by where they lie around a cut."""

from __future__ import annotations

import difflib
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsam.errors import UserValueError


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside a DistributedDataParallel, or a compiled one's original."""
    for inside in ("module", "_orig_mod"):
        if inside in model._modules and (inside == "_orig_mod" or isinstance(model, DistributedDataParallel)):
            return unwrap(model.get_submodule(inside))
    return model


def get_module(model: nn.Module, name: str) -> nn.Module:
    """Return a module by its dotted name; an unknown name gives an error with the closest ones."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if not isinstance(name, str) or name not in modules or not name:
        given = repr(name) if isinstance(name, (str, int)) else f"a {type(name).__name__}"
        names = [n for n in modules if n]
        close = difflib.get_close_matches(str(name), names, 3) or names[:8]
        raise UserValueError(
            f"cut must be the name of a module, such as {', '.join(map(repr, close))}, but is {given}; "
            f"find_cuts(model, closure) and `sparsam cuts` list what can be cut"
        )
    return modules[name]


def parameters_before_by_order(model: nn.Module, cut: str) -> frozenset[Tensor]:
    """Return the parameters that are registered before a module: a guess that needs no forward pass."""
    target = get_module(model, cut)
    before: set[Tensor] = set()
    for module in model.modules():
        if module is target:
            break
        before.update(module.parameters(recurse=False))
    return frozenset(before)


class Places(NamedTuple):
    """Where a cut lies in a model: modules, with their names."""

    around: list[tuple[str, nn.Module]]
    before: list[tuple[str, nn.Module]]  # the outermost ones that code around the cut can call, also after it
    cut: nn.Module


def places_of(model: nn.Module, cut: str) -> Places:
    """Find where a cut lies."""
    places = Places([], [], get_module(model, cut))
    todo = [("", model)]
    while todo:
        name, module = todo.pop()
        places.around.append((name, module))
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            if child is places.cut:
                continue
            if f"{cut}.".startswith(f"{full}.") or type(child) in (nn.ModuleList, nn.ModuleDict):
                todo.append((full, child))
            else:
                places.before.append((full, child))
    return places
