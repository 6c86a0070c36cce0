"""SSAM-C: the weights behind a cut, so that sparsity saves time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from sparsam.checks import check_choice, check_rho, check_share, check_whole
from sparsam.errors import UserTypeError, UserValueError
from sparsam.masks.base import Mask, Setting, StepKind
from sparsam.replay.modules import bare, get_module
from sparsam.selection import Selection

NORMS = ("perturbed", "whole")
FULL_COST = 2.0  # of a step that perturbs everything, in base steps


class BudgetMask(Mask):
    r"""SSAM-C: perturbs everything behind a cut, and computes nothing before it twice.

    With f the share of the base step that lies behind the cut, and a share q of the steps (`full`) that perturb
    everything, the mean step costs

    .. math::  (1 - q)\,(1 + f) + 2\,q \;\le\; \text{budget}

    base steps, with exactly the gradient of the masked step (:mod:`sparsam.replay.replay`). The earliest cut that fits the
    budget is taken. What a budget buys is measured in the first step, on your machine and your batch, and kept from
    then on, also in the optimizer's state.

    .. math::  \epsilon = \rho\,\frac{g}{\lVert g_{behind}\rVert_2}\odot m

    With `total_steps`, only the last steps perturb by a gradient. The first ones take one pass, along the momentum if
    there is a `momentum_rho`; they cost a base steps, the last ones b, and the budget buys the share

    .. math::  q = \frac{\text{budget} - a}{b - a}

    Args:
        model: The network that is trained; in distributed training the DistributedDataParallel around it.
        budget: What the mean step may cost, in base steps: above 1. Two runs may measure differently.
        cut: The module before which the cut lies, such as "layer4"; None: it is measured, or, with `total_steps`, there
            is none and the last steps perturb everything. Without `total_steps` a named cut leaves the budget no say.
        full: The share of the steps that perturb everything, in [0, 1], evenly spread.
        full_rho: The radius of those steps; None: the groups' rho, as in all others.
        total_steps: How many steps training has, where only the last ones are to perturb by a gradient.
        late_share: The share of those last steps, in (0, 1]; None: as many as the budget buys, measured in the first
            step.
        momentum_rho: Steps of one pass take their gradient at :math:`w - \rho_m v / \lVert v \rVert_2`, with v the
            base optimizer's momentum (Momentum-SAM), which takes no pass of its own; None: at w. All groups are moved,
            whatever their rho.
        norm: What the perturbation is divided by. "perturbed": the norm of the gradient behind the cut. "whole": that
            of the whole gradient, estimated from the ratio of the two in the step before.
        within: A mask that selects among the weights behind the cut; None: all of them are perturbed.
    """

    model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        *,
        budget: float = 1.25,
        cut: str | None = None,
        full: float = 0.0,
        full_rho: float | None = None,
        total_steps: int | None = None,
        late_share: float | None = None,
        momentum_rho: float | None = None,
        norm: str = "perturbed",
        within: Mask | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UserTypeError(
                f"model must be a module, but is a {type(model).__name__}; pass the model, not its parameters"
            )
        if isinstance(model, nn.DataParallel):
            raise UserTypeError(
                "model must not be a DataParallel, whose copies run elsewhere; use DistributedDataParallel"
            )
        check_budget(budget)
        check_share("full", full)
        for name, radius in (("full_rho", full_rho), ("momentum_rho", momentum_rho)):
            if radius is not None:
                check_rho(radius, name)
        if full_rho is not None and not full:
            raise UserValueError("full_rho is the radius of full steps, but full is 0: there are none")
        _check_late(total_steps, late_share, momentum_rho, full)
        check_choice("norm", norm, NORMS)
        if within is not None and (not isinstance(within, Mask) or isinstance(within, BudgetMask)):
            raise UserTypeError(f"within must be a mask of another kind, but is a {type(within).__name__}")
        if cut is not None:
            get_module(bare(model), cut)
        elif total_steps is None and 1 + full > budget:
            raise UserValueError(
                f"budget must be above 1 + full, for full steps cost {FULL_COST:g} base steps, but is {budget} with "
                f"full={full}"
            )
        self.within = within
        super().__init__(within.interval if within else None, within.seed if within else 0)
        self.model, self.budget, self.full, self.norm = model, float(budget), float(full), norm
        self.full_rho = None if full_rho is None else float(full_rho)
        self.momentum_rho = None if momentum_rho is None else float(momentum_rho)
        self.length = self.total_steps = None if total_steps is None else int(total_steps)
        self.named_cut = self.cut = cut
        self.late_share = self.named_share = None if late_share is None else float(late_share)
        self.cost: float | None = None  # of a step that perturbs from the cut, where that was measured, in base steps

    @property
    def seed(self) -> int:
        """The seed of the mask within."""
        return self.within.seed if self.within else self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed
        if self.within:
            self.within.seed = seed

    @property
    def differs_by_rank(self) -> bool:  # type: ignore[override]
        """Whether the mask within does; the cut is rank 0's anyhow."""
        return self.within is not None and self.within.differs_by_rank

    @property
    def measures(self) -> bool:
        """Whether the budget has a say: the cut is measured, or the share of the steps that perturb."""
        return (self.named_cut if self.total_steps is None else self.named_share) is None

    @property
    def unmeasured(self) -> bool:
        """Whether it is still to be measured."""
        return (self.cut if self.total_steps is None else self.late_share) is None

    def settings(self) -> dict[str, Setting]:
        """Return what a resumed run must have in common with the saved one."""
        return {
            **super().settings(),
            "budget": self.budget if self.measures else None,
            "cut": self.named_cut,
            "full": self.full,
            "full_rho": self.full_rho,
            "total_steps": self.total_steps,
            "late_share": self.named_share,
            "momentum_rho": self.momentum_rho,
            "norm": self.norm,
            "within": self.within.settings() if self.within else None,
        }

    def __repr__(self) -> str:
        if not self.measures or self.unmeasured:
            return super().__repr__()
        if self.total_steps is None:
            return f"{super().__repr__()} cut before {self.cut!r}"
        return f"{super().__repr__()} with {100 * self.late_share:g} % of the steps perturbed"  # type: ignore[operator]

    def kind(self, step: int) -> StepKind:
        """Return what a step is: of one pass, cut, or full, as floor(n * full) of the first n steps are."""
        if self.total_steps is not None:
            if step < self.total_steps - _last_steps(self.late_share or 0.0, self.total_steps):
                return StepKind(one_pass=True, momentum_rho=self.momentum_rho)
        elif math.floor((step + 1) * self.full) > math.floor(step * self.full):
            return StepKind(everything=True, rho=self.full_rho)
        return StepKind(cut=self.cut)

    def choose(self, costs: dict[str, float]) -> None:
        """Take the earliest cut that fits the budget.

        Args:
            costs: What a step from each cut costs, in base steps, by the cut's name; earliest first.
        """
        self.cut = choose_cut(costs, self.budget, self.full)
        self.cost = costs[self.cut]

    def choose_late(self, first: float, last: float) -> None:
        """Take as many steps that perturb as the budget buys.

        Args:
            first: What a step of one pass costs, in base steps.
            last: What a step from the cut costs.
        """
        assert self.total_steps is not None
        self.late_share = choose_share(first, last, self.budget, max(0.001, 1 / self.total_steps))
        self.cost = last

    def select(self, params: Sequence[Tensor], step: int, previous: Selection | None) -> Selection:
        """Return all of the parameters, which the optimizer has narrowed to those behind the cut, or some of each."""
        return self.within.select(params, step, previous) if self.within else [True] * len(params)


def check_budget(budget: float) -> None:
    """Refuse a budget that pays for no perturbation at all."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 1 < budget < math.inf:
        raise UserValueError(f"budget must be a number above 1, what the base step alone costs, but is {budget!r}")


def _check_late(total_steps: int | None, late_share: float | None, momentum_rho: float | None, full: float) -> None:
    """Refuse settings of first and last steps where training's length is not given, and those that contradict it."""
    if total_steps is None:
        for name, given in (("late_share", late_share), ("momentum_rho", momentum_rho)):
            if given is not None:
                raise UserValueError(
                    f"{name} tells training's first steps from its last, and needs total_steps, but that is None"
                )
        return
    check_whole("total_steps", total_steps)
    if full:
        raise UserValueError(f"full must be 0 where only the last of total_steps steps perturb, but is {full}")
    if late_share is not None:
        check_share("late_share", late_share)
        if not _last_steps(late_share, total_steps):
            raise UserValueError(
                f"late_share must be that of a step or more of total_steps={total_steps}, or none perturbs by a "
                f"gradient, but is {late_share:g} (leave it out, and the budget buys some)"
            )


def _last_steps(share: float, total: int) -> int:
    return math.floor(share * total + 1e-6)


def step_limit(budget: float, full: float) -> float:
    """Return what a step from the cut may cost, if the mean step, with a share of full ones, is to keep the budget.

    >>> round(step_limit(1.45, full=0.25), 3)
    1.267
    """
    return (budget - full * FULL_COST) / (1 - full) if full < 1 else 0.0


def choose_cut(costs: dict[str, float], budget: float, full: float = 0.0) -> str:
    """Return the earliest cut whose mean step fits the budget.

    Args:
        costs: What a step from each cut costs, in base steps, by the cut's name; earliest first.
        budget: What the mean step may cost.
        full: The share of steps that perturb everything.

    >>> choose_cut({"layer3": 1.42, "layer4": 1.24, "head": 1.02}, budget=1.25)
    'layer4'
    >>> choose_cut({"layer3": 1.42, "layer4": 1.24, "head": 1.02}, budget=1.45, full=0.25)
    'layer4'
    """
    means = {cut: (1 - full) * cost + full * FULL_COST for cut, cost in costs.items()}
    for cut, mean in means.items():
        if mean <= budget:
            return cut
    if not means:
        raise UserValueError(
            "the model has no cut that can be seen: nothing of a step could be left out (is it compiled as a whole? "
            "then compile its blocks instead; does the closure run another model than the mask's?)"
        )
    cheapest = min(reversed(means), key=lambda cut: means[cut])
    raise UserValueError(
        f"budget must be at least {math.ceil(1000 * means[cheapest]) / 1000:g}, the mean step's cost at the cheapest "
        f"cut, {cheapest!r}" + (f", with full={full:g}" if full else "") + f", but is {budget:g}"
    )


def choose_share(first: float, last: float, budget: float, least_share: float = 0.001) -> float:
    r"""Return the share q of last steps that keep the budget, in thousandths.

    .. math::  (1 - q)\, a + q\, b \le \text{budget}

    Args:
        first: What the other steps, those of one pass, cost: a base steps.
        last: What the last ones cost: b.
        budget: What the mean step may cost.
        least_share: The smallest that is a share at all: a thousandth, or a single step.

    >>> choose_share(1.05, 1.65, budget=1.25)
    0.333
    """
    if last <= budget:
        return 1.0
    least = first + (last - first) * least_share
    if first >= last or budget < least:
        raise UserValueError(
            f"budget must be at least {math.ceil(1000 * least) / 1000:g}, or no step can perturb by a gradient where "
            f"the others cost {first:g}, but is {budget:g}"
        )
    return max(least_share, math.floor(1000 * (budget - first) / (last - first) + 1e-6) / 1000)
