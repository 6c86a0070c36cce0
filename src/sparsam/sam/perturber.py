"""How one step perturbs: which weights (mask) and which way (ascent), with what both keep between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsam.ascents import Ascent, Memory
from sparsam.distributed.norm import sharded_norm
from sparsam.distributed.replicas import Replicas
from sparsam.distributed.shards import aligned, any_dtensor, local, local_parts
from sparsam.errors import UserRuntimeError
from sparsam.masks.base import Mask
from sparsam.passes import Passes
from sparsam.perturbation import Saved, gradient_norm, perturb, restore
from sparsam.sam.checks import check_gradients, check_models, check_scale, check_sharding
from sparsam.sam.mask_state import MaskState
from sparsam.selection import Selection, copied, expand, settle


class Perturber:
    """Adds eps to the weights and takes it back; owns the state of the mask and of the ascents.

    Args:
        mask: Which weights.
        ascents: All ascents that a step may take.
        passes: How passes are run, which tells the mask's scope.
        adaptive: The perturbation of ASAM.
        replicas: The processes that share the mask.
    """

    def __init__(
        self, mask: Mask, ascents: Sequence[Ascent], passes: Passes, adaptive: bool, replicas: Replicas
    ) -> None:
        self.mask, self.replicas = MaskState(mask, replicas), replicas
        self.ascents, self.passes, self.adaptive = list(ascents), passes, adaptive
        self.memories: list[Memory] = [{} for _ in ascents]
        self.moved: Selection | None = None  # what the latest step perturbed
        self.saved: list[Saved] = []  # what eps was added to, with copies of w
        self.radius = 0.0  # the largest of the latest step, of those that the host knows
        self._whole = False  # whether there is state of parameters that are not sharded
        self._remember: Callable[[], None] | None = None  # what the ascent keeps of this step, once it is taken

    def check(self, base: Optimizer) -> None:
        """Refuse a base that an ascent cannot work with, sharded parameters without a model, another model's mask."""
        params = [p for group in base.param_groups for p in group["params"]]
        check_sharding(self.passes.model, params)
        check_models(self.mask.mask.scope.model, self.passes.model, params)
        for ascent in self.ascents:
            ascent.check(base)

    def stay(self, params: list[Tensor]) -> None:
        """Stay at w, as base steps do."""
        self._check(params)
        self.moved = [False] * len(params)

    def _check(self, params: list[Tensor]) -> bool:
        """Refuse parameters that have changed in a way that cannot be; tell whether they are sharded."""
        check_sharding(self.passes.model, params, were_whole=self._whole)
        self._remember = None
        sharded = any_dtensor(params)
        self._whole = not sharded
        return sharded

    def perturb(
        self,
        ascent: Ascent | None,
        params: list[Tensor],
        rhos: list[float | Tensor],
        base: Optimizer,
        *,
        step: int,
        scale: float | Tensor | None,
    ) -> None:
        """Go from w to w + eps.

        Args:
            ascent: Which way; None: nowhere.
            params, rhos: All parameters, each with the radius of its group.
            base: The base optimizer.
            step: How many steps were taken before this one.
            scale: What the gradients are too large by.
        """
        if ascent is None:
            self.stay(params)
            return
        sharded = self._check(params)
        grads: list[Tensor] = []
        if ascent.passes == 1:
            used = [i for i, p in enumerate(params) if p.requires_grad]
            selection: Selection = [True] * len(params)
        else:
            check_gradients([p.grad for p in params])
            self.replicas.check_first_pass()
            self.passes.find_scope(params)
            in_scope = self.passes.in_scope(params)
            selection = self.mask.selection(params, _eligible(params, in_scope), step)
            there = [(i, grad) for i, p in enumerate(params) if in_scope[i] and (grad := p.grad) is not None]
            used, grads = [i for i, _ in there], [grad for _, grad in there]
            if sharded:
                grads = [aligned(grad, params[i]) for i, grad in zip(used, grads, strict=True)]
            if scale is not None:
                check_scale(scale)
                grads = [g * (1 / scale) for g in grads] if sharded else list(torch._foreach_mul(grads, 1 / scale))
        taking_part = [params[i] for i in used]
        memory = self.memories[self.ascents.index(ascent)]
        directions = ascent.direction(taking_part, grads, memory, base)
        moving = [(i, d) for i, d in zip(used, directions, strict=True) if d is not None]
        self.moved = selection if len(moving) == len(params) else _only(selection, {i for i, _ in moving})
        if not moving:
            return
        radius = {key: ascent.radius(rho) for key, rho in {id(rho): rho for rho in rhos}.items()}
        self.radius = max((abs(float(r)) for r in radius.values() if not _is_on_device(r)), default=0.0)
        w, d = [params[i] for i, _ in moving], [d for _, d in moving]
        m = [selection[i] for i, _ in moving]
        if sharded:  # the rest is done on what this process holds
            d = [local(aligned(t, p)) for t, p in zip(d, w, strict=True)]
            m = [local(mask) if isinstance(mask, Tensor) else mask for mask in m]
            whole, w = w, local_parts(w)
            norm = sharded_norm(whole, w, d, adaptive=self.adaptive)
        else:
            norm = gradient_norm(w, d, adaptive=self.adaptive)
        self.saved = perturb(
            w,
            d,
            m,
            [radius[id(rhos[i])] for i, _ in moving],
            adaptive=self.adaptive,
            norm=norm,
        )
        try:
            self._remember = ascent.remember(taking_part, grads, memory, norm)
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Go back to w, bit for bit."""
        restore(self.saved)
        self.saved = []

    def masks(self, params: list[Tensor]) -> list[Tensor]:
        """Return which weights the latest step perturbed."""
        if self.moved is None:
            raise UserRuntimeError("there is no mask before the first step: it is made in that step")
        return [m.clone() for m in expand(self.moved, params)]

    def commit(self) -> None:
        """Let the ascent keep what it remembers of a step that is taken."""
        if self._remember is not None:
            self._remember()
        self._remember = None

    def graph_inputs(self, params: Sequence[Tensor]) -> tuple[Selection | None, list[bool]]:
        """Return what a captured step reads: the mask's tensors, and which parameters are trained."""
        return self.mask.made and self.mask.made.selection, [p.requires_grad for p in params]

    def mask_is_due(self, params: list[Tensor], step: int) -> bool:
        """Tell whether a two-pass step makes the mask."""
        return self.mask.is_due(step, _eligible(params, self.passes.in_scope(params)))

    def extend(self, count: int) -> None:
        """Make room for parameters that were added to the optimizer."""
        self.mask.extend(count)
        self.moved = self.moved and [*self.moved, *([False] * count)]

    # ------------------------------------------------------------------------------------------------ state

    def state(self, params: list[Tensor], step: int) -> dict[str, Any]:
        """Return plain values and tensors; `step` steps were taken."""
        return {
            "shapes": [list(p.shape) for p in params],
            "steps": step,
            "mask": self.mask.state(step),
            "passes": self.passes.state(),
            "moved": copied(self.moved),
            "memories": [_copied_memory([memory.get(p) for p in params], params) for memory in self.memories],
        }

    def load(self, state: dict[str, Any], params: list[Tensor]) -> None:
        """Load what :meth:`state` returned."""
        self.mask.load(state["mask"], params)
        self.passes.load(state["passes"])
        self._whole = state["steps"] > 0 and not any_dtensor(params)
        self.moved = None if state["moved"] is None else settle(state["moved"], params)
        self.memories = [
            {p: kept for p, kept in zip(params, _copied_memory(memory, params), strict=True) if kept is not None}
            for memory in state["memories"]
        ]


def _is_on_device(rho: float | Tensor) -> bool:
    return isinstance(rho, Tensor) and rho.device.type != "cpu"


def _eligible(params: Sequence[Tensor], in_scope: Sequence[bool]) -> list[bool]:
    return [p.requires_grad and inside for p, inside in zip(params, in_scope, strict=True)]


def _only(selection: Selection, indices: set[int]) -> Selection:
    return [m if i in indices else False for i, m in enumerate(selection)]


def _copied_memory(
    memory: Sequence[dict[str, Tensor] | None], params: Sequence[Tensor]
) -> list[dict[str, Tensor] | None]:
    """Copy what an ascent keeps to the parameters' devices; what parameters share they share in the copy too."""
    copies: dict[tuple[int, torch.device], Tensor] = {}

    def copy(t: Tensor, device: torch.device) -> Tensor:
        return copies.setdefault((id(t), device), t.detach().to(device, copy=True))

    return [
        None if kept is None else {name: copy(t, p.device) for name, t in kept.items()}
        for kept, p in zip(memory, params, strict=True)
    ]
