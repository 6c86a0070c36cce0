"""The runs of one recipe, and the numbers that are compared.

A method's numbers come from its finished runs, one for each seed. Where none is finished, they come from the epochs
there are, and `Method.notes` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from sparsam.runs.run import Run
from sparsam.runs.same import SEEDS, different_settings
from sparsam.step_cost import StepRatio

# Settings in which the seeds of one method may differ without a note.
NOT_NOTED = {*SEEDS, "data.root", "data.workers", "train.checkpoint_epochs", "train.refresh_batchnorm"}


@dataclass(frozen=True)
class Statistic:
    """A mean over seeds and its sample standard deviation, which is None for one seed."""

    mean: float
    deviation: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Statistic | None:
        """Return the statistic of the values, None where there are none.

        >>> Statistic.of([1.0, 3.0])
        Statistic(mean=2.0, deviation=1.4142135623730951, n=2)
        """
        if not values:
            return None
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Density:
    """The share of perturbed weights of each layer in each epoch, as a mean over seeds."""

    layers: tuple[str, ...]
    epochs: tuple[int, ...]
    shares: tuple[tuple[float | None, ...], ...]  # a row for each layer
    seeds: int


@dataclass(frozen=True)
class Method:
    """The runs of one recipe, and one row of the table."""

    name: str
    """The recipe's."""
    method: str
    """SGD, SAM, SSAM-F, ..."""
    label: str
    """The method, and where that is not enough also the recipe, or the settings that are this row's own."""
    runs: tuple[Run, ...]
    relative_step: float | None = None

    @property
    def finished(self) -> bool:
        """Whether any run is finished."""
        return any(run.finished for run in self.runs)

    @property
    def seeds(self) -> tuple[Run, ...]:
        """One run for each seed: the first that is finished, or the first."""
        found: dict[tuple[object, ...], Run] = {}
        for run in sorted(self.runs, key=lambda run: not run.finished):
            found.setdefault(run.seeds, run)
        return tuple(run for run in self.runs if any(run is one for one in found.values()))

    @property
    def counted(self) -> tuple[Run, ...]:
        """The runs behind the numbers: one for each seed; the finished ones, or all if none is finished."""
        return tuple(run for run in self.seeds if run.finished) or self.seeds

    def statistic(self, number: Callable[[Run], float | None]) -> Statistic | None:
        """Return the statistic of one number over the runs that have it."""
        return Statistic.of([value for run in self.counted if (value := number(run)) is not None])

    @property
    def accuracy(self) -> Statistic | None:
        """Accuracy after the last epoch."""
        return self.statistic(lambda run: run.accuracy)

    @property
    def best_accuracy(self) -> Statistic | None:
        """The highest accuracy of any epoch."""
        return self.statistic(lambda run: run.best_accuracy)

    @property
    def train_loss(self) -> Statistic | None:
        """The training loss of the last epoch; None if that of any run diverged."""
        losses = [run.train_loss for run in self.counted]
        return None if None in losses else self.statistic(lambda run: run.train_loss)

    @property
    def step_ms(self) -> float | None:
        """Milliseconds of a step, as a median: one seed may have trained while the machine was busy."""
        found = [run.step_ms for run in self.counted if run.step_ms is not None]
        return median(found) if found else None

    @property
    def step_ratio(self) -> StepRatio | None:
        """A step in steps of the base optimizer, timed in turn: seeds share it."""
        return next((run.step_ratio for run in self.counted if run.step_ratio), None)

    @property
    def seconds(self) -> Statistic | None:
        """Seconds of training."""
        return self.statistic(lambda run: run.seconds)

    @property
    def peak_memory_mb(self) -> Statistic | None:
        """Peak memory."""
        return self.statistic(lambda run: run.peak_memory_mb)

    @property
    def perturbed(self) -> Statistic | None:
        """The share of weights that are perturbed."""
        return self.statistic(lambda run: run.perturbed)

    @property
    def theoretical_flops(self) -> Statistic | None:
        """The paper's FLOPs relative to SGD, which no hardware reaches."""
        return self.statistic(lambda run: run.theoretical_flops)

    @property
    def extra(self) -> dict[str, Statistic]:
        """Further numbers by their label."""
        labels = dict.fromkeys(label for run in self.counted for label in run.extra)
        found = {label: self.statistic(lambda run, label=label: run.extra.get(label)) for label in labels}  # type: ignore[misc]
        return {label: statistic for label, statistic in found.items() if statistic}

    @property
    def sam(self) -> bool:
        """Whether the method perturbs at all."""
        return self.runs[0].sam

    @property
    def weight_decay(self) -> tuple[float, ...]:
        """Weight decay; more than one value where the recipes differ."""
        return tuple(dict.fromkeys(run.weight_decay for run in self.runs))

    @property
    def rho(self) -> tuple[float, ...]:
        """The radius; empty without SAM, more than one value where the recipes differ."""
        return tuple(dict.fromkeys(run.rho for run in self.runs if run.rho is not None))

    @property
    def other_radii(self) -> tuple[str, ...]:
        """The radii of ascents that have one of their own, with the ascents' names."""
        radii = (pair for run in self.runs for pair in run.other_radii.items())
        return tuple(dict.fromkeys(f"{name} {radius:g}" for name, radius in radii))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know to trust the row."""
        notes = []
        unfinished = [run for run in self.runs if not run.finished]
        if unfinished and self.finished:
            notes.append(f"{len(unfinished)} of {len(self.runs)} runs unfinished, not counted")
        elif unfinished:
            reached = max(run.metrics[-1].epoch if run.metrics else 0 for run in unfinished)
            planned = [run.planned_epochs for run in unfinished if run.planned_epochs is not None]
            notes.append(f"unfinished: epoch {reached}" + (f" of {max(planned)}" if planned else ""))
        keys = different_settings(*(run.recipe for run in self.runs), ignored=NOT_NOTED)
        if keys:
            notes.append(f"recipes differ in {', '.join(keys)}")
        seeds = Counter(run.seeds for run in self.runs if run.finished or not self.finished)
        notes += [
            f"seed {seed} is there {count} times, counted once" for (seed, *_), count in seeds.items() if count > 1
        ]
        return tuple(notes)

    def density(self) -> Density | None:
        """Return the mask by layer and epoch, None where there is no mask or it was not recorded."""
        if not self.runs[0].masked:
            return None
        values: dict[tuple[str, int], list[float]] = {}
        for run in self.counted:
            for epoch in run.metrics:
                for layer, share in (epoch.mask_density or {}).items():
                    values.setdefault((layer, epoch.epoch), []).append(share)
        if not values:
            return None
        layers = tuple(dict.fromkeys(layer for layer, _ in values))
        epochs = tuple(sorted({epoch for _, epoch in values}))
        shares = tuple(
            tuple(fmean(found) if (found := values.get((layer, epoch))) else None for epoch in epochs)
            for layer in layers
        )
        return Density(layers, epochs, shares, max(map(len, values.values())))
