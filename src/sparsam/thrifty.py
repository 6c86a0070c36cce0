r"""Thrifty SAM: from a budget to a cut, a fraction of the steps and the policies of a SAM.

Most of a training takes plain steps of the base optimizer. In the last fraction q of the steps F-SAM perturbs what
follows a cut, and nothing before the cut is computed twice. If a step from the cut costs c base steps, all cost

.. math::  1 + q\,(c - 1)

so a budget B buys the fraction q = (B - 1) / (c - 1). An earlier cut perturbs more of the network, but in fewer steps.
Let s be how much: the share of the weights that follow the cut, or c - 1 if that is less. Thrifty takes the cut with
the largest

.. math::  \big(1 - e^{-s / 0.3}\big) \big(1 - e^{-q / 0.2}\big)

by which the best cut of three searches comes first, or is too close to tell (docs/thrifty.md). More of the network
brings less and less, and so do more steps. Cuts that less than 5 % of the weights follow are left out, if there are
others. The costs are counted (:mod:`sparsam.replay.counting`), so the choice depends on nothing but the model, the
shape of its batch, the budget and the number of steps.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from sparsam.ascents import FriendlyAscent
from sparsam.checks import check_module, check_number, check_rho, check_whole
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

_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """What a budget was spent on.

    >>> print(Choice("layer2", 0.987, fraction=0.2, total_steps=31_200, cost=1.15))
    from layer2 on, 98.7 % of the weights, in the last 20 % of 31,200 steps: 1.15 base steps
    """

    cut: str
    """The name of the module whose input is the cut."""
    weights: float
    """The fraction of the trained weights that follow the cut."""
    fraction: float
    """The fraction of the steps, the last ones, that are sharpness-aware."""
    total_steps: int
    """The number of steps of the training."""
    cost: float
    """The mean cost of a step over the training, in base steps."""

    def __str__(self) -> str:
        return (
            f"from {self.cut} on, {100 * self.weights:.3g} % of the weights, in the last {100 * self.fraction:.3g} % "
            f"of {self.total_steps:,} steps: {self.cost:.2f} base steps"
        )


class ThriftySAM(SAM):
    """What :func:`thrifty` returns: a SAM that knows what its budget was spent on."""

    choice: Choice

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nchoice: {self.choice}"


def thrifty(
    model: nn.Module,
    base: Callable[..., Optimizer],
    example_inputs: Any,
    *,
    total_steps: int,
    budget: float = BUDGET,
    rho: float | Tensor = RHO,
    params: Any = None,
    cut: str | None = None,
    fraction: float | None = None,
    **base_arguments: Any,
) -> ThriftySAM:
    r"""Build the SAM that a budget allows: plain steps first, then F-SAM behind a cut.

    It has a concrete `SuffixMask`, `FriendlyAscent` and `LastSteps`: the same model, batch and budget give the same
    ones on every machine. What was chosen is in `choice`, in the repr, and in a logging message. It is made once, here:
    the model runs twice on the example, and nothing of it moves.

    Args:
        model: The network; in distributed training the DistributedDataParallel around it.
        base: The class of the base optimizer, such as `torch.optim.SGD`.
        example_inputs: A batch as in training: `model(example_inputs)` is called (`model(*example_inputs)` for a tuple
            or a list, `model(**example_inputs)` for a dict).
        total_steps: The number of optimizer steps of the training.
        budget: What the training may cost, relative to that of the base optimizer alone; above 1.
        rho: The radius of the perturbation. Search it: the best was up to eight times SAM's (docs/thrifty.md).
        params: Parameters or parameter groups; None: all of the model's. Weights that are not among them, or require no
            gradient, do not count in the choice.
        cut: The name of the module from which on weights are perturbed; None: chosen, and not after an output that the
            model does not go on with, such as that of an auxiliary head: the loss may use it.
        fraction: Of the steps that are sharpness-aware; None: as much as the budget allows. Where both are given, the
            budget does not matter.
        **base_arguments: Passed on to the base optimizer: `lr`, `momentum`, ... `adaptive`, `perturbation` and
            `process_group` go to SAM.

    >>> import torch
    >>> from sparsam.models import build_model
    >>> model, x = build_model("resnet-small", 10), torch.ones(64, 3, 16, 16)
    >>> opt = thrifty(model, torch.optim.SGD, x, total_steps=1000, lr=0.05, momentum=0.9)
    >>> print(opt.choice)
    from layer2 on, 93.4 % of the weights, in the last 23.4 % of 1,000 steps: 1.15 base steps
    """
    check_module("model", model, optional=False)
    check_base_class("base", base)
    check_rho(rho)
    for name in CHOSEN:
        if name in base_arguments:
            raise UserTypeError(f"{name} must not be given: thrifty chooses it. SAM takes one of your own")
    to_base = base_arguments.keys() - set(PASSED_ON)
    check_names("thrifty", [*option_names(thrifty), *PASSED_ON], base, sorted(to_base))
    if any_dtensor(model.parameters()) or fsdp_modules(model.modules()):
        raise UserValueError(
            "model must not be sharded (fully_shard, tensor parallelism): both passes of its steps run in full, and "
            "the budget would not be kept. Use SAM with LastSteps, of which a step costs two"
        )
    check_params(params)
    if not model.training:
        warn(
            "thrifty counts the model as it is, in eval mode; if it is trained in train mode, call model.train() first"
        )
    base_optimizer = base(
        model.parameters() if params is None else params, **{name: base_arguments[name] for name in to_base}
    )
    check_base(base_optimizer)
    trained = [p for group in base_optimizer.param_groups for p in group["params"]]
    counts = count_costs(model, example_inputs, trained)
    choice = choose(counts, total_steps=total_steps, budget=budget, cut=cut, fraction=fraction)
    opt = ThriftySAM.wrap(
        base_optimizer,
        rho=rho,
        mask=SuffixMask(model, choice.cut),
        ascent=FriendlyAscent(),
        schedule=LastSteps(choice.fraction, total_steps),
        **{name: base_arguments[name] for name in PASSED_ON if name in base_arguments},
    )
    opt.choice = choice
    assert isinstance(opt._passes, ReplayedPasses)  # its mask has a cut
    opt._passes.known = counts.lies_before(choice.cut)
    _log.info("thrifty: %s", choice)
    if choice.weights < FEW_WEIGHTS:
        warn(f"thrifty perturbs few weights: {choice}; a larger budget, a smaller fraction, or cut=, perturbs more")
    return opt


def choose(
    counts: Counts,
    *,
    total_steps: int,
    budget: float = BUDGET,
    cut: str | None = None,
    fraction: float | None = None,
    perturbing: int = FRIENDLY,
) -> Choice:
    """Return what to spend a budget on. See :func:`thrifty` for the arguments.

    `perturbing` is what perturbing reads and writes for each weight, by default along F-SAM's direction.
    """
    check_whole("total_steps", total_steps)
    check_budget(budget)
    if fraction is not None:
        check_number("fraction", fraction, "a number in (0, 1]", lambda value: 0 < value <= 1)
    costs = counts.costs(perturbing)
    if not costs:
        raise UserValueError(_without_cut(counts, budget))
    names = [c.name for c in costs]
    if cut is not None and cut not in names:
        close = difflib.get_close_matches(str(cut), names, 3) or names[:8]
        given = repr(cut) if isinstance(cut, str) else f"a {type(cut).__name__} and no name"
        raise UserValueError(
            f"cut must be where the model can be cut, such as {', '.join(map(repr, close))}, but is {given}; "
            f"find_cuts(model, closure) and `sparsam cuts` list all"
        )
    # Of cuts with the same weights after them the last costs least.
    useful = {c.weights: c for c in costs if c.weights and c.sure}.values()
    allowed = {c: cost for c, cost in costs.items() if c.name == cut or (cut is None and c in useful)}
    if not any(c.weights for c in allowed):
        where = "after a cut" if cut is None else f"from {cut!r} on"
        raise UserValueError(
            f"params must hold weights of the model {where}, where they are perturbed, but hold none that require a "
            f"gradient"
        )
    if fraction is None:
        worthy = [c for c in allowed if c.weights >= FEW_WEIGHTS] or [*allowed]
        steps = {c: math.floor(bought(budget, allowed[c]) * total_steps + 1e-6) for c in worthy}
        if not any(steps.values()):
            cheapest = min(worthy, key=lambda c: allowed[c])
            least = 1 + (allowed[cheapest] - 1) / total_steps
            enough = math.ceil((allowed[cheapest] - 1) / (budget - 1) - 1e-6)
            raise UserValueError(
                f"budget must be at least {_rounded_up(least)} to buy one of {total_steps:,} steps from "
                f"{cheapest.name!r} on, but is {budget:g}; it buys one of {enough:,} (total_steps counts optimizer "
                f"steps, not epochs)"
            )
        chosen = max(worthy, key=lambda c: _gain(min(c.weights, allowed[c] - 1), steps[c] / total_steps))
        fraction = steps[chosen] / total_steps
        if cut is None and budget > 2 * allowed[chosen]:
            warn(
                f"budget is {budget:g}, far more than {allowed[chosen]:.2f}, what a training costs if every step "
                f"perturbs from {chosen.name!r} on; it is a factor, such as {BUDGET}"
            )
    else:
        fraction = (total_steps - math.floor((1 - fraction) * total_steps + 1e-6)) / total_steps  # whole steps
        affordable = [c for c, cost in allowed.items() if cut is not None or fraction <= bought(budget, cost)]
        if not affordable:
            cheapest = min(allowed, key=lambda c: allowed[c])
            least = 1 + fraction * (allowed[cheapest] - 1)
            raise UserValueError(
                f"budget must be at least {_rounded_up(least)} for the last {100 * fraction:.3g} % of the steps, even "
                f"from {cheapest.name!r} on, but is {budget:g}"
            )
        chosen = affordable[0]
    cost = 1 + fraction * (allowed[chosen] - 1)
    return Choice(chosen.name, chosen.weights, float(fraction), int(total_steps), cost)


def _gain(share: float, fraction: float) -> float:
    """Return which part of the gain comes from perturbing a share of the network in a fraction of the steps."""
    return math.expm1(-share / SHARE_SCALE) * math.expm1(-fraction / STEPS_SCALE)


def check_budget(budget: object) -> None:
    """Refuse a budget that is not above the cost of the base optimizer alone."""
    allowed = "a number above 1, what the base optimizer alone costs"
    check_number("budget", budget, allowed, lambda value: 1 < value < math.inf)


def bought(budget: float, cost: float) -> float:
    """Return the fraction of the steps that a budget buys, if each costs so many base steps.

    >>> bought(1.15, cost=1.6), bought(1.15, cost=1.0)
    (0.25, 1.0)
    """
    return 1.0 if cost <= budget else round((budget - 1) / (cost - 1), 12)


def _without_cut(counts: Counts, budget: float) -> str:
    fraction = bought(budget, counts.cost(CountedCut("", 1.0, counts.whole), FRIENDLY))
    return (
        f"model has no cut, so no part of a sharpness-aware step could be left out. If it is compiled as a whole, "
        f"compile its blocks instead: `for block in model.blocks: block.compile()`. Otherwise perturb all weights, in "
        f"fewer steps: SAM(model.parameters(), ..., ascent=FriendlyAscent(), schedule=LastSteps({fraction:.2g}, "
        f"total_steps), model=model) costs about {budget:g} base steps"
    )


def _rounded_up(cost: float) -> str:
    return f"{math.ceil(1e4 * cost - 1e-6) / 1e4:g}"
