r"""Thrifty SAM: from a budget to a cut, a fraction of the steps and the policies of a SAM.

Most of a training takes plain steps of the base optimizer. In the last n of T steps F-SAM perturbs what follows a cut,
and nothing before the cut is computed twice. If a step from the cut costs c base steps, and its first two prove the cut
for v more (:mod:`sparsam.replay.proof`), a step of the training costs on average

.. math::  1 + \frac{n\,(c - 1) + v}{T}

so a budget B buys :math:`n = \lfloor ((B - 1)\,T - v) / (c - 1) \rfloor` steps, the fraction q = n / T. An earlier cut
perturbs more of the network, but in fewer steps. Let s be how much: the share of the weights that follow the cut, or
c - 1 if that is less. Thrifty takes the cut with the largest

.. math::  \big(1 - e^{-s / 0.3}\big) \big(1 - e^{-q / 0.2}\big)

by which the best cut of three searches comes first, or is too close to tell (docs/thrifty.md). More of the network
brings less and less, and so do more steps. Cuts that less than 5 % of the weights follow are left out, if there are
others. The costs are counted (:mod:`sparsam.replay.counting`), so the choice depends on nothing but the model, the
shape of its batch, the budget and the number of steps. With a measured `step_cost` in place of c, n follows from that.

Loops without a closure, and models without a cut, compute both passes in full. With `whole_passes=True` the budget buys
fewer steps, which perturb all weights.
"""

from __future__ import annotations

import difflib
import logging
import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from sparsam.ascents import FriendlyAscent
from sparsam.checks import check_module, check_number, check_rho, check_whole
from sparsam.distributed.replicas import find_ddp
from sparsam.distributed.shards import any_dtensor, fsdp_modules
from sparsam.errors import UserTypeError, UserValueError, warn
from sparsam.masks import SuffixMask
from sparsam.replay import CountedCut, Counts, ReplayedPasses, count_costs
from sparsam.sam import SAM
from sparsam.sam.checks import check_base, check_base_class, check_names, check_params, option_names
from sparsam.schedules import LastSteps

BUDGET = 1.15
RHO = 0.2
SHARE_SCALE = 0.3  # perturbing the share s of the network brings 1 - exp(-s / SHARE_SCALE) of the gain, ...
STEPS_SCALE = 0.2  # ... in the last fraction q of the steps 1 - exp(-q / STEPS_SCALE) of that
FEW_WEIGHTS = 0.05  # a fraction of the weights: perturbing fewer gives a warning
CHOSEN = ("mask", "ascent", "schedule")  # arguments of SAM that are not given here
PASSED_ON = ("adaptive", "perturbation", "process_group")  # to SAM
FRIENDLY = 13  # elements that perturbing reads and writes for each weight, F-SAM's mean included
ROUNDING = 1e-6  # of a base step

_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """What a budget was spent on.

    >>> print(Choice("layer2", 0.987, fraction=0.2, total_steps=31_200, cost=1.15, step_cost=1.75))
    from layer2 on, 98.7 % of the weights, in the last 20 % of 31,200 steps: 1.15 base steps
    >>> print(Choice(None, 1.0, fraction=0.14, total_steps=1000, cost=1.15, step_cost=2.1, measured=True))
    all weights in whole passes, in the last 14 % of 1,000 steps: 1.15 base steps, by step_cost=2.1
    """

    cut: str | None
    """The name of the module whose input is the cut. None with `whole_passes=True`: all weights are perturbed."""
    weights: float
    """The fraction of the trained weights that are perturbed: those that follow the cut."""
    fraction: float
    """The fraction of the steps, the last ones, that are sharpness-aware."""
    total_steps: int
    """The number of steps of the training."""
    cost: float
    """The mean cost of a step over the training, in base steps. Proofs of the cut are part of it."""
    step_cost: float
    """What a sharpness-aware step costs, in base steps."""
    measured: bool = False
    """Whether `step_cost` was given. Otherwise it is counted."""

    def __str__(self) -> str:
        part = f"from {self.cut} on, {100 * self.weights:.3g} % of the weights"
        if self.cut is None:
            part = "all weights in whole passes"
        source = f", by step_cost={self.step_cost:g}" if self.measured else ""
        return (
            f"{part}, in the last {100 * self.fraction:.3g} % of {self.total_steps:,} steps: {self.cost:.2f} base "
            f"steps{source}"
        )


class ThriftySAM(SAM):
    """What :func:`thrifty` returns: a SAM that knows what its budget was spent on."""

    choice: Choice

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nchoice: {self.choice}"


def thrifty(
    model: nn.Module,
    base_optimizer: Callable[..., Optimizer] | Optimizer,
    example_inputs: Any,
    *,
    total_steps: int,
    budget: float = BUDGET,
    rho: float | Tensor = RHO,
    params: Any = None,
    cut: str | None = None,
    fraction: float | None = None,
    step_cost: float | None = None,
    whole_passes: bool = False,
    **base_arguments: Any,
) -> ThriftySAM:
    r"""Build the SAM that a budget allows: plain steps first, then F-SAM behind a cut.

    It has a concrete `SuffixMask`, `FriendlyAscent` and `LastSteps`: the same model, batch and budget give the same
    ones on every machine. With `whole_passes=True` it has no mask. What was chosen is in `choice`, in the repr, and in
    a logging message. To choose, the model runs twice on the example. Its buffers and gradients stay what they were,
    and so do random numbers.

    Args:
        model: The network; in distributed training the DistributedDataParallel around it.
        base_optimizer: The class of the optimizer that takes the step, such as `torch.optim.SGD`, or an optimizer that
            exists. Groups of an optimizer that exists keep a `rho` of their own.
        example_inputs: A batch as in training: `model(example_inputs)` is called (`model(*example_inputs)` for a tuple
            or a list, `model(**example_inputs)` for a dict).
        total_steps: The number of optimizer steps of the training.
        budget: What the training may cost, relative to the base optimizer alone; above 1.
        rho: The radius of the perturbation. Search it: the best was up to eight times SAM's (docs/thrifty.md).
        params: Parameters or parameter groups; None: all of the model's, or those of an optimizer that exists. Weights
            that are not among them, or require no gradient, do not count in the choice.
        cut: The name of the module from which on weights are perturbed; None: chosen, and not after an output that the
            model does not go on with, such as that of an auxiliary head: the loss may use it.
        fraction: The fraction of the steps that are sharpness-aware, the last ones; None: as many as the budget buys.
            If cut and fraction are given, the budget does not matter.
        step_cost: What a sharpness-aware step costs on your machine, in base steps, as `measure_cost` prints it; None:
            what is counted. The number of steps follows from it. The cut is chosen by the count in either case.
        whole_passes: Whether both passes are computed in full and all weights are perturbed, in as many of the last
            steps as the budget buys. For loops that step without a closure (`first_step`, `perturbed`, a GradScaler),
            for closures that accumulate gradients, and for models that are sharded or have no cut.
        **base_arguments: Passed on to the class of the base optimizer: `lr`, `momentum`, ... `adaptive`,
            `perturbation` and `process_group` go to SAM.

    >>> import torch
    >>> from sparsam.models import build_model
    >>> model, x = build_model("resnet-small", 10), torch.ones(64, 3, 16, 16)
    >>> opt = thrifty(model, torch.optim.SGD, x, total_steps=1000, lr=0.05, momentum=0.9)
    >>> print(opt.choice)
    from layer2 on, 93.4 % of the weights, in the last 23.1 % of 1,000 steps: 1.15 base steps
    >>> adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> print(thrifty(model, adam, x, total_steps=1000, step_cost=1.8).choice)
    from layer2 on, 93.4 % of the weights, in the last 18.4 % of 1,000 steps: 1.15 base steps, by step_cost=1.8
    >>> print(thrifty(model, adam, x, total_steps=1000, whole_passes=True).choice)
    all weights in whole passes, in the last 14.3 % of 1,000 steps: 1.15 base steps
    """
    check_module("model", model, optional=False)
    check_rho(rho)
    for name in CHOSEN:
        if name in base_arguments:
            raise UserTypeError(f"{name} must not be given: thrifty chooses it. SAM takes one of your own")
    if "share" in base_arguments:
        raise UserTypeError("share must not be given: thrifty saves by a cut and by late steps. SAM takes a share")
    if not isinstance(whole_passes, bool):
        raise UserTypeError(f"whole_passes must be True or False, but is {whole_passes!r}")
    to_sam = {name: base_arguments.pop(name) for name in PASSED_ON if name in base_arguments}
    base = _base(model, base_optimizer, params, base_arguments)
    ddp = find_ddp(model)
    if not whole_passes:
        _check_replayable(model, ddp)
    if not model.training:
        warn(
            "thrifty counts the model as it is, in eval mode; if it is trained in train mode, call model.train() first"
        )
    trained = [p for group in base.param_groups for p in group["params"]]
    counts = count_costs(model, example_inputs, trained, cuts=not whole_passes)
    choice = choose(
        counts,
        total_steps=total_steps,
        budget=budget,
        cut=cut,
        fraction=fraction,
        step_cost=step_cost,
        whole_passes=whole_passes,
        distributed=ddp is not None,
    )
    opt = ThriftySAM.wrap(
        base,
        rho=rho,
        mask=SuffixMask(model, choice.cut) if choice.cut is not None else None,
        ascent=FriendlyAscent(),
        schedule=LastSteps(choice.fraction, total_steps),
        model=model,
        **to_sam,
    )
    opt.choice = choice
    if choice.cut is not None:
        assert isinstance(opt._passes, ReplayedPasses)  # its mask has a cut
        opt._passes.known = counts.lies_before(choice.cut)
        opt._passes.replay.consequence = _in_full(counts, choice)
    _log.info("thrifty: %s", choice)
    if choice.weights < FEW_WEIGHTS:
        warn(f"thrifty perturbs few weights: {choice}; a larger budget, a smaller fraction, or cut=, perturbs more")
    return opt


def _base(model: nn.Module, given: Any, params: Any, arguments: dict[str, Any]) -> Optimizer:
    """Return the base optimizer: the one that was given, or one of the class that was given."""
    own = [*option_names(thrifty), *PASSED_ON]
    if isinstance(given, Optimizer):
        base, name = given, type(given).__name__
        if arguments:
            raise UserTypeError(
                f"{min(arguments)!r} must not be given with an optimizer that exists: the {name} has its settings; "
                f"thrifty has {', '.join(own)}"
            )
        if params is not None:
            raise UserTypeError(f"params must be None with an optimizer that exists: the {name} has its parameters")
    else:
        check_base_class("base_optimizer", given)
        check_names("thrifty", own, given, sorted(arguments))
        check_params(params)
        base = given(model.parameters() if params is None else params, **arguments)
    check_base(base)
    return base


def _check_replayable(model: nn.Module, ddp: nn.parallel.DistributedDataParallel | None) -> None:
    """Refuse models of which it is known that both passes of a step run in full."""
    if any_dtensor(model.parameters()) or fsdp_modules(model.modules()):
        what = "sharded (fully_shard, tensor parallelism)"
    elif ddp is not None and ddp.static_graph:
        what = "a DistributedDataParallel with static_graph=True"
    else:
        return
    raise UserValueError(
        f"model must not be {what}, because both passes of a step then run in full: give whole_passes=True, which "
        f"perturbs all weights, in fewer steps"
    )


class _Price(NamedTuple):
    """What sharpness-aware steps cost, in base steps."""

    step: float
    """The cost of each."""
    proofs: tuple[float, ...] = ()
    """The extra costs of the first ones, which prove the cut."""

    def extra(self, steps: int) -> float:
        """Return what some sharpness-aware steps cost more than base steps."""
        return steps * (self.step - 1) + sum(self.proofs[:steps])

    def affordable(self, budget: float, total: int) -> int:
        """Return how many steps of a training can be sharpness-aware."""
        return bisect_right(range(1, total + 1), (budget - 1) * total + ROUNDING, key=self.extra)


def choose(
    counts: Counts,
    *,
    total_steps: int,
    budget: float = BUDGET,
    cut: str | None = None,
    fraction: float | None = None,
    step_cost: float | None = None,
    whole_passes: bool = False,
    distributed: bool = False,
    perturbing: int = FRIENDLY,
) -> Choice:
    """Return what to spend a budget on. See :func:`thrifty` for the arguments.

    `perturbing` is what perturbing reads and writes for each weight, by default along F-SAM's direction. A
    `distributed` model, in a DistributedDataParallel, takes more passes to prove a cut.
    """
    check_whole("total_steps", total_steps)
    check_budget(budget)
    if (median := getattr(step_cost, "median", None)) is not None:
        raise UserTypeError(
            f"step_cost must be a number, so that each run of the script takes the same steps, but is what "
            f"measure_cost has found: give step_cost={max(1.0, median):.2f}"
        )
    if step_cost is not None:
        check_number("step_cost", step_cost, "a number >= 1, in base steps", lambda value: 1 <= value < math.inf)
    if whole_passes and cut is not None:
        raise UserValueError(f"cut must be None with whole_passes=True, which perturbs all weights, but is {cut!r}")
    total = int(total_steps)
    wanted = 1 if fraction is None else total - LastSteps(fraction, total).first
    named = whole_passes or cut is not None
    if whole_passes:
        prices = {counts.everything: _Price(counts.cost(counts.everything, perturbing))}
    else:
        prices = {
            c: _Price(counts.cost(c, perturbing), counts.proofs(c, distributed=distributed))
            for c in _allowed(counts, cut, budget)
        }

    # Counted costs choose the cut. A measured one says how many steps from it the budget buys.
    chosen = _best(prices, budget, total) if fraction is None else _earliest(prices, wanted, budget, total)
    counted = prices[chosen]
    price = counted if step_cost is None else counted._replace(step=float(step_cost))
    most = price.affordable(budget, total)
    if most < wanted and (fraction is None or not named):
        buys = f"{most:,} of them"
        if not most:
            enough = math.ceil(price.extra(1) / (budget - 1) - ROUNDING)
            buys = f"one of {enough:,} (total_steps counts optimizer steps, not epochs)"
        raise UserValueError(
            f"budget must be at least {_rounded_up(1 + price.extra(wanted) / total)} to buy {wanted:,} of {total:,} "
            f"steps {_where(chosen)}, but is {budget:g}; it buys {buys}"
        )
    if fraction is None and not named and budget > 2 * counted.step:
        warn(
            f"budget is {budget:g}, far more than {counted.step:.2f}, what a training costs if every step perturbs "
            f"{_where(chosen)}; it is a factor, such as {BUDGET}"
        )
    count = most if fraction is None else wanted
    cost, measured = 1 + price.extra(count) / total, step_cost is not None
    return Choice(chosen.name or None, chosen.weights, count / total, total, cost, price.step, measured)


def _allowed(counts: Counts, cut: str | None, budget: float) -> list[CountedCut]:
    """Return the cuts to choose from, the earliest first."""
    if not counts.cuts:
        raise UserValueError(_without_cut(counts, budget))
    if cut is None:
        # Of cuts with the same weights after them the last costs least.
        allowed = [*{c.weights: c for c in counts.cuts if c.weights and c.sure}.values()]
    else:
        allowed = [c for c in counts.cuts if c.name == cut]
        if not allowed:
            raise UserValueError(_no_such_cut([c.name for c in counts.cuts], cut))
    if not any(c.weights for c in allowed):
        where = "after a cut" if cut is None else f"from {cut!r} on"
        raise UserValueError(
            f"params must hold weights of the model {where}, where they are perturbed, but hold none that require a "
            f"gradient"
        )
    return allowed


def _best(prices: dict[CountedCut, _Price], budget: float, total: int) -> CountedCut:
    """Return the cut from which the steps that a budget buys bring most; if it buys none, the cheapest cut."""

    def gain(cut: CountedCut) -> tuple[float, float]:
        step, steps = prices[cut].step, prices[cut].affordable(budget, total)
        share = min(cut.weights, step - 1)
        return math.expm1(-share / SHARE_SCALE) * math.expm1(-steps / total / STEPS_SCALE), -step

    return max([c for c in prices if c.weights >= FEW_WEIGHTS] or prices, key=gain)


def _earliest(prices: dict[CountedCut, _Price], steps: int, budget: float, total: int) -> CountedCut:
    """Return the earliest cut from which a budget buys some steps; if there is none, the cheapest cut."""
    enough = (c for c, price in prices.items() if price.affordable(budget, total) >= steps)
    return next(enough, min(prices, key=lambda c: prices[c].step))


def _where(cut: CountedCut) -> str:
    return f"from {cut.name!r} on" if cut.name else "in whole passes"


def check_budget(budget: object) -> None:
    """Refuse a budget that is not above the cost of the base optimizer alone."""
    allowed = "a number above 1, what the base optimizer alone costs"
    check_number("budget", budget, allowed, lambda value: 1 < value < math.inf)


def bought(budget: float, cost: float) -> float:
    """Return the fraction of the steps that a budget buys in a long training, if each costs so many base steps.

    >>> bought(1.15, cost=1.6), bought(1.15, cost=1.0)
    (0.25, 1.0)
    """
    return 1.0 if cost <= budget else round((budget - 1) / (cost - 1), 12)


def _no_such_cut(names: list[str], cut: object) -> str:
    close = difflib.get_close_matches(str(cut), names, 3) or names[:8]
    given = repr(cut) if isinstance(cut, str) else f"a {type(cut).__name__} and no name"
    return (
        f"cut must be where the model can be cut, such as {', '.join(map(repr, close))}, but is {given}; "
        f"find_cuts(model, closure) and `sparsam cuts` list all"
    )


def _without_cut(counts: Counts, budget: float) -> str:
    fraction = bought(budget, counts.cost(counts.everything, FRIENDLY))
    return (
        f"model has no cut, so no part of a sharpness-aware step could be left out. If it is compiled as a whole, "
        f"compile its blocks instead: `for block in model.blocks: block.compile()`. Otherwise give whole_passes=True, "
        f"which perturbs all weights: the budget of {budget:g} buys the last {100 * fraction:.3g} % of the steps"
    )


def _in_full(counts: Counts, choice: Choice) -> str:
    """Say what the rest of a run costs if its second passes do not start at the cut, and how to keep the budget."""
    skipped = next(counts.skipped(c) for c in counts.cuts if c.name == choice.cut)
    whole = _Price(choice.step_cost + skipped)
    fraction = math.floor(1e4 * whole.affordable(choice.cost, choice.total_steps) / choice.total_steps) / 1e4
    other = f", or fraction={fraction:g}" if fraction else ""
    source = "step_cost says" if choice.measured else "thrifty counted"
    return (
        f"Each sharpness-aware step of the rest of the run then costs {whole.step:.2f} base steps, where {source} "
        f"{choice.step_cost:.2f}. To keep the training at {choice.cost:.2f} base steps, give thrifty "
        f"whole_passes=True{other}"
    )


def _rounded_up(cost: float) -> str:
    return f"{math.ceil(1e4 * cost - 1e-6) / 1e4:g}"
