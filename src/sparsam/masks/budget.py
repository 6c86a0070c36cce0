"""SSAM-C: the weights behind a cut, so that sparsity saves time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from sparsam.checks import check_choice, check_rho, check_share, check_whole
from sparsam.masks.base import Mask, Setting, StepKind
from sparsam.masks.selection import Selection
from sparsam.modules import bare, get_module

NORMS = ("perturbed", "whole")
FULL_COST = 2.0  # of a step that perturbs everything, in base steps


class BudgetMask(Mask):
    r"""SSAM-C: perturbs everything behind a cut, and computes nothing before it twice.

    With f the share of the base step that lies behind the cut, and a share q of the steps (`full`) that perturb
    everything, the mean step costs

    .. math::  (1 - q)\,(1 + f) + 2\,q \;\le\; \text{budget}

    base steps, with exactly the gradient of the masked step (:mod:`sparsam.replay`). The cut is measured in the first
    step, on your machine and your batch: the earliest one that fits the budget is taken, and kept from then on, also
    in the optimizer's state.

    .. math::  \epsilon = \rho\,\frac{g}{\lVert g_{behind}\rVert_2}\odot m

    With `total_steps` the full steps come last, all in a row. The budget then buys as many of them as it can, and the
    others are cut where that costs least.

    Args:
        model: The network that is trained; in distributed training the DistributedDataParallel around it.
        budget: What the mean step may cost, in base steps: above 1. Two runs may measure different cuts.
        cut: The module before which the cut lies, such as "layer4": nothing is measured, and the budget has no say.
        full: The share of the steps that perturb everything, in [0, 1]; None: none of them, or, with `total_steps`, as
            many as the budget allows.
        full_rho: The radius of those steps; None: the groups' rho, as in all others.
        total_steps: How many steps training has. Full steps are then the last ones; None: evenly spread.
        momentum_rho: In steps that are cut, what lies before the cut is perturbed too, in both passes: by so much along
            the base optimizer's momentum v, :math:`-\rho_m v / \lVert v \rVert_2`, which takes no pass of its own
            (Momentum-SAM); None: it is not.
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
        full: float | None = None,
        full_rho: float | None = None,
        total_steps: int | None = None,
        momentum_rho: float | None = None,
        norm: str = "perturbed",
        within: Mask | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model must be a module, but is a {type(model).__name__}; pass the model, not its parameters"
            )
        if isinstance(model, nn.DataParallel):
            raise TypeError("model must not be a DataParallel, whose copies run elsewhere; use DistributedDataParallel")
        check_budget(budget)
        if full is not None:
            check_share("full", full)
        if total_steps is not None:
            check_whole("total_steps", total_steps)
            if full is None and cut is not None:
                raise ValueError(
                    f"total_steps must come with full where a cut is named: nothing is measured at {cut!r}, so the "
                    f"budget cannot buy full steps"
                )
        self.by_budget = full is None and total_steps is not None  # whether the share of full steps is
        full = float(full or 0.0)
        for name, radius in (("full_rho", full_rho), ("momentum_rho", momentum_rho)):
            if radius is not None:
                check_rho(radius, name)
        for name, given in (("full_rho is the radius", full_rho), ("total_steps is the place", total_steps)):
            if given is not None and not full and not self.by_budget:
                raise ValueError(
                    f"{name} of full steps, but full is 0: there are none"
                    + (" (leave full out, and the budget buys some)" if name.startswith("total") else "")
                )
        check_choice("norm", norm, NORMS)
        if within is not None and (not isinstance(within, Mask) or isinstance(within, BudgetMask)):
            raise TypeError(f"within must be a mask of another kind, but is a {type(within).__name__}")
        if cut is not None:
            get_module(bare(model), cut)
        elif 1 + full > budget:
            raise ValueError(
                f"budget must be above 1 + full, for full steps cost {FULL_COST:g} base steps, but is {budget} with "
                f"full={full}"
            )
        self.within = within
        super().__init__(within.interval if within else None, within.seed if within else 0)
        self.model, self.budget, self.full, self.norm = model, float(budget), full, norm
        self.full_rho = None if full_rho is None else float(full_rho)
        self.momentum_rho = None if momentum_rho is None else float(momentum_rho)
        self.total_steps = None if total_steps is None else int(total_steps)
        self.named_cut = self.cut = cut
        self.cost: float | None = None  # of a step from a measured cut, in base steps

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

    def settings(self) -> dict[str, Setting]:
        """Return what a resumed run must have in common with the saved one."""
        return {
            **super().settings(),
            "budget": self.budget if self.named_cut is None else None,
            "cut": self.named_cut,
            "full": None if self.by_budget else self.full,
            "full_rho": self.full_rho,
            "total_steps": self.total_steps,
            "momentum_rho": self.momentum_rho,
            "norm": self.norm,
            "within": self.within.settings() if self.within else None,
        }

    def __repr__(self) -> str:
        if self.cut is None or self.named_cut is not None:
            return super().__repr__()
        bought = f", full={self.full:g}" if self.by_budget else ""
        return f"{super().__repr__()} cut before {self.cut!r}{bought}"

    def kind(self, step: int) -> StepKind:
        """Return whether a step is a full one: the last ones are, or of the first n steps floor(n * full)."""
        if self.total_steps is None:
            full = math.floor((step + 1) * self.full) > math.floor(step * self.full)
        else:
            full = step >= self.total_steps - math.floor(self.full * self.total_steps + 1e-6)
        if full:
            return StepKind(everything=True, rho=self.full_rho)
        return StepKind(cut=self.cut, momentum_rho=self.momentum_rho)

    def choose(self, costs: dict[str, float]) -> None:
        """Take the cut, and with `total_steps` the share of full steps, that fit the budget.

        Args:
            costs: What a step from each cut costs, in base steps, by the cut's name; earliest first.
        """
        if self.by_budget:
            self.cut, self.full = choose_full(costs, self.budget)
        else:
            self.cut = choose_cut(costs, self.budget, self.full)
        self.cost = costs[self.cut]

    def select(self, params: Sequence[Tensor], step: int, previous: Selection | None) -> Selection:
        """Return all of the parameters, which the optimizer has narrowed to those behind the cut, or some of each."""
        return self.within.select(params, step, previous) if self.within else [True] * len(params)


def check_budget(budget: float) -> None:
    """Refuse a budget that pays for no perturbation at all."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 1 < budget < math.inf:
        raise ValueError(f"budget must be a number above 1, what the base step alone costs, but is {budget!r}")


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
        raise ValueError(
            "the model has no cut that can be seen: nothing of a step could be left out (is it compiled as a whole? "
            "then compile its blocks instead; does the closure run another model than the mask's?)"
        )
    cheapest = min(reversed(means), key=lambda cut: means[cut])
    raise ValueError(
        f"budget must be at least {math.ceil(1000 * means[cheapest]) / 1000:g}, the mean step's cost at the cheapest "
        f"cut, {cheapest!r}" + (f", with full={full:g}" if full else "") + f", but is {budget:g}"
    )


def choose_full(costs: dict[str, float], budget: float) -> tuple[str, float]:
    r"""Return the cheapest cut, and the share of full steps that it leaves money for, in thousandths.

    .. math::  (1 - q)\, c + 2\,q \le \text{budget} \quad\Leftrightarrow\quad q \le \frac{\text{budget} - c}{2 - c}

    Args:
        costs: What a step from each cut costs, in base steps, by the cut's name; earliest first.
        budget: What the mean step may cost.

    >>> choose_full({"layer3": 1.42, "layer4": 1.24, "head": 1.05}, budget=1.25)
    ('head', 0.21)
    """
    choose_cut(costs, budget)  # or its error, where nothing fits
    cheapest = min(reversed(costs), key=lambda cut: costs[cut])
    cost = costs[cheapest]
    if budget >= FULL_COST:
        return cheapest, 1.0
    return cheapest, math.floor(1000 * (budget - cost) / (FULL_COST - cost) + 1e-6) / 1000
