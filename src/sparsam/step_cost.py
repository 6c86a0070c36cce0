"""What a step takes on this machine: a clock, works timed in turn, and the costs that follow, in base steps.

Everything that measures does so here. What is counted, and is the same on every machine, is in
:mod:`sparsam.replay.counting`.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from sparsam.checks import check_module, check_whole
from sparsam.errors import UserTypeError, UserValueError
from sparsam.passes import preserve_state
from sparsam.perturbation import perturb, restore
from sparsam.replay.cuts import parameters_after, spans_after, weight_count
from sparsam.replay.modules import unwrap
from sparsam.sam import SAM
from sparsam.sam.phase import UsedGradients
from sparsam.share import WHOLE, check_takes_rows
from sparsam.thrifty import ThriftySAM

ROUNDS, WARM_UP = 20, 3  # of measure_cost; two steps prove a path to a cut
PASSES, WARM_UP_PASSES = 3, 2  # of find_cuts
TIMINGS = 5  # of cut_costs, after one that warms up

Direction = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


class Clock:
    """Takes the time without waiting, where the device can: on CUDA between events, elsewhere by the host's clock.

    Args:
        device: Whose time.
        device_time: On CUDA, let the host run ahead, so that only the device's work counts, as in a captured graph.
        process_time: On a CPU, take the time of the process, which stands still while another job has the CPU.
    """

    def __init__(self, device: torch.device, device_time: bool = False, process_time: bool = False) -> None:
        self.device, self.device_time = device, device_time
        self._host = time.process_time if process_time else time.perf_counter

    def prepare(self) -> None:
        """Get ready to measure what comes next."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if self.device_time:
                # In these cycles, some 50 ms, the host launches what is measured.
                torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]

    def now(self) -> Any:
        """Take the time."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            return event
        if self.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self.device)
        return self._host()

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds between two times; on CUDA wait for the second."""
        if self.device.type == "cuda":
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000
        return float(end - start)

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds that some work takes."""
        self.prepare()
        start = self.now()
        work()
        return self.between(start, self.now())


def times_in_turn(
    works: Sequence[Callable[[], object]], *, rounds: int, clock: Clock, count: int = 1, warm_up: int = 0
) -> list[list[float]]:
    """Return the seconds that each work takes, in each round; in a round each work has its turn.

    Whatever else the machine does in a round meets all works, so compare times of one round.

    Args:
        works: What to time.
        rounds: How many.
        clock: What to take the time with.
        count: How often a work runs in its turn. The mean counts.
        warm_up: How many rounds come before, which do not count.

    >>> found = times_in_turn([lambda: None, lambda: time.sleep(0.01)], rounds=3, clock=Clock(torch.device("cpu")))
    >>> [len(times) for times in found], min(found[1]) >= 0.01
    ([3, 3], True)
    """

    def turn(work: Callable[[], object]) -> float:
        return clock.time(work if count == 1 else lambda: [work() for _ in range(count)]) / count

    found = [[turn(work) for work in works] for _ in range(warm_up + rounds)]
    return [[times[k] for times in found[warm_up:]] for k in range(len(works))]


@dataclass(frozen=True)
class StepRatio:
    """Median and quartiles of the ratio of a method's step time to the base optimizer's in the same round."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> StepRatio:
        """Return what matters of the ratios of all rounds.

        >>> StepRatio.of([1.9, 2.0, 9.0])
        StepRatio(median=2.0, low=1.95, high=5.5, rounds=3)
        >>> print(StepRatio.of([1.9, 2.0, 9.0]))
        2.00 base steps (quartiles 1.95 and 5.50 of 3 rounds)
        """
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * [*ratios]
        return cls(middle, low, high, len(ratios))

    @classmethod
    def of_times(cls, times: Sequence[float], base: Sequence[float]) -> StepRatio:
        """Return what matters of a method's times in all rounds, and the base optimizer's in the same rounds."""
        return cls.of([own / plain for own, plain in zip(times, base, strict=True)])

    @property
    def spread(self) -> float:
        """Half of the range between the quartiles."""
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return f"{self.median:.2f} base steps (quartiles {self.low:.2f} and {self.high:.2f} of {self.rounds} rounds)"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass(frozen=True)
class ThriftyRatio(StepRatio):
    """What a sharpness-aware step of a thrifty optimizer takes; printed, it names the argument to copy.

    >>> print(ThriftyRatio.of([1.5, 1.62, 1.7]))
    1.62 base steps (quartiles 1.56 and 1.66 of 3 rounds); thrifty(..., step_cost=1.62) spends the budget by it
    """

    def __str__(self) -> str:
        return f"{super().__str__()}; thrifty(..., step_cost={max(1.0, self.median):.2f}) spends the budget by it"


def measure_cost(
    model: nn.Module,
    closure: Callable[..., Any],
    opt: SAM,
    *,
    rounds: int = ROUNDS,
    clock: Clock | None = None,
) -> StepRatio:
    r"""Measure what a sharpness-aware step of an optimizer takes on this machine, in steps of its base optimizer.

    Both take a step in turn, round after round, so that whatever else the machine does meets both. What counts is the
    ratio in each round. The result has the median and the quartiles: if these lie far apart, the machine is busy. With
    the median c, a training whose last fraction q of the steps is sharpness-aware takes :math:`1 + q\,(c - 1)` times
    as long as with the base optimizer alone. If :func:`sparsam.thrifty` has built `opt`, the printed result names the
    argument with which thrifty spends its budget by this measure.

    The steps are real ones, by a SAM of their own around the same base optimizer. Afterwards weights, gradients,
    buffers, random numbers and the base optimizer's groups and state are what they were, and `opt` has taken no step.
    Step hooks of the base optimizer run; those of `opt` do not.

    Args:
        model: The network that the closure runs.
        closure: As for `opt.step`, on a batch as in training.
        opt: Whatever its schedule, steps with its mask and its ascent are measured.
        rounds: How many, after three steps of each to warm up.
        clock: What to take the time with; None: a clock of the model's device.
    """
    check_module("model", model, optional=False)
    if not isinstance(opt, SAM):
        raise UserTypeError(f"opt must be a SAM, but is a {type(opt).__name__}")
    if not callable(closure):
        raise UserTypeError(f"closure must be a function, as for opt.step, but is a {type(closure).__name__}")
    check_whole("rounds", rounds)
    if opt.share < 1:
        check_takes_rows(closure)
    params = [p for group in opt.param_groups for p in group["params"]]
    if not set(model.parameters()).issuperset(p for p in params if p.requires_grad):
        raise UserValueError("model must be the one that opt trains, but does not have all of opt's parameters")
    clock, base = clock or Clock(params[0].device), opt.base_optimizer

    def base_step() -> None:
        closure() if opt.share == 1 else closure(WHOLE)
        base.step()

    def sharp_step() -> None:
        opt.zero_grad()  # a step refuses to add to gradients that it has not used
        sam.step(closure)

    every = list(dict.fromkeys([*model.parameters(), *params]))
    with _between_steps(opt), _preserved(base, every), preserve_state(model), torch.enable_grad():
        sam = SAM.wrap(
            base,
            mask=opt.mask if opt.ascent.passes == 2 else None,
            ascent=opt.ascent,
            adaptive=opt.adaptive,
            model=opt._passes.model,
            perturbation="local" if opt._replicas.local else "global",
            process_group=opt._replicas.group,
            share=opt.share,
        )
        plain, sharp = times_in_turn([base_step, sharp_step], rounds=rounds, clock=clock, warm_up=WARM_UP)
    return (ThriftyRatio if isinstance(opt, ThriftySAM) else StepRatio).of_times(sharp, plain)


@contextmanager
def _between_steps(opt: SAM) -> Iterator[None]:
    """Let the block's closures call `opt.zero_grad()`; afterwards `opt` knows what it knew of the coming step."""
    opt._phase.refuse_inside_step("measure_cost")
    phase, used, random = opt._phase, opt._used_gradients, opt._passes._before_first
    opt._used_gradients = UsedGradients()
    try:
        yield
    finally:
        opt._phase, opt._used_gradients = phase, used
        opt._passes._start_from(random)


@contextmanager
def _preserved(base: Optimizer, params: Sequence[Tensor]) -> Iterator[None]:
    """Let the block take steps; afterwards weights, gradients, groups and state are as before, in the same tensors."""
    grads = [(p, p.grad) for p in params]
    tables: list[dict[str, Any]] = [*base.param_groups, *base.state.values()]
    kept = [
        (table, {key: value if key == "params" else tree_map(_same_tensor, value) for key, value in table.items()})
        for table in tables
    ]
    tensors = {t for t in tree_leaves([values for _, values in kept]) if isinstance(t, Tensor)}.union(params)
    copies = [(t, t.detach().clone()) for t in tensors]
    stateful = set(base.state)
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for t, values in copies:
                t.copy_(values)
        for p, grad in grads:
            p.grad = grad
        for table, entries in kept:
            table.clear()
            table.update(entries)
        for p in [p for p in base.state if p not in stateful]:
            del base.state[p]


def _same_tensor(leaf: Any) -> Any:
    return leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


class Cut(NamedTuple):
    """The input of a module, and how much follows it."""

    name: str
    """The name of the module."""
    weights: float
    """The fraction of the weights that are used after the cut and nowhere before."""
    step: float | None
    """The fraction of a pass, forward and backward, that follows the cut; None if it was not measured."""


def find_cuts(
    model: nn.Module,
    run: Callable[[], Any],
    *,
    passes: int = PASSES,
    clock: Clock | None = None,
) -> list[Cut]:
    """Find where a model can be cut, earliest first, and measure how much of a pass follows each cut.

    Of cuts with the same weights after them only the last is listed, because it costs least; of names for the same
    place only the outermost. Running statistics and torch's random numbers are afterwards as they were.

    Args:
        model: The network.
        run: One pass: forward and backward, like an optimizer's closure. It should return the loss. Without,
            the loss is taken to use every output that the model itself does not go on with, such as that of an
            auxiliary head: no place after it is a cut.
        passes: How many passes to time (the median counts), after two to warm up; 0: do not measure.
        clock: What to take the time with; None: a clock of the model's device. One with `device_time` measures what a
            captured step will take, not how fast Python can launch it.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> x = torch.ones(3, 4)
    >>> [(cut.name, cut.weights) for cut in find_cuts(model, lambda: model(x).sum().backward(), passes=0)]
    [('0', 1.0), ('2', 0.3103448275862069)]
    """
    check_module("model", model, optional=False)
    if not callable(run):
        raise UserTypeError(
            f"run must be a function that computes the loss and calls backward(), but is a {type(run).__name__}"
        )
    check_whole("passes", passes, least=0)
    with preserve_state(model):
        found = parameters_after(unwrap(model), run)
    places = {name: after for name, after in found.after.items() if name not in found.unsure}
    total = weight_count(places.pop(""))
    steps: dict[str, float] = {}
    if passes and places:
        clock = clock or Clock(next(p.device for p in model.parameters()))
        measured = []
        for i in range(WARM_UP_PASSES + passes):
            with preserve_state(model):
                shares = _shares(unwrap(model), list(places), run, clock)
            if i >= WARM_UP_PASSES:
                measured.append(shares)
        steps = {name: statistics.median(shares[name] for shares in measured) for name in places}
    return [Cut(name, weight_count(after) / total, steps.get(name)) for name, after in places.items()]


def _shares(model: nn.Module, names: list[str], run: Callable[[], Any], clock: Clock) -> dict[str, float]:
    """Run one pass; return the share of its time between each module's call and the gradient of its input."""
    clock.prepare()
    spans = spans_after(model, names, run, clock.now)
    total = clock.between(*spans[""])
    return {name: clock.between(*spans[name]) / total for name in names}


def cut_costs(
    model: nn.Module,
    closure: Callable[[], Any],
    base: Optimizer,
    *,
    adaptive: bool = False,
    direction: Direction | None = None,
    clock: Clock | None = None,
) -> dict[Cut, float]:
    r"""Measure what a step costs from each cut, in base steps; earliest cut first.

    With f the fraction of a pass that follows the cut, the fraction of the weights that does, and the time of
    perturbing all weights and of the base optimizer's own step in passes, p and b:

    .. math::  1 + \frac{f + \text{weights} \cdot p}{1 + b}

    Of several timings the shortest counts, since what else a machine does only adds to them. No step costs less than
    one base step, and none more than from an earlier cut. All are rounded to hundredths, which is about as exact as
    they are.

    Args:
        model: The network.
        closure: One pass, as for an optimizer; it is called several times.
        base: The base optimizer. Its step is timed on a copy.
        adaptive: Whether the perturbation is ASAM's, which takes longer.
        direction: What an ascent makes of parameters and gradients, its time included; None: the gradients.
        clock: See :func:`sparsam.find_cuts`.
    """
    params = [p for group in base.param_groups for p in group["params"]]
    clock = clock or Clock(params[0].device)
    cuts = find_cuts(model, closure, clock=clock)
    if not cuts:
        return {}
    with preserve_state(model), torch.enable_grad():
        closure()
        works = closure, _stepping(base), _perturbing(params, adaptive, direction)
        times = times_in_turn(works, rounds=TIMINGS, clock=clock, warm_up=1)
    one_pass, stepping, perturbing = map(min, times)
    costs: dict[Cut, float] = {}
    least = math.inf
    for cut in cuts:
        extra = (cut.step or 0.0) * one_pass + cut.weights * perturbing
        least = costs[cut] = max(1.0, min(least, round(1 + extra / (one_pass + stepping), 2)))
    return costs


def _perturbing(params: Sequence[Tensor], adaptive: bool, direction: Direction | None) -> Callable[[], None]:
    @torch.no_grad()
    def work() -> None:
        used = [p for p in params if p.grad is not None]
        grads: Sequence[Tensor] = [p.grad for p in used if p.grad is not None]
        rho = torch.ones((), device=params[0].device)  # at 0 nothing would be done
        if used:
            dense, rhos = [True] * len(used), [rho] * len(used)
            restore(perturb(used, direction(used, grads) if direction else grads, dense, rhos, adaptive=adaptive))

    return work


def _stepping(base: Optimizer) -> Callable[[], object]:
    """Return the step of a copy of an optimizer; where it cannot be copied, a step that takes no time."""
    try:
        twin = copy.deepcopy(base)
        for group, other in zip(base.param_groups, twin.param_groups, strict=True):
            for p, q in zip(group["params"], other["params"], strict=True):
                q.grad = p.grad
        return twin.step
    except Exception:  # a base of one's own that no copy works for, or too little memory
        return lambda: None
