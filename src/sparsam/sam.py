r"""SAM and sparse SAM around any torch optimizer.

One step, with weights w, loss f, radius :math:`\rho`, mask m and base optimizer B:

.. math::  g = \nabla f(w), \qquad
           \epsilon = \rho\,\frac{g}{\lVert g\rVert_2}\odot m, \qquad
           w \leftarrow B\big(w,\ \nabla f(w + \epsilon)\big)

m = 1 is SAM (Foret et al., 2021); a sparse m is SSAM (Mi et al., 2022). `adaptive=True` is ASAM (Kwon et al.,
2021) without its :math:`\eta`: :math:`\epsilon = \rho\, w^2\odot g\,/\,\lVert |w|\odot g\rVert_2 \odot m`.

This file holds the protocol and the state. The arithmetic is in :mod:`sparsam.perturbation`, the choice of
weights in :mod:`sparsam.masks`, what the two passes share in :mod:`sparsam.passes`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from functools import partial
from typing import Any, Self, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsam.behind import BehindCut
from sparsam.checks import check_arguments, check_base, check_gradients, check_groups, check_rho, check_state
from sparsam.distributed.broadcast import of_rank_zero
from sparsam.errors import UserRuntimeError, UserTypeError, warn
from sparsam.masks import DenseMask, Mask, StepKind
from sparsam.momentum import check_momentum, perturb_along_momentum
from sparsam.passes import SecondPass
from sparsam.perturbation import Saved, perturb, restore
from sparsam.randomness import random_numbers_apart
from sparsam.selection import Selection, copied, expand, rewritten, settle

Closure = Callable[[], Any]


class Phase(Enum):
    """Where in a step an optimizer is; the value completes "the optimizer is ..."."""

    IDLE = "between two steps"
    FIRST_PASS = "inside the closure's first pass"
    PERTURBED = "at the perturbed weights"
    READY = "done with the second pass"


class SAM(Optimizer):
    """Sharpness-aware minimization around any base optimizer; with a mask, sparse SAM.

    `param_groups` and `state` are the base optimizer's own, so learning-rate schedulers, gradient scalers
    and whatever else works on an optimizer work on this one. Each group also carries `rho`, which may
    differ from group to group and change at any time (:mod:`sparsam.rho`).

    Three ways to take a step::

        loss = opt.step(closure)                # closure: zero_grad, forward, backward, return loss; called twice

        opt.zero_grad()                         # in two steps
        loss_fn(model(x), y).backward()
        opt.first_step(zero_grad=True)
        loss_fn(model(x), y).backward()
        opt.second_step()

        opt.zero_grad()                         # as a context, for instance with a GradScaler
        loss_fn(model(x), y).backward()
        with opt.perturbed():
            opt.zero_grad()
            loss_fn(model(x), y).backward()
        opt.step()

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        base_optimizer: The class of the optimizer that takes the step, such as `torch.optim.SGD`.
        rho: The radius of the perturbation, at least 0.
        mask: Which weights are perturbed; None: all (SAM).
        adaptive: Scale the perturbation by the size of the weights (ASAM).
        model: The network, if running statistics of normalisation layers are to move once a step and
            dropout is to draw the same numbers in both passes. Default: the mask's model, if it has one.
        **base_arguments: Passed on to the base optimizer: `lr`, `momentum`, ...

    >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> opt = SAM([w], torch.optim.SGD, rho=0.5, lr=0.1)
    >>> def closure():
    ...     opt.zero_grad()
    ...     loss = w.square().sum() / 2
    ...     loss.backward()
    ...     return loss
    >>> opt.step(closure).item(), w.tolist()    # w - 0.1 * (w + 0.5 * w / 5)
    (12.5, [2.6700000762939453, 3.559999942779541])
    """

    def __init__(
        self,
        params: Any,
        base_optimizer: Callable[..., Optimizer] = torch.optim.SGD,
        rho: float | Tensor = 0.1,
        mask: Mask | None = None,
        adaptive: bool = False,
        model: nn.Module | None = None,
        **base_arguments: Any,
    ) -> None:
        check_arguments(params, base_optimizer)
        self._build(base_optimizer(params, **base_arguments), rho, mask, adaptive, model)

    @classmethod
    def wrap(
        cls,
        base_optimizer: Optimizer,
        rho: float | Tensor = 0.1,
        mask: Mask | None = None,
        adaptive: bool = False,
        model: nn.Module | None = None,
    ) -> Self:
        """Build around an optimizer that exists already; a group that carries `rho` keeps it."""
        self = cls.__new__(cls)
        self._build(base_optimizer, rho, mask, adaptive, model)
        return self

    def _build(
        self,
        base: Optimizer,
        rho: float | Tensor,
        mask: Mask | None,
        adaptive: bool,
        model: nn.Module | None,
    ) -> None:
        check_base(base)
        check_rho(rho)
        if mask is not None and not isinstance(mask, Mask):
            raise UserTypeError(f"mask must be a sparsam mask or None, but is {mask!r}")
        for i, group in enumerate(base.param_groups):
            check_rho(group.get("rho", rho), f"rho of parameter group {i}")
        if mask is not None and mask.momentum_rho:
            check_momentum(base)
        rho = _plain(rho)
        self.base_optimizer = base
        self.mask = DenseMask() if mask is None else mask
        self.adaptive = bool(adaptive)
        self._second_pass = SecondPass(self.mask.model if model is None else model)
        self.steps = 0  # taken so far
        self._selection: Selection | None = None
        self._before_update: Selection | None = None  # what it was before the latest update ...
        self._updated_at = -1  # ... which was made for this step
        self._selected_from: list[bool] = []  # which parameters the mask could choose from
        self._behind = BehindCut(self.mask, self.adaptive)
        self.reloads = 0  # how often what a step reads was replaced: a captured graph goes on reading the old
        self.captured = False  # whether steps will run from a CUDA graph: what a budget measures depends on it
        self._saved: list[Saved] = []
        self._phase = Phase.IDLE
        for group in base.param_groups:
            group["rho"] = _plain(group.get("rho", rho))
        # Not Optimizer.__init__, which would make groups and state of its own.
        super().__setstate__({"defaults": {**base.defaults, "rho": rho}})

    # ------------------------------------------------------------------ what belongs to the base optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base optimizer's parameter groups."""
        return self.base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base_optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The base optimizer's state."""
        return self.base_optimizer.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.base_optimizer.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; the mask is made anew in the next step."""
        self._refuse_while_perturbed("add_param_group")
        rho = param_group.get("rho", self.defaults["rho"])
        check_rho(rho, f"rho of parameter group {len(self.param_groups)}")
        self.base_optimizer.add_param_group({**param_group, "rho": _plain(rho)})
        try:
            check_groups(self.base_optimizer)
            if self.mask.momentum_rho:
                check_momentum(self.base_optimizer)
        except ValueError:
            self.param_groups.pop()
            raise
        self.reloads += 1
        not_perturbed = [False] * len(self.param_groups[-1]["params"])
        self._selection = None if self._selection is None else [*self._selection, *not_perturbed]
        self._before_update = None if self._before_update is None else [*self._before_update, *not_perturbed]

    # ------------------------------------------------------------------------------------------- the step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Closure) -> Any: ...
    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step.

        Args:
            closure: Clears the gradients, computes the loss and its gradient and returns the loss. It is
                called twice, at w and at w + eps, also if rho or the mask is zero; more often only in the first
                step of a BudgetMask, which measures, and once in its steps of one pass. None: take the base step
                that ends the two-step use.

        Returns:
            What the first call of the closure returned: the loss at w, or where a `momentum_rho` leads.
        """
        if closure is None:
            if self._phase is Phase.IDLE or self._phase is Phase.FIRST_PASS:
                raise UserRuntimeError(
                    "step() without closure ends a step that first_step() or perturbed() began, but the "
                    f"optimizer is {self._phase.value}: SAM needs two gradients. Pass a closure, or call "
                    "first_step() after the first backward pass"
                )
            self._leave(Phase.READY)
            return self._base_step()
        self._refuse_while_perturbed("step(closure)")
        if self.steps == self.mask.length:
            warn(
                f"this is step {self.steps + 1}, but the mask's total_steps are {self.steps}: all further steps take "
                "two passes. total_steps counts steps, not epochs"
            )
        self._choose(closure)
        kind = self.mask.kind(self.steps)
        loss = self._one_pass(closure, kind.momentum_rho) if kind.one_pass else self._two_passes(closure)
        self._base_step()
        return loss

    def _one_pass(self, closure: Closure, momentum_rho: float | None) -> Any:
        """Take the gradient at w, or where the momentum leads; then w is what it was, bit for bit."""
        params, _ = self._params_and_rhos()
        saved: list[Saved] = []
        if momentum_rho:
            saved = perturb_along_momentum(params, self.state, momentum_rho, adaptive=self.adaptive)
        try:
            torch.clear_autocast_cache()  # a cast of w would otherwise be taken for one of w + eps
            with torch.enable_grad():
                return self._first_pass(closure)
        finally:
            restore(saved)
            torch.clear_autocast_cache()

    def _two_passes(self, closure: Closure) -> Any:
        with torch.enable_grad():
            loss = self._first_pass(closure)
            try:
                with self._perturbed(guard=False):
                    with self._replayed():
                        closure()
                    if self._behind.is_spoilt(self._params_and_rhos()[0]):
                        self._second_pass.again()
                        closure()
            finally:
                self._behind.forget()
        return loss

    def _choose(self, closure: Closure) -> None:
        """Let a budget measure, before its first step."""
        self._phase = Phase.FIRST_PASS  # so that the closure's zero_grad() begins no step
        try:
            rehearsal = partial(self.rehearsal, closure)
            with torch.enable_grad():
                self._behind.choose(closure, self.base_optimizer, rehearsal, device_time=self.captured)
        finally:
            self._phase = Phase.IDLE

    def rehearsal(self, closure: Closure, cut: str | None) -> Callable[[], None]:
        """Return the two passes of a step from another cut, to be timed: all of the step but the base optimizer's.

        Args:
            closure: As for :meth:`step`.
            cut: The module at whose input this optimizer's mask, a BudgetMask, is to cut; None: nowhere.
        """
        mask: Any = copy.copy(self.mask)
        mask.cut, mask.full, mask.late_share = cut, 0.0, 1.0
        model = self._second_pass.model
        twin = SAM.wrap(self.base_optimizer, mask=mask, adaptive=self.adaptive, model=model)

        @torch.no_grad()
        def _two_passes() -> None:
            twin._two_passes(closure)
            twin._behind.note_norms(twin._params_and_rhos()[0])
            twin.steps = 1  # from now on the mask is there

        return _two_passes

    def first_step(self, zero_grad: bool = False) -> None:
        """Go from w to w + eps, by the gradients now in `.grad`.

        Args:
            zero_grad: Clear the gradients afterwards.
        """
        self._ascend(guard=True)
        if zero_grad:
            try:
                self.zero_grad()
            except BaseException:
                self.restore()
                raise

    def second_step(self, zero_grad: bool = False) -> None:
        """Go back to w, bit for bit, and take the base step with the gradients now in `.grad`.

        Args:
            zero_grad: Clear the gradients afterwards.
        """
        if self._phase is not Phase.PERTURBED:
            raise UserRuntimeError(
                f"second_step() needs first_step() before it, but the optimizer is {self._phase.value}"
            )
        self.step()
        if zero_grad:
            self.zero_grad()

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """Be at w + eps inside the `with` block, by the gradients now in `.grad`, and at w, bit for bit, after it.

        If the block ends without an exception, `step()` without closure then takes the base step.
        """
        with self._perturbed(guard=True):
            yield

    @contextmanager
    def _perturbed(self, *, guard: bool) -> Iterator[None]:
        self._ascend(guard=guard)
        try:
            yield
        except BaseException:
            self.restore()
            raise
        self._leave(Phase.READY)

    def restore(self) -> None:
        """Give up a step that `first_step` began: go back to w, bit for bit. Does nothing between steps."""
        self._leave(Phase.IDLE)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Between two steps, the next step starts here, whatever was pending."""
        if self._phase is Phase.IDLE or self._phase is Phase.READY:
            self._start()
        super().zero_grad(set_to_none)

    def masks(self) -> list[Tensor]:
        """Return which weights the latest step perturbed: one bool tensor for each parameter, in the groups' order.

        What a `momentum_rho` perturbs is not among them.
        """
        params, _ = self._params_and_rhos()
        begun = self._phase is Phase.PERTURBED or self._phase is Phase.READY
        kind = self.mask.kind(self.steps if begun else max(self.steps - 1, 0))
        if self._selection is None and not (kind.one_pass and self.steps):
            raise UserRuntimeError("there is no mask before the first step: it is made in that step")
        return [m.clone() for m in expand(self._used_selection(kind, params), params)]

    @property
    def selection(self) -> Selection | None:
        """The mask as it is stored: for each parameter a bool tensor, or one bool for all of it; at first None.

        An update writes into the same tensors, in the same list, unless it turns a tensor into a bool or back: what a
        captured CUDA graph reads stays where it is as long as the list is the same object.
        """
        return self._selection

    def mask_is_due(self) -> bool:
        """Tell whether the next step makes the mask anew."""
        if self.mask.kind(self.steps).one_pass:
            return False
        if self._selection is None or self._eligible(self._params_and_rhos()[0]) != self._selected_from:
            return True
        return self.mask.interval is not None and self.steps % self.mask.interval == 0

    def _start(self) -> None:
        self._phase = Phase.IDLE
        self._second_pass.mark()

    def _first_pass(self, closure: Closure) -> Any:
        self._start()
        self._phase = Phase.FIRST_PASS
        try:
            with self._behind.first_pass(self.mask.kind(self.steps)):
                return closure()
        finally:
            self._phase = Phase.IDLE

    @torch.no_grad()
    def _ascend(self, *, guard: bool) -> None:
        """Go from w to w + eps. A guard is for the steps that a gradient scaler skips, not for a closure's."""
        self._refuse_while_perturbed("first_step() or perturbed()")
        params, rhos = self._params_and_rhos()
        check_gradients(params)
        kind = self.mask.kind(self.steps)
        self._behind.find(kind, params)
        self._update_mask(params)
        selection = self._used_selection(kind, params)
        if kind.rho is not None:
            rhos = [kind.rho] * len(params)
        used = [i for i, p in enumerate(params) if p.grad is not None]
        self._saved = perturb(
            [params[i] for i in used],
            [params[i].grad for i in used],  # type: ignore[misc]
            [selection[i] for i in used],
            [rhos[i] for i in used],
            adaptive=self.adaptive,
            norm=self._behind.norm(kind, params),
            guard=guard,
        )
        self._phase = Phase.PERTURBED
        try:
            torch.clear_autocast_cache()  # a cast of w would otherwise be taken for one of w + eps
            self._second_pass.begin(spare=self._behind.modules_before(kind))
        except BaseException:
            self.restore()
            raise

    def _leave(self, phase: Phase) -> None:
        """Go back from w + eps to w, if that is where the weights are."""
        if self._phase is not Phase.PERTURBED:
            return
        with torch.no_grad():
            restore(self._saved)
            self._saved, self._phase = [], phase
            torch.clear_autocast_cache()
            self._second_pass.end(complete=phase is Phase.READY)

    def _base_step(self) -> None:
        self._behind.note_norms(self._params_and_rhos()[0])
        self.base_optimizer.step()
        self.steps += 1
        self._start()

    def _update_mask(self, params: list[Tensor]) -> None:
        """Make the mask if this step is due for one, of parameters that are trained and lie behind the mask's cut."""
        if not self.mask_is_due():
            return
        eligible = self._eligible(params)
        indices = [i for i, e in enumerate(eligible) if e]
        subset = [params[i] for i in indices]
        before = copied(self._settled_selection())
        previous = None if before is None else [before[i] for i in indices]
        selection: Selection = [False] * len(params)
        if subset:
            with random_numbers_apart(p.device for p in subset):
                chosen = self.mask.select(subset, self.steps, previous)
            if self.mask.differs_by_rank:
                chosen = of_rank_zero(chosen, subset)
            for i, m in zip(indices, settle(chosen, subset), strict=True):
                selection[i] = m
        self._selection = rewritten(self._selection, selection)
        self._before_update, self._updated_at = before, self.steps
        self._selected_from = eligible

    def _eligible(self, params: list[Tensor]) -> list[bool]:
        behind = self._behind.lies_behind(self.mask.cut, params)
        return [p.requires_grad and b for p, b in zip(params, behind, strict=True)]

    def _used_selection(self, kind: StepKind, params: list[Tensor]) -> Selection:
        """Return what a step perturbs, given what the mask selected."""
        if kind.everything:
            return [p.requires_grad for p in params]
        if kind.one_pass:
            return [False] * len(params)
        assert self._selection is not None
        behind = self._behind.lies_behind(kind.cut, params)
        return [m if b else False for m, b in zip(self._selection, behind, strict=True)]

    def _replayed(self) -> AbstractContextManager[None]:
        """Let the second pass leave out what its first need not do again."""
        perturbed = [p for saved in self._saved for p in saved.tensors]
        return self._behind.second_pass(self.mask.kind(self.steps), perturbed, self._second_pass.spare_nothing)

    def _settled_selection(self) -> Selection | None:
        """Return the mask of the latest step that was taken: a step that is tried again updates the same mask again."""
        return self._before_update if self._updated_at == self.steps else self._selection

    def _params_and_rhos(self) -> tuple[list[Tensor], list[float | Tensor]]:
        params: list[Tensor] = []
        rhos: list[float | Tensor] = []
        for i, group in enumerate(self.param_groups):
            rho = group.get("rho", self.defaults["rho"])  # gone if the base optimizer loaded a state of its own
            check_rho(rho, f"rho of parameter group {i}")
            params += group["params"]
            rhos += [rho] * len(group["params"])
        return params, rhos

    def _refuse_while_perturbed(self, what: str) -> None:
        if self._phase is Phase.FIRST_PASS:
            raise UserRuntimeError(f"{what} cannot be called while the optimizer is {self._phase.value}")
        if self._phase is Phase.PERTURBED:
            raise UserRuntimeError(
                f"{what} cannot be called while the optimizer is {self._phase.value}; end the step first with "
                "second_step(), or give it up with restore()"
            )

    # ------------------------------------------------------------------------------------ saving, copying

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state, rho, masks and counters: tensors and plain Python values only."""
        self._refuse_while_perturbed("state_dict()")
        own = {
            "settings": self._settings(),
            "shapes": [list(p.shape) for p in self._params_and_rhos()[0]],
            "steps": self.steps,
            "seed": self.mask.seed,
            "selected_from": list(self._selected_from),
            "selection": copied(self._settled_selection()),
            "behind": self._behind.state(),
        }
        return {**self.base_optimizer.state_dict(), "sparsam": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; the run then goes on as if it had not been interrupted.

        The model and the settings of the mask must be those of the saved run: otherwise an error says what
        differs, and nothing is changed. The mask's seed is taken from the saved run, as is rho.
        """
        self._refuse_while_perturbed("load_state_dict()")
        params, _ = self._params_and_rhos()
        own = check_state(state_dict, self._settings(), params)
        self.base_optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "sparsam"})
        selection = own["selection"]
        self._selection = None if selection is None else settle(selection, params)
        self._updated_at = -1
        self._selected_from = list(own["selected_from"])
        self._behind.load(own.get("behind", {}), params[0].device)
        self.steps = own["steps"]
        self.mask.seed = own["seed"]
        self.reloads += 1
        self._start()

    def _settings(self) -> dict[str, Any]:
        return {
            "base": type(self.base_optimizer).__name__,
            "adaptive": self.adaptive,
            "mask": self.mask.settings(),
        }

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_while_perturbed("copying or pickling")
        # A scheduler puts its own `step` onto the instance; it cannot be copied and patches the copy anew.
        # Hooks are left behind, as torch's own optimizers do.
        return {
            name: value
            for name, value in self.__dict__.items()
            if name != "step" and not name.startswith("_optimizer_")
        }


def _plain(rho: float | Tensor) -> float | Tensor:
    """Return a plain float for whatever number was given, so that a state_dict holds nothing else."""
    return rho if isinstance(rho, Tensor) else float(rho)
