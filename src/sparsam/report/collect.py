"""Read run directories and compute what is compared.

Runs with the same recipe name are seeds of one method. A method's numbers come from its finished runs. Where none is
finished, they come from the epochs there are, and `Method.notes` says so.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from sparsam.report.record import Record, ReportError, is_number, read_text, shown
from sparsam.runs.recipe import Recipe
from sparsam.runs.step_time import step_time
from sparsam.settings import differences

ABOUT = re.compile(r" \(\d+ images.*\)$")  # what a column of sharpness was measured over

# Settings in which the seeds of one method may differ.
INCIDENTAL = {"train.seed", "mask.seed", "data.root", "data.workers", "train.checkpoint_epochs"}


@dataclass(frozen=True)
class Statistic:
    """A mean over seeds and its sample standard deviation, which one seed does not have."""

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
class Epoch:
    """What was measured in one epoch."""

    epoch: int
    train_loss: float
    test_accuracy: float
    elapsed: float
    step_ms: float
    perturbed: float | None
    mask_density: dict[str, float] | None


@dataclass(frozen=True)
class Run:
    """One run directory. For an unfinished run the numbers are those so far."""

    directory: Path
    name: str
    method: str
    seed: int
    finished: bool
    recipe: dict[str, Any]
    environment: dict[str, Any]
    started: datetime
    metrics: tuple[Epoch, ...]
    evaluated_on: str
    accuracy: float | None
    best_accuracy: float | None
    best_epoch: int | None
    step_ms: float | None
    seconds: float | None
    peak_memory_mb: float | None
    perturbed: float | None
    theoretical_flops: float | None
    extra: dict[str, float]
    chosen: dict[str, Any]
    """What a budget chose, or was told to."""

    @property
    def setup(self) -> str:
        """The network and the data, in words."""
        return f"{self.recipe['model']['name']} on {self.recipe['data']['name']}"

    @property
    def workload(self) -> tuple[Any, ...]:
        """What two runs must share for their step times to be comparable."""
        device = self.environment["device"]
        details = ("processor", "threads") if device == "cpu" else ()
        machine = (device, *(self.environment.get(detail) for detail in details))
        return self.setup, self.recipe["data"]["batch_size"], self.recipe["train"]["precision"], machine


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
    label: str
    runs: tuple[Run, ...]
    relative_step: float | None = None

    @property
    def finished(self) -> bool:
        """Whether any run is finished."""
        return any(run.finished for run in self.runs)

    @property
    def counted(self) -> tuple[Run, ...]:
        """The runs behind the numbers: the finished ones, or all where none is."""
        return tuple(run for run in self.runs if run.finished) or self.runs

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
    def step_ms(self) -> float | None:
        """Milliseconds of a step; the median, since one seed may have trained while the machine did something else."""
        found = [run.step_ms for run in self.counted if run.step_ms is not None]
        return median(found) if found else None

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
        return bool(self.runs[0].recipe["sam"]["enabled"])

    @property
    def weight_decay(self) -> tuple[float, ...]:
        """Weight decay; more than one value where the recipes differ."""
        return tuple(dict.fromkeys(run.recipe["optimizer"]["weight_decay"] for run in self.runs))

    @property
    def rho(self) -> tuple[float, ...]:
        """The radius; empty without SAM, more than one value where the recipes differ."""
        return tuple(dict.fromkeys(run.recipe["sam"]["rho"] for run in self.runs if run.recipe["sam"]["enabled"]))

    @property
    def other_radii(self) -> tuple[str, ...]:
        """The radii of full steps and of the momentum, where there are some."""
        masks = [run.recipe["mask"] for run in self.runs if run.recipe["mask"]["kind"] == "budget"]
        words = {"full_rho": "full steps", "momentum_rho": "momentum"}
        return tuple(dict.fromkeys(f"{words[key]} {mask[key]:g}" for key in words for mask in masks if mask.get(key)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know before believing the row."""
        notes = []
        unfinished = [run for run in self.runs if not run.finished]
        if unfinished and self.finished:
            notes.append(f"{len(unfinished)} of {len(self.runs)} runs unfinished, not counted")
        elif unfinished:
            reached = max(run.metrics[-1].epoch if run.metrics else 0 for run in unfinished)
            planned = max(run.recipe["train"]["epochs"] for run in unfinished)
            notes.append(f"unfinished: epoch {reached} of {planned}")
        keys = [key for key in differences(*(_completed(run.recipe) for run in self.runs)) if key not in INCIDENTAL]
        if keys:
            notes.append(f"recipes differ in {', '.join(keys)}")
        seeds = Counter(run.seed for run in self.counted)
        notes += [f"seed {seed} counted {count} times" for seed, count in seeds.items() if count > 1]
        return tuple(notes)

    def density(self) -> Density | None:
        """Return the mask by layer and epoch, None where there is no mask or it was not recorded."""
        if not self.sam or self.runs[0].recipe["mask"]["kind"] == "dense":
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


def collect(directories: Iterable[Path]) -> list[Method]:
    """Read run directories and group them by method.

    Raises:
        ReportError: There is no run, or one cannot be read.
    """
    runs = [read_run(directory) for directory in {Path(d).resolve(): Path(d) for d in directories}.values()]
    if not runs:
        raise ReportError("there is no run to compare: give at least one run directory")
    return group_runs(_short_labels(runs))


def group_runs(runs: Iterable[Run]) -> list[Method]:
    """Group runs by the name of their recipe, in the order in which the names come.

    Step times are relative to the first method without SAM that has the same network, data, batch size, precision and
    device; where there is none, `relative_step` is None.
    """
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    methods = []
    for name, group in by_name.items():
        # Only a finished run knows how its method is called.
        named = next((run for run in group if run.finished), group[0])
        methods.append(Method(name, named.method, tuple(sorted(group, key=lambda run: run.seed))))
    labels = Counter(method.label for method in methods)
    methods = [replace(m, label=f"{m.label} ({m.name})") if labels[m.label] > 1 else m for m in methods]
    return [replace(method, relative_step=_relative_step(method, methods)) for method in methods]


def _relative_step(method: Method, methods: Sequence[Method]) -> float | None:
    for reference in methods:
        if not reference.sam and reference.runs[0].workload == method.runs[0].workload:
            own, plain = method.step_ms, reference.step_ms
            return own / plain if own and plain else None
    return None


def read_run(directory: Path) -> Run:
    """Read one run directory.

    Raises:
        ReportError: It is no run directory, or a file in it is missing, unreadable or not as it should be.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ReportError(f"{directory} is not a directory")
    if not (directory / "recipe.json").is_file():
        raise ReportError(f"{directory} is not a run directory: it has no recipe.json")
    recipe = Record.read(directory / "recipe.json")
    environment = Record.read(directory / "environment.json")
    finished = (directory / "summary.json").exists()
    metrics = _read_metrics(directory / "metrics.jsonl", finished)
    for key in ("model.name", "data.name", "mask.kind", "train.precision"):
        recipe.text(key)
    for key in ("data.batch_size", "optimizer.weight_decay", "sam.rho", "train.epochs"):
        recipe.number(key)
    recipe.flag("sam.enabled")
    for key in ("sparsam", "torch", "python", "device"):
        environment.text(key)
    run = Run(
        directory=directory,
        name=recipe.text("name"),
        method=recipe.text("name"),
        seed=recipe.whole("train.seed"),
        finished=finished,
        recipe=recipe.values,
        environment=environment.values,
        started=environment.time("started"),
        metrics=metrics,
        evaluated_on="validation" if recipe.values["data"].get("validation") else "test",
        accuracy=None,
        best_accuracy=None,
        best_epoch=None,
        step_ms=None,
        seconds=None,
        peak_memory_mb=None,
        perturbed=None,
        theoretical_flops=None,
        extra={},
        chosen={},
    )
    if not finished:
        return _with_metrics(run)
    run = _with_summary(run, Record.read(directory / "summary.json"))
    return replace(run, extra={**run.extra, **_sharpness(directory / "analysis" / "sharpness.json", len(metrics))})


def _sharpness(path: Path, epochs: int) -> dict[str, float]:
    """Return what `sparsam sharpness` has measured of a run, as columns of the table; not if that was earlier."""
    if not path.is_file():
        return {}
    measured = Record.read(path)
    if measured.values.get("epochs", epochs) != epochs:
        return {}
    rise = f"Loss rise, ρ = {measured.number('rho'):g}"
    best = ", best epoch" if measured.values.get("weights") == "best" else ""
    about = f" ({measured.whole('samples')} images{best})"
    found = {rise + about: measured.optional("worst_case"), f"λ1{about}": measured.optional("lambda1")}
    return {label: value for label, value in found.items() if value is not None}


def _short_labels(runs: list[Run]) -> list[Run]:
    """Leave out of columns over how many images they are, if that is the same for all runs."""
    about = {match.group() for run in runs for label in run.extra if (match := ABOUT.search(label))}
    if len(about) != 1 or "best" in (suffix := about.pop()):
        return runs
    return [
        replace(run, extra={label.removesuffix(suffix): value for label, value in run.extra.items()}) for run in runs
    ]


def _with_summary(run: Run, summary: Record) -> Run:
    if summary.text("evaluated_on") not in ("test", "validation"):
        raise summary.wrong("evaluated_on", "'test' or 'validation'")
    extra = summary.values.get("extra") or {}
    if not isinstance(extra, dict):
        raise summary.wrong("extra", "an object")
    for label, value in extra.items():
        if value is not None and not (is_number(value) and math.isfinite(value)):
            raise ReportError(f"{summary.source}: extra {label!r} must be a number, but is {shown(value)}")
    return replace(
        run,
        name=summary.text("name"),
        method=summary.text("method"),
        seed=summary.whole("seed"),
        evaluated_on=summary.text("evaluated_on"),
        accuracy=summary.number("test_accuracy"),
        best_accuracy=summary.number("best_accuracy"),
        best_epoch=summary.whole("best_epoch"),
        step_ms=summary.optional("step_ms"),
        seconds=summary.optional("seconds"),
        peak_memory_mb=summary.optional("peak_memory_mb"),
        perturbed=summary.optional("perturbed"),
        theoretical_flops=summary.optional("theoretical_flops"),
        extra={label: float(value) for label, value in extra.items() if value is not None},
        chosen={key: value for key in ("cut", "late_share") if (value := summary.values.get(key)) is not None},
    )


def _completed(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with the settings that it lacks, because it is older than they are, as they are by default."""
    defaults = Recipe().to_dict()
    tables = {key: {**table, **recipe.get(key, {})} for key, table in defaults.items() if isinstance(table, dict)}
    return {**defaults, **recipe, **tables}


def _with_metrics(run: Run) -> Run:
    if not run.metrics:
        return run
    last = run.metrics[-1]
    best = max(run.metrics, key=lambda epoch: epoch.test_accuracy)
    return replace(
        run,
        accuracy=last.test_accuracy,
        best_accuracy=best.test_accuracy,
        best_epoch=best.epoch,
        step_ms=step_time((epoch.step_ms, epoch.perturbed) for epoch in run.metrics),
        seconds=last.elapsed,
        perturbed=None if last.perturbed is None else fmean(epoch.perturbed or 0.0 for epoch in run.metrics),
    )


def _read_metrics(path: Path, finished: bool) -> tuple[Epoch, ...]:
    if not finished and not path.exists():
        return ()
    text = read_text(path)
    lines = text.splitlines()
    if not finished and lines and not text.endswith("\n"):
        lines.pop()  # the trainer is writing it, or was killed while it did
    epochs: list[Epoch] = []
    for number, line in enumerate(lines, 1):
        record = Record.parse(line, f"{path}, line {number}")
        density = record.values.get("mask_density")
        if density is not None and not (isinstance(density, dict) and all(map(is_number, density.values()))):
            raise record.wrong("mask_density", "an object of numbers or null")
        loss = record.values.get("train_loss")
        epoch = Epoch(
            epoch=record.whole("epoch"),
            # A diverged loss is NaN, or null where the writer keeps to strict JSON.
            train_loss=math.nan if loss is None or loss != loss else record.number("train_loss", finite=False),
            test_accuracy=record.number("test_accuracy"),
            elapsed=record.number("elapsed"),
            step_ms=record.number("step_ms"),
            perturbed=record.optional("perturbed"),
            mask_density=density,
        )
        if epochs and epoch.epoch <= epochs[-1].epoch:
            raise ReportError(f"{record.source}: epoch {epoch.epoch} comes after epoch {epochs[-1].epoch}")
        epochs.append(epoch)
    if finished and not epochs:
        raise ReportError(f"{path} is empty, but the run is finished")
    return tuple(epochs)
