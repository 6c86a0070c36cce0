"""A run as it was recorded: the files of a run directory, checked key by key."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from sparsam.runs.directory import RunDirectory
from sparsam.runs.files import RunError
from sparsam.runs.recipe import RecipeError, images_to_evaluate, recipe_from
from sparsam.runs.record import Record, is_number, shown
from sparsam.runs.same import COMPUTATION, settings_of
from sparsam.step_cost import StepRatio

TEXTS = ("model.name", "data.name", "mask.name", "train.precision")  # keys of recipe.json that Run relies on
NUMBERS = ("data.batch_size", "optimizer.weight_decay", "sam.rho", "train.epochs")
WORKLOAD = {
    *("model.name", "model.stem", "data.name", "data.batch_size", "data.image_size", "optimizer.name"),
    *COMPUTATION,
}


@dataclass(frozen=True)
class Epoch:
    """What was measured in one epoch."""

    epoch: int
    steps: float | None  # since the start of the run
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
    accuracy: float | None = None
    best_accuracy: float | None = None
    best_epoch: int | None = None
    step_ms: float | None = None
    step_ratio: StepRatio | None = None
    """What a step takes in steps of the base optimizer, where the two were timed in turn."""
    seconds: float | None = None
    peak_memory_mb: float | None = None
    perturbed: float | None = None
    theoretical_flops: float | None = None
    """By the paper's formula; None with a cut, which it is not for, though older versions wrote the number."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further numbers by their label."""
    measured: dict[str, dict[str, str | None]] = field(default_factory=dict)
    """Of the step ratio and of further numbers that were measured after the run: device, torch and git commit."""

    @property
    def setup(self) -> str:
        """The network and the data, in words."""
        return f"{self.recipe['model']['name']} on {self.recipe['data']['name']}"

    @property
    def workload(self) -> tuple[Any, ...]:
        """What two runs must share for their step times to be comparable."""
        device = self.environment["device"]
        details = ("processor", "threads") if device == "cpu" else ()
        machine = (device, self.environment.get("processes", 1), *(self.environment.get(detail) for detail in details))
        return frozenset(item for item in settings_of(self.recipe, ()) if item[0] in WORKLOAD), machine

    @property
    def seeds(self) -> tuple[object, ...]:
        """The seed of the run, and those of its masks."""
        mask, inner = self.recipe["mask"], self.recipe["mask"].get("inner")
        return self.seed, mask.get("seed") or 0, (isinstance(inner, dict) and inner.get("seed")) or 0

    @property
    def commits(self) -> list[str | None]:
        """The git commits that its steps were taken with, each once; None: outside a checkout, or not noted."""
        return list(dict.fromkeys(_commits(self.environment))) or [None]

    @property
    def planned_epochs(self) -> int | None:
        """How many epochs the run has when it is finished, the last of them perhaps in part.

        None: `train.max_steps` ends it, and how many steps an epoch has is not known yet.
        """
        epochs, steps = int(self.recipe["train"]["epochs"]), self.recipe["train"].get("max_steps")
        if self.finished:
            return self.metrics[-1].epoch
        if steps is None:
            return epochs
        epoch_steps = self.metrics[0].steps if self.metrics else None
        return min(epochs, math.ceil(steps / epoch_steps)) if epoch_steps else None

    @property
    def train_loss(self) -> float | None:
        """The mean loss of the last epoch's steps; None if there is none, or it diverged."""
        loss = self.metrics[-1].train_loss if self.metrics else math.nan
        return loss if math.isfinite(loss) else None

    @property
    def sam(self) -> bool:
        """Whether weights are perturbed at all."""
        return bool(self.recipe["sam"]["enabled"])

    @property
    def masked(self) -> bool:
        """Whether only some of the weights are perturbed."""
        return self.sam and self.recipe["mask"]["name"] != "dense"

    @property
    def rho(self) -> float | None:
        """The radius; None without SAM."""
        return self.recipe["sam"]["rho"] if self.sam else None

    @property
    def other_radii(self) -> dict[str, float]:
        """The radii of ascents that have one of their own, by the ascents' names."""
        ascents = self.recipe.get("ascent"), self.recipe.get("schedule", {}).get("before")
        return {ascent["name"]: ascent["rho"] for ascent in ascents if ascent and ascent.get("rho") is not None}

    @property
    def weight_decay(self) -> float:
        """The weight decay of the base optimizer."""
        return float(self.recipe["optimizer"]["weight_decay"])


def _commits(environment: dict[str, Any]) -> Iterator[str | None]:
    """Yield the commits of a shared start, of the run itself and of where it was resumed, if they were noted."""
    if "start" in environment:
        yield from _commits(environment["start"])
    for part in (environment, *environment.get("resumed", [])):
        if "git" in part:
            yield part["git"]


def read_run(directory: str | Path) -> Run:
    """Read one run directory.

    Raises:
        RunError: It is not a run directory, or a file in it is missing or has a wrong value.
    """
    files = RunDirectory(directory)
    if not files.path.is_dir():
        raise RunError(f"{directory} is not a directory")
    recipe, environment = files.read("recipe.json"), files.read("environment.json")
    for key in TEXTS:
        recipe.text(key)
    for key in NUMBERS:
        recipe.number(key)
    recipe.flag("sam.enabled")
    for key in ("sparsam", "torch", "python", "device"):
        environment.text(key)
    run = Run(
        directory=files.path,
        name=recipe.text("name"),
        method=method_of(recipe),
        seed=recipe.whole("train.seed"),
        finished=files.finished,
        recipe=recipe.values,
        environment=environment.values,
        started=environment.time("started"),
        metrics=_read_epochs(files),
        evaluated_on=images_to_evaluate(recipe.values["data"].get("validation")),
    )
    return _with_summary(run, files.read("summary.json")) if files.finished else _with_metrics(run)


def method_of(recipe: Record) -> str:
    """Return what the method is called; the name of the recipe if it is of another version."""
    try:
        return recipe_from(recipe.values).method
    except RecipeError:
        return recipe.text("name")


def read_method(directory: str | Path) -> str:
    """Return what the method of a run is called, as :func:`read_run` does."""
    files = RunDirectory(directory)
    return files.read("summary.json").text("method") if files.finished else method_of(files.read("recipe.json"))


def _read_epochs(files: RunDirectory) -> tuple[Epoch, ...]:
    epochs: list[Epoch] = []
    for record in files.epochs():
        density, loss = record.values.get("mask_density"), record.values.get("train_loss")
        if density is not None and not (isinstance(density, dict) and all(map(is_number, density.values()))):
            raise record.wrong("mask_density", "an object of numbers or null")
        epoch = Epoch(
            epoch=record.whole("epoch"),
            steps=record.optional("steps"),
            # A diverged loss is NaN, or null where the writer keeps to strict JSON.
            train_loss=math.nan if loss is None or loss != loss else record.number("train_loss", finite=False),
            test_accuracy=record.number("test_accuracy"),
            elapsed=record.number("elapsed"),
            step_ms=record.number("step_ms"),
            perturbed=record.optional("perturbed"),
            mask_density=density,
        )
        if epochs and epoch.epoch <= epochs[-1].epoch:
            raise RunError(f"{record.source}: epoch {epoch.epoch} comes after epoch {epochs[-1].epoch}")
        epochs.append(epoch)
    if files.finished and not epochs:
        raise RunError(f"{files.path / 'metrics.jsonl'} is empty, but the run is finished")
    return tuple(epochs)


def _with_summary(run: Run, summary: Record) -> Run:
    if summary.text("evaluated_on") not in ("test", "validation"):
        raise summary.wrong("evaluated_on", "'test' or 'validation'")
    extra = summary.values.get("extra") or {}
    if not isinstance(extra, dict):
        raise summary.wrong("extra", "an object")
    for label, value in extra.items():
        if value is not None and not (is_number(value) and math.isfinite(value)):
            raise RunError(f"{summary.source}: extra {label!r} must be a number, but is {shown(value)}")
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
        step_ratio=_step_ratio(summary),
        seconds=summary.optional("seconds"),
        peak_memory_mb=summary.optional("peak_memory_mb"),
        perturbed=summary.optional("perturbed"),
        theoretical_flops=summary.optional("theoretical_flops") if run.recipe["mask"].get("cut") is None else None,
        extra={label: float(value) for label, value in extra.items() if value is not None},
        measured=_measured(summary),
    )


def _step_ratio(summary: Record) -> StepRatio | None:
    if summary.values.get("step_ratio") is None:
        return None
    low, middle, high = (summary.number(f"step_ratio.{key}") for key in ("low", "median", "high"))
    return StepRatio(middle, low, high, summary.whole("step_ratio.rounds"))


def _measured(summary: Record) -> dict[str, dict[str, str | None]]:
    found = summary.values.get("measured") or {}
    if not isinstance(found, dict):
        raise summary.wrong("measured", "an object")
    for label, about in found.items():
        known = isinstance(about, dict) and all(isinstance(about.get(key), str) for key in ("device", "torch"))
        if not known or not isinstance(about.get("git"), str | None):
            allowed = "an object with device, torch and git, which may be null"
            raise RunError(f"{summary.source}: measured {label!r} must be {allowed}, but is {shown(about)}")
    return found


def _with_metrics(run: Run) -> Run:
    """Return an unfinished run with its numbers so far."""
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


def step_time(epochs: Iterable[tuple[float, float | None]]) -> float:
    """Return the mean time of a step.

    Epochs that perturb the same share of the weights count at their median. So one slow epoch does not count, such as
    the first, but sharpness-aware steps at the end do.

    Args:
        epochs: For each epoch, the time of a step and the share of the weights that is perturbed.

    >>> step_time([(9.0, 0.0), (1.0, 0.0), (1.0, 0.0), (2.0, 1.0)])
    1.25
    """
    alike: defaultdict[object, list[float]] = defaultdict(list)
    for time, perturbed in epochs:
        # A step that perturbs anything at all takes a second pass.
        alike[None if perturbed is None else (perturbed > 0, round(perturbed, 2))].append(time)
    return sum(len(times) * median(times) for times in alike.values()) / sum(map(len, alike.values()))
