"""An optimizer's state for `torch.distributed.checkpoint`, which shards it anew for another number of processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsam.ascents import Ascent, Memory
from sparsam.checks import check_module
from sparsam.errors import UserTypeError, UserValueError
from sparsam.sam.optimizer import SAM
from sparsam.selection import Selection, expand

Kept = Sequence[dict[str, Tensor] | None]
"""What an ascent keeps of each parameter."""


class SAMState:
    """All of an optimizer's state, to be saved and loaded by `torch.distributed.checkpoint` (DCP).

    Put it into the dict that is saved, and into the one that is loaded::

        dcp.save({"model": model_state, "optimizer": SAMState(model, opt)}, checkpoint_id=folder)
        dcp.load({"model": model_state, "optimizer": SAMState(model, opt)}, checkpoint_id=folder)

    It holds the base optimizer's state, rho, masks, what ascents remember, counters and seeds. Tensors are sharded as
    the parameters are, so a checkpoint can be loaded with another number of processes, or in one process with a plain
    model. Masks take two bytes a weight.

    DCP loads only what is there to be loaded into. So a state has the same tensors from the first step on: masks that
    are all False, and an empty memory (:meth:`sparsam.Ascent.start`).

    Args:
        model: The network whose parameters are trained.
        optimizer: Its optimizer, built with the same settings as the one that was saved.
    """

    def __init__(self, model: nn.Module, optimizer: SAM) -> None:
        check_module("model", model, optional=False)
        if not isinstance(optimizer, SAM):
            raise UserTypeError(f"optimizer must be a sparsam.SAM, but is a {type(optimizer).__name__}")
        self.model, self.optimizer = model, optimizer
        remembers = [ascent for ascent in self._ascents if type(ascent).start is not Ascent.start]
        if optimizer._replicas.local and remembers:
            raise UserTypeError(
                f"optimizer must not have perturbation='local' with {type(remembers[0]).__name__}, which remembers "
                f"other gradients on each rank, where a checkpoint has one; save opt.state_dict() of every rank instead"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return tensors by name, and everything else as text."""
        own = self.optimizer.state_dict()["sparsam"]
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        made, memories = own["mask"]["made"], own.pop("memories")
        tensors = {
            **_named("mask", expand(_or_nothing(made and made.pop("selection"), params), params)),
            **_named("moved", expand(_or_nothing(own["moved"], params), params)),
        }
        own["moved"] = own["moved"] is not None
        own["shared"] = [_sharing(memory) for memory in memories]
        for a, (ascent, memory) in enumerate(zip(self._ascents, memories, strict=True)):
            for i, kept in enumerate(_complete(ascent, memory, params)):
                tensors.update({f"memory.{a}.{i}.{name}": t for name, t in (kept or {}).items()})
        own["base is new"] = not self.optimizer.state
        return {"base": self._base_state(), "tensors": tensors, "sparsam": json.dumps(own)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; a state of another model or with other settings is refused."""
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        own, tensors, base = json.loads(state_dict["sparsam"]), state_dict["tensors"], self.optimizer.base_optimizer
        count, new, shared = len(own["shapes"]), own.pop("base is new"), own.pop("shared")
        if own["mask"]["made"]:
            own["mask"]["made"]["selection"] = [tensors[f"mask.{i}"] for i in range(count)]
        own["moved"] = [tensors[f"moved.{i}"] for i in range(count)] if own["moved"] else None
        own["memories"] = [
            [kept and {name: _memory(tensors, a, first, name) for name, first in kept.items()} for kept in memory]
            for a, memory in enumerate(shared)
        ]
        self.optimizer.load_state_dict({**base.state_dict(), "sparsam": own})
        set_optimizer_state_dict(self.model, base, state_dict["base"])
        if new:
            base.state.clear()

    @property
    def _ascents(self) -> Sequence[Ascent]:
        return self.optimizer.schedule.ascents(self.optimizer.ascent)

    def _base_state(self) -> Any:
        """Return the base optimizer's state by the names of parameters, with zeros before the first step.

        torch takes a step to have these zeros; here the optimizer is afterwards as it was.
        """
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        base = self.optimizer.base_optimizer
        if base.state:
            return get_optimizer_state_dict(self.model, base)
        params = [p for group in base.param_groups for p in group["params"]]
        grads = [p.grad for p in params]
        for p in params:
            p.grad = None
        try:
            return get_optimizer_state_dict(self.model, base)
        finally:
            base.state.clear()
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad


def _named(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{i}": t for i, t in enumerate(tensors)}


def _or_nothing(selection: Selection | None, params: Sequence[Tensor]) -> Selection:
    return [False] * len(params) if selection is None else selection


def _sharing(memory: Kept) -> list[dict[str, int] | None]:
    """Return for each tensor that is kept the first parameter that keeps the same one."""
    first: dict[tuple[str, int], int] = {}
    return [
        None if kept is None else {name: first.setdefault((name, id(t)), i) for name, t in kept.items()}
        for i, kept in enumerate(memory)
    ]


def _complete(ascent: Ascent, kept: Kept, params: Sequence[Tensor]) -> Kept:
    """Return what is kept of each parameter, with an empty memory of those of which nothing is kept yet."""
    memory: Memory = {p: entry for p, entry in zip(params, kept, strict=True) if entry is not None}
    with torch.no_grad():
        ascent.start([p for p in params if p.requires_grad and p not in memory], memory)
    return [memory.get(p) for p in params]


def _memory(tensors: dict[str, Tensor], ascent: int, parameter: int, name: str) -> Tensor:
    key = f"memory.{ascent}.{parameter}.{name}"
    if key not in tensors:
        raise UserValueError(
            f"the checkpoint holds {name!r}, which an ascent remembers of parameter {parameter}, and there is nothing "
            f"to load it into: start() of the ascent must give each parameter an empty {name!r}"
        )
    return tensors[key]
