r"""SAM and sparse SAM around any torch optimizer.

One step, with weights w, loss f, ascent direction d, radius :math:`\rho`, mask m and base optimizer B:

.. math::  g = \nabla f(w), \qquad
           \epsilon = \rho\,\frac{d}{\lVert d\rVert_2}\odot m, \qquad
           w \leftarrow B\big(w,\ \nabla f(w + \epsilon)\big)

d = g and m = 1 is SAM (Foret et al., 2021); a sparse m is SSAM (Mi et al., 2022). `adaptive=True` is ASAM (Kwon et al.,
2021) without its :math:`\eta`: :math:`\epsilon = \rho\, w^2\odot d\,/\,\lVert |w|\odot d\rVert_2 \odot m`.

This file holds the protocol of a step. Five questions are answered elsewhere: when (:mod:`sparsam.schedules`), which
way (:mod:`sparsam.ascents`), which weights (:mod:`sparsam.masks`), how cheaply (:mod:`sparsam.passes`,
:mod:`sparsam.replay`), and then what: the base optimizer. The arithmetic is in :mod:`sparsam.perturbation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Self, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsam.ascents import Ascent, GradientAscent
from sparsam.distributed.replicas import Replicas
from sparsam.masks import DenseMask, Mask
from sparsam.passes import Closure
from sparsam.replay import passes_for
from sparsam.sam.checks import (
    check_any_gradient,
    check_arguments,
    check_base,
    check_groups,
    check_one_pass,
    check_options,
    check_share,
    check_state,
)
from sparsam.sam.closure import ClosureCheck
from sparsam.sam.coming import Coming
from sparsam.sam.perturber import Perturber
from sparsam.sam.phase import Phase, UsedGradients
from sparsam.sam.policies import Policies
from sparsam.sam.wrapper import Wrapper, eager
from sparsam.schedules import EveryStep, Schedule
from sparsam.share import (
    WHOLE,
    Rows,
    check_takes_rows,
    check_without_closure,
    fraction,
    mean_loss,
    mix,
    on_rows,
    split,
    weights,
)

T = TypeVar("T")


class SAM(Wrapper, Policies):
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
        ascent: Which way they are perturbed; None: along the gradient.
        schedule: Which steps perturb; None: every step.
        adaptive: Scale the perturbation by the size of the weights (ASAM).
        model: The network, if running statistics of normalisation layers are to move once a step and dropout is to draw
            the same numbers in both passes. DTensors need it. Default: the mask's model, if it has one.
        perturbation: "global": all replicas perturb by their mean gradient. "local": each by its own, without
            communication; `model` or the mask must hold the DistributedDataParallel.
        process_group: The processes that share a mask. Default: those of the DistributedDataParallel, or all.
        share: The share of the batch that both passes see, in (0, 1]. Below 1, `step(closure)` calls a closure with an
            argument that takes the rows of a call (:mod:`sparsam.share`), and a step costs 1 + share passes.
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
        ascent: Ascent | None = None,
        schedule: Schedule | None = None,
        adaptive: bool = False,
        model: nn.Module | None = None,
        perturbation: str = "global",
        process_group: Any | None = None,
        share: float = 1.0,
        **base_arguments: Any,
    ) -> None:
        check_arguments(params, base_optimizer, SAM, base_arguments)
        base = base_optimizer(params, **base_arguments)
        check_base(base)
        check_options(
            rho, model, adaptive, {"mask": (mask, Mask), "ascent": (ascent, Ascent), "schedule": (schedule, Schedule)}
        )
        main = GradientAscent() if ascent is None else ascent
        schedule = EveryStep() if schedule is None else schedule
        ascents = schedule.ascents(main)
        check_one_pass(mask, ascents)
        mask = DenseMask() if mask is None else mask
        scope = mask.scope
        self._replicas = Replicas((scope.model, model), perturbation, process_group)
        check_share(share, scope.cut, ascents, self._replicas)
        self._share = float(share)
        self._passes = passes_for(model, scope.model, scope.cut, self._replicas)
        self._perturber = Perturber(mask, ascents, self._passes, adaptive, self._replicas)
        self._perturber.check(base)
        self.steps = 0  # taken so far
        self._phase, self._repeats = Phase.IDLE, False  # where in a step; whether the pass at w + eps repeats one at w
        self._coming = Coming(schedule, main, ascents)
        self._used_gradients, self._closure_check = UsedGradients(), ClosureCheck()
        self._reloads = 0  # how often what a step reads was replaced: a captured graph goes on reading the old
        self._wrap(base, rho)

    @classmethod
    def wrap(
        cls,
        base_optimizer: Optimizer,
        rho: float | Tensor = 0.1,
        mask: Mask | None = None,
        ascent: Ascent | None = None,
        schedule: Schedule | None = None,
        adaptive: bool = False,
        model: nn.Module | None = None,
        perturbation: str = "global",
        process_group: Any | None = None,
        share: float = 1.0,
    ) -> Self:
        """Build around an optimizer that exists already; a group that carries `rho` keeps it."""
        self = cls.__new__(cls)
        policies = mask, ascent, schedule, adaptive, model, perturbation, process_group, share
        SAM.__init__(self, (), lambda _: base_optimizer, rho, *policies)
        return self

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], T] | Callable[[Rows], T]) -> T: ...

    @eager
    @torch.no_grad()
    def step(self, closure: Callable[..., Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: Clears the gradients, computes the loss and its gradient and returns the loss. It is called twice,
                at w and at w + eps, also if rho or the mask is zero; once or twice more where replay proves a new path;
                once in a base step or a step of one pass. None: take the base step that ends the two-step use, or one
                of the schedule. With `share` below 1 it takes the rows that a call is for, and is called a third time,
                for the rest of the batch at w.

        Returns:
            What the first call of the closure returned: the loss at w, or, in a step of one pass, at w + eps.
        """
        ascent = self._coming.ascent(self.steps)
        if closure is None:
            return None if self._phase is Phase.IDLE and self._is_a_trial() else self._end_pass(ascent)
        self._phase.refuse_inside_step("step(closure)")
        of_rows = None
        if self._share < 1:
            check_takes_rows(closure)
            of_rows, closure = closure, partial(closure, WHOLE)
        with torch.enable_grad():
            if ascent is None:
                loss = self._base_pass(closure)
            elif ascent.passes == 1:
                loss = self._one_pass(closure, ascent)
            elif of_rows is not None:
                loss = self._passes_of_share(of_rows, ascent)
            else:
                loss = self._two_passes(closure, ascent)
        self._base_step()
        return loss

    def _passes_of_share(self, closure: Callable[[Rows], Any], ascent: Ascent) -> Any:
        """Take both passes on the share, and one at w on the rest of the batch; leave their weighted sum in `.grad`."""
        self._replicas.check_uneven("a share of the batch")
        share, rest = split(self._share)
        loss = self._two_passes(on_rows(closure, share), ascent, share)
        params = self._params()
        if fraction(share) < 1:
            of_share = [p.grad for p in params]
            for p in params:
                p.grad = None
            with self._replicas.unsynchronised():
                of_rest = self._pass_at_w(on_rows(closure, rest, like=share), params)
            mix(params, of_share, *weights(share, params))
            loss = mean_loss(loss, of_rest, *weights(share))
        self._replicas.average_gradients(params)
        return loss

    def _two_passes(self, closure: Closure, ascent: Ascent, share: Rows | None = None) -> Any:
        self._start()
        params, call, perturber = self._params(), self._closure_check.call, self._perturber
        self._phase = Phase.FIRST_PASS
        try:
            loss = self._passes.first(partial(call, closure, params, self._used_gradients))
            self._phase = Phase.IDLE
            around = nullcontext() if share is None else self._replicas.unsynchronised()
            scale = fraction(share) if share is not None and share.accumulates else None
            with self._perturbed(ascent, repeats=True, scale=scale), around:
                self._passes.second(partial(call, closure, params), params, perturber.saved, perturber.radius)
        finally:
            self._phase = Phase.IDLE if self._phase is Phase.FIRST_PASS else self._phase
            self._passes.forget()
        return loss

    def _one_pass(self, closure: Closure, ascent: Ascent) -> Any:
        self._start()
        with self._perturbed(ascent, repeats=False):
            self._phase = Phase.ONLY_PASS
            return self._closure_check.call(closure, self._params(), self._used_gradients)

    def _base_pass(self, closure: Closure) -> Any:
        params, _ = self._params_and_rhos()
        self._perturber.stay(params)
        loss = self._pass_at_w(closure, params)
        check_any_gradient(p.grad for p in params)  # also where a base step could do without: later steps cannot
        return loss

    def _pass_at_w(self, closure: Closure, params: list[Tensor]) -> Any:
        self._phase = Phase.ONLY_PASS
        try:
            return self._closure_check.call(closure, params, self._used_gradients)
        finally:
            self._phase = Phase.IDLE
            self._passes.drop_copies()

    def _end_pass(self, ascent: Ascent | None) -> None:
        """Go back to w and take the base step; refuse one that the coming step does not allow."""
        if self._phase is Phase.IDLE and ascent is None:
            self._coming.warn_without_closure()
            self._ascend(None, repeats=False)
        self._phase.refuse_to_end(ascent)
        self._leave(Phase.READY)
        self._base_step()

    @eager
    def first_step(self, zero_grad: bool = False, scale: float | Tensor | None = None) -> None:
        """Go from w to w + eps, by the gradients now in `.grad`. In a base step w stays.

        Args:
            zero_grad: Clear the gradients afterwards.
            scale: What the loss was multiplied with, as by a GradScaler. An ascent that remembers gradients needs it;
                the others do not.
        """
        check_without_closure(self._share)
        self._ascend(self._coming.ascent(self.steps), scale=scale)
        if zero_grad:
            try:
                self.zero_grad()
            except BaseException:
                self.restore()
                raise

    @eager
    def second_step(self, zero_grad: bool = False) -> None:
        """Go back to w, bit for bit, and take the base step with the gradients now in `.grad`.

        Args:
            zero_grad: Clear the gradients afterwards.
        """
        self._phase.refuse_second_step()
        self.step()
        if zero_grad:
            self.zero_grad()

    @eager
    @contextmanager
    def perturbed(self, scale: float | Tensor | None = None) -> Iterator[None]:
        """Be at w + eps inside the `with` block, and at w, bit for bit, after it.

        eps comes from the gradients now in `.grad`. An ascent that takes one pass needs none: put the block around the
        only backward pass. In a base step w stays. If the block ends without an exception, `step()` without closure
        then takes the base step.

        Args:
            scale: See :meth:`first_step`.
        """
        check_without_closure(self._share)
        with self._perturbed(self._coming.ascent(self.steps), scale=scale):
            yield

    @contextmanager
    def _perturbed(self, ascent: Ascent | None, **options: Any) -> Iterator[None]:
        self._ascend(ascent, **options)
        try:
            yield
        except BaseException:
            self.restore()
            raise
        self._leave(Phase.READY)

    def restore(self) -> None:
        """Give up a step that `first_step` began: go back to w, bit for bit. Does nothing between steps."""
        self._leave(Phase.IDLE)

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Between two steps, the next step starts here, whatever was pending."""
        if self._phase is Phase.IDLE or self._phase is Phase.READY:
            self._start()
        self._closure_check.cleared = True
        super().zero_grad(set_to_none)
        if self._phase is Phase.IDLE:
            self._used_gradients.note(self._params())  # zeros are no gradients of a first pass

    @property
    def needs_second_pass(self) -> bool:
        """Whether the coming step needs a second gradient, at w + eps."""
        self._coming.user_asks = True
        return (ascent := self._coming.ascent(self.steps)) is not None and ascent.passes == 2

    def masks(self) -> list[Tensor]:
        """Return which weights the latest step perturbed: one bool tensor for each parameter, in the groups' order.

        All are False after a base step. That of a DTensor is a DTensor.
        """
        return self._perturber.masks(self._params())

    def _start(self) -> None:
        self._phase = Phase.IDLE
        self._passes.start()

    @eager  # here and in _leave(): torch.compile traces what a context of perturbed() runs, but not its decorator
    @torch.no_grad()
    def _ascend(
        self, ascent: Ascent | None, *, repeats: bool | None = None, scale: float | Tensor | None = None
    ) -> None:
        """Go from w to w + eps. The pass that follows may repeat one at w: its random numbers, without moving buffers.

        By default it does if the ascent takes two passes, or if there is a gradient that no base step has used.
        """
        self._phase.refuse_inside_step("first_step() or perturbed()")
        params, rhos = self._params_and_rhos()
        if repeats is None:
            if ascent is None:
                self._passes.base_step_without_closure(params)
            repeats = (ascent is not None and ascent.passes == 2) or self._used_gradients.any_new(params)
            self._closure_check.begin_two_steps(params if repeats and self._replicas.ddp is None else [])
        self._phase, self._repeats = Phase.PERTURBED, False  # now: zero_grad() in a mask must not start a step
        try:
            self._perturber.perturb(ascent, params, rhos, self.base_optimizer, step=self.steps, scale=scale)
            self._repeats = repeats
            self._passes.drop_copies()
            if repeats:
                self._passes.begin_second()
        except BaseException:
            self.restore()
            raise

    @eager
    @torch.no_grad()
    def _leave(self, phase: Phase) -> None:
        """Go back from w + eps to w, if that is where the weights are."""
        if self._phase not in (Phase.PERTURBED, Phase.ONLY_PASS):
            return
        try:
            if self._repeats:  # first: a buffer that shares memory with weights was kept at w + eps
                self._passes.end_second(complete=phase is Phase.READY)
        finally:
            self._perturber.restore()
            self._phase = phase
            self._passes.drop_copies()
        self._closure_check.end_two_steps(self._params, taken=phase is Phase.READY)

    def _base_step(self) -> None:
        self._perturber.commit()
        self.base_optimizer.step()
        self.steps += 1
        self._start()
        self._used_gradients.note(self._params())

    def _check_groups(self) -> None:
        self._phase.refuse_inside_step("add_param_group")
        check_groups(self.base_optimizer)
        self._perturber.check(self.base_optimizer)

    def _extend(self, count: int) -> None:
        self._perturber.extend(count)
        self._reloads += 1

    def _own_state(self) -> dict[str, Any]:
        self._phase.refuse_inside_step("state_dict()")
        return {"settings": self._settings(), **self._perturber.state(self._params(), self.steps)}

    def _check_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return sparsam's part of a state. The mask's seed is taken from it, as is rho; other settings must agree."""
        self._phase.refuse_inside_step("load_state_dict()")
        return check_state(state_dict, self._settings(), self._params(), len(self._perturber.ascents))

    def _load_own_state(self, own: dict[str, Any]) -> None:
        self._perturber.load(own, self._params())
        self.steps, self._reloads = own["steps"], self._reloads + 1
        self._start()

    def _settings(self) -> dict[str, Any]:
        base = type(self.base_optimizer).__name__
        share = {} if self._share == 1 else {"share": self._share}
        return {"base": base, **self._policy_settings(), **self._replicas.settings(), **share}

    def __repr__(self) -> str:
        adaptive = ", adaptive" if self.adaptive else ""
        share = "" if self._share == 1 else f", {self._share:g} of the batch"
        base = f"base: {type(self.base_optimizer).__name__}{adaptive}{share}, {self.steps:,} steps taken"
        return f"{super().__repr__()}\n{base}\n{self._policy_lines()}"

    def __getstate__(self) -> dict[str, Any]:
        self._phase.refuse_inside_step("copying or pickling")
        return super().__getstate__()
