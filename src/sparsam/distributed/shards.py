"""Parameters that several processes hold together: DTensors, as FSDP2 (`fully_shard`) and tensor parallelism make them.

Arithmetic runs on *local parts*, the plain tensors that a process holds. Only sums over all weights need the other
processes. They count each weight once, in its *owner*: the first of the processes that hold it. A plain tensor among
DTensors is held by every process.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch import distributed as dist

from sparsam.errors import UserTypeError, UserValueError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def any_dtensor(tensors: Iterable[object]) -> bool:
    """Tell whether one of the tensors is a DTensor. Costs next to nothing where no program has imported those."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and _any_subclass(tensors, module.DTensor)


def is_dtensor(t: object) -> TypeGuard[DTensor]:
    """Tell whether a tensor is a DTensor."""
    return any_dtensor((t,))


def local(t: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, in the same memory: all of it if it is no DTensor."""
    return t._local_tensor if is_dtensor(t) else t  # to_local() of a parameter returns an object of its own


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the parts of tensors that this process holds."""
    tensors = list(tensors)
    return [local(t) for t in tensors] if any_dtensor(tensors) else tensors


def aligned(grad: Tensor, p: Tensor) -> Tensor:
    """Return a gradient laid out as its parameter is: tensor parallelism may leave sums that are still to be made."""
    if is_dtensor(grad) and is_dtensor(p) and grad.placements != p.placements:
        return grad.redistribute(p.device_mesh, p.placements)
    return grad


def like(part: Tensor, p: Tensor) -> Tensor:
    """Return a local part as a DTensor that is sharded as a parameter is; of a plain parameter the part itself."""
    if not is_dtensor(p):
        return part
    whole = torch.empty_like(p, dtype=part.dtype, requires_grad=False)
    local(whole).copy_(part)
    return whole


def part_of(t: Tensor, p: Tensor) -> Tensor:
    """Return the local part of a tensor of a parameter's shape, which may be whole or sharded as the parameter is."""
    if not is_dtensor(p):
        return t
    if is_dtensor(t):
        return local(aligned(t, p))
    for dim, (offset, size) in enumerate(zip(offsets(p), local(p).shape, strict=True)):
        t = t.narrow(dim, offset, size)
    return t


def offsets(p: Tensor) -> Sequence[int]:
    """Return where in the whole parameter the local part begins, in each dimension."""
    if not is_dtensor(p):
        return [0] * p.dim()
    (chunk,) = p.__create_chunk_list__()  # type: ignore[no-untyped-call]
    empty = not local(p).numel()  # then torch may place it beyond the end
    return [0 if empty else int(offset) for offset in chunk.offsets]


class Holders:
    """The processes that hold parameters together, some of which are DTensors.

    Args:
        params: All parameters that count.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        meshes: list[DeviceMesh] = list(dict.fromkeys(p.device_mesh for p in params if is_dtensor(p)))
        self._ranks = {mesh: mesh.mesh.flatten().tolist() for mesh in meshes}
        self._mesh = max(meshes, key=lambda mesh: len(self._ranks[mesh]))
        everyone = self._ranks[self._mesh]
        contained = all(set(ranks) <= set(everyone) for ranks in self._ranks.values())
        together = math.prod(map(len, self._ranks.values()))
        if not contained and together != dist.get_world_size():
            raise UserTypeError(
                f"params must lie on one mesh, on parts of it, or on meshes that cross and hold all processes, but "
                f"{len(meshes)} meshes hold {together} of {dist.get_world_size()}; place all parameters on one mesh"
            )
        self._first = everyone[0] if contained else 0
        self._whole_world = not contained or len(everyone) == dist.get_world_size()
        self._owns: dict[Any, bool] = {}

    def own(self, p: Tensor) -> bool:
        """Tell whether this process is the owner of what it holds of a parameter."""
        key = (p.device_mesh, p.placements) if is_dtensor(p) else None
        if key not in self._owns:
            self._owns[key] = self._is_first(*key) if key else dist.get_rank() == self._first
        return self._owns[key]

    def _is_first(self, mesh: DeviceMesh, placements: Sequence[Any]) -> bool:
        # Of the equal copies of a mesh that is a part of a larger one, the one with the first process of all counts.
        along = zip(mesh.get_coordinate() or (), placements, strict=True)
        is_first_replica = all(at == 0 for at, placement in along if placement.is_replicate())
        return is_first_replica and self._first in self._ranks[mesh]

    def total(self, t: Tensor) -> Tensor:
        """Add a tensor up over all processes, in place: one all-reduce; one a dimension for a part of the world."""
        if self._whole_world:
            dist.all_reduce(t)
        else:
            for dim in range(self._mesh.ndim):
                dist.all_reduce(t, group=self._mesh.get_group(dim))
        return t


def totals(values: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Return a vector of numbers that were taken of local parts, one for each parameter, for whole parameters."""
    if not any_dtensor(params):
        return values
    holders = Holders(params)
    return holders.total(values * torch.tensor([holders.own(p) for p in params], device=values.device))


def mean_over_holders(value: float, params: Sequence[Tensor]) -> float | Tensor:
    """Return the mean of a number over the processes that hold the parameters, without waiting for it."""
    if not any_dtensor(params):
        return value
    both = torch.tensor([value, 1.0], dtype=torch.float64).to(local(params[0]).device, non_blocking=True)
    Holders(params).total(both)
    return both[0] / both[1]


def true_on_all_ranks(flag: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Return whether a 0-d bool is true in all processes that hold the parameters."""
    if not any_dtensor(params):
        return flag
    return Holders(params).total((~flag).long()) == 0


def computes_on(p: Tensor) -> torch.device:
    """Return the device that a parameter is used on, which is another than its own where FSDP offloads weights."""
    kind = p.device_mesh.device_type if is_dtensor(p) else p.device.type
    return p.device if kind == p.device.type else torch.device(kind, torch.get_device_module(kind).current_device())


def check_same_everywhere(values: Sequence[Tensor], params: Sequence[Tensor], what: str) -> None:
    """Refuse tensors that differ between the processes that hold sharded parameters; all of them do so."""
    if not any_dtensor(params):
        return
    holders, device = Holders(params), params[0].device
    own = torch.stack([t.detach().double().sum().to(device) for t in values] or [torch.zeros((), device=device)])
    mean = holders.total(own.clone()) / holders.total(torch.ones((), dtype=torch.float64, device=device))
    if not bool(true_on_all_ranks(torch.isclose(own, mean, rtol=1e-9, atol=1e-12, equal_nan=True).all(), params)):
        raise UserValueError(f"{what} must be the same in all processes where parameters are sharded, but differ")


def fsdp_modules(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the modules that FSDP2 gathers weights for. Costs next to nothing in a program of one process."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None or not dist.is_initialized() or not _any_subclass(modules := list(modules), module.FSDPModule):
        return []
    return [m for m in modules if isinstance(m, module.FSDPModule)]


def _any_subclass(objects: Iterable[object], kind: type) -> bool:
    """Tell whether one of many objects is an instance of a class, by asking each of their few types once."""
    return any(issubclass(own, kind) for own in set(map(type, objects)))
