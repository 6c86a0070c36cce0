"""The processes that train replicas of one model, and what they exchange beside DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsam.checks import check_choice
from sparsam.distributed.groups import average, check_group, group_size
from sparsam.errors import UserRuntimeError, UserTypeError, UserValueError

PERTURBATIONS = ("global", "local")


class Replicas:
    r"""Who trains a model together, and by which gradient each replica perturbs.

    With n replicas, :math:`g_i` the gradient of replica i on its part of the batch, all steps are those of the mean

    .. math::  w \leftarrow B\Big(w,\ \frac1n \sum_i \nabla f_i(w + \epsilon_i)\Big)

    "global" perturbs by one gradient, :math:`\epsilon_i = \rho\,\bar g / \lVert\bar g\rVert_2 \odot m` with
    :math:`\bar g = \frac1n\sum_i g_i`: what one process computes on the joined batch. "local" perturbs each replica by
    its own, :math:`\epsilon_i = \rho\,g_i / \lVert g_i\rVert_2 \odot m`, without communication (m-sharpness, Foret et
    al., 2021). The mask m is the same on all ranks. What an ascent keeps of gradients (F-SAM's mean) is then each
    replica's own, and so is what its `state_dict` holds of it.

    `step(closure)` runs the first pass of "local" in `no_sync`. In two-step use put it into `with model.no_sync():`
    yourself, forward and backward: one that was synchronised is refused.

    Args:
        models: Where a DistributedDataParallel is looked for; the first one that is found counts.
        perturbation: "global" or "local".
        group: The processes that share a mask; None: those of the DistributedDataParallel, or all.
    """

    def __init__(self, models: Iterable[nn.Module | None], perturbation: str, group: Any | None) -> None:
        check_choice("perturbation", perturbation, PERTURBATIONS)
        check_group(group)
        self.ddp = next((ddp for model in models if (ddp := find_ddp(model)) is not None), None)
        self.local, self._group = perturbation == "local", group
        self._shared: frozenset[Tensor] | None = None  # the parameters whose gradients are averaged
        if self.local and self.ddp is None:
            raise UserTypeError(
                "model must be the DistributedDataParallel that the closure runs with perturbation='local', whose "
                "first pass does not synchronise gradients, but there is none (in Lightning it is "
                "self.trainer.strategy.model); pass model=ddp_model. Sharded parameters take 'global' only"
            )
        if self.local and self.ddp is not None and self.ddp.static_graph:
            raise UserValueError(
                "perturbation must be 'global' with DistributedDataParallel(static_graph=True), which must synchronise "
                "every pass, but is 'local'; build it with static_graph=False"
            )

    @property
    def group(self) -> Any | None:
        """The processes that share a mask; None: all."""
        return self._group if self._group is not None or self.ddp is None else self.ddp.process_group

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicas:
        copy = object.__new__(type(self))
        copy.ddp, copy.local = deepcopy(self.ddp, memo), self.local
        copy._group, copy._shared = self._group, None  # processes cannot be copied
        return copy

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            raise UserRuntimeError("an optimizer with process_group= cannot be pickled; save its state_dict()")
        return {**self.__dict__, "_shared": None}

    def settings(self) -> dict[str, Any]:
        """Return what a resumed run must have in common with the saved one; nothing where that is the default."""
        return {"perturbation": "local"} if self.local else {}

    def first_pass(self) -> AbstractContextManager[Any]:
        """Return what the first pass of a closure runs in."""
        return self.ddp.no_sync() if self.local and self.ddp is not None else nullcontext()

    def unsynchronised(self) -> AbstractContextManager[Any]:
        """Return what a pass runs in whose gradients :meth:`average_gradients` will average."""
        return nullcontext() if self.ddp is None else self.ddp.no_sync()

    def check_first_pass(self) -> None:
        """Refuse a first pass that was not run in `no_sync`, where each replica is to perturb by its own gradient."""
        if self.local and self.ddp is not None and self.ddp.require_forward_param_sync:
            raise UserRuntimeError(
                "perturbation='local' needs `with model.no_sync():` around forward and backward of the first pass, and "
                "`model` there, the DistributedDataParallel, to be what runs; step(closure) does the first by itself"
            )

    def check_uneven(self, what: str) -> None:
        """Refuse what needs all ranks while some may have no more batches, in `with ddp_model.join():`."""
        if self.ddp is not None and self.ddp._join_config.enable:
            raise UserRuntimeError(
                f"{what} needs every rank, but in `with model.join():` some may have no more batches and would not "
                f"answer: give all ranks the same number of batches, or use share=1 and a mask without a cut and with "
                f"interval=None"
            )

    def average_gradients(self, params: Iterable[Tensor]) -> None:
        """Let the gradients be their means over all replicas; where a replica has none, it counts as 0.

        With `find_unused_parameters=True` a gradient stays None if no replica has one, as in DDP itself.
        """
        ddp = self.ddp
        if ddp is None or group_size(ddp.process_group) == 1:
            return
        self.check_uneven("a cut")
        if self._shared is None:  # once: walking a module takes time
            named = ddp.module.named_parameters()
            self._shared = frozenset(p for name, p in named if name not in ddp.parameters_to_ignore)
        wanted = [p for p in params if p in self._shared and p.requires_grad]
        if ddp.find_unused_parameters and wanted:
            used = self.any([p.grad is not None for p in wanted], wanted[0].device)
            wanted = [p for p, anywhere in zip(wanted, used, strict=True) if anywhere]
        for p in wanted:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        average([p.grad for p in wanted if p.grad is not None], ddp.process_group)

    def any(self, bits: Sequence[bool], device: torch.device) -> list[bool]:
        """Return for each bit whether it is set on any rank."""
        flat = torch.tensor(bits, dtype=torch.uint8, device=device)
        dist.all_reduce(flat, dist.ReduceOp.MAX, group=self.ddp.process_group if self.ddp else None)
        return [bool(bit) for bit in flat.tolist()]


def find_ddp(model: nn.Module | None) -> DistributedDataParallel | None:
    """Return a model, or what torch.compile has made of it, if it is a DistributedDataParallel."""
    while model is not None and "_orig_mod" in model._modules:
        model = model.get_submodule("_orig_mod")
    return model if isinstance(model, DistributedDataParallel) else None
