"""What is trained, in which order, and the file of each run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import torch

from sparsam.runs.files import replace_file
from sparsam.training.environment import describe_environment

from .methods import METHODS
from .training import train
from .workloads import WORKLOADS

FOLDER = Path("cost-to-sam")  # in results/, and in an output folder
TIMES = "times"  # in it, for what steps took
SEARCH_SEEDS, SEEDS = (0,), range(5)


@dataclass(frozen=True)
class Run:
    """A run; its radius is None where nothing is perturbed."""

    workload: str
    method: str
    rho: float | None
    seed: int

    @property
    def minutes(self) -> float:
        """How long it takes on a core, roughly."""
        method = METHODS[self.method]
        return WORKLOADS[self.workload].minutes * method.epochs * method.passes

    @property
    def file(self) -> Path:
        """Where it is written, below the folder of all runs."""
        rho = "" if self.rho is None else f"-rho{self.rho:g}"
        return FOLDER / self.workload / f"{self.method}{rho}-seed{self.seed}.json"


@dataclass(frozen=True)
class Unit:
    """Runs that a process trains one after another (:mod:`processes`)."""

    runs: tuple[Run, ...]
    data: Path

    @property
    def name(self) -> str:
        """The name of the first run, and how many follow it."""
        first, more = self.runs[0], len(self.runs) - 1
        return f"{first.workload}/{first.file.stem}" + (f" and {more} more" if more else "")

    progress = name

    @property
    def count(self) -> int:
        """How many runs these are."""
        return len(self.runs)

    @property
    def minutes(self) -> float:
        """How much time there should be to begin: a process that is stopped loses one run."""
        return max(run.minutes for run in self.runs)

    def log(self, output: Path) -> Path:
        """Return the file for what its process prints."""
        first = self.runs[0]
        return output / "logs" / f"{first.workload}-{first.file.stem}.log"

    def train(self, device: str, options: Any) -> None:
        """Train the runs and write the file of each."""
        torch.set_num_threads(1)
        for run in self.runs:
            if options.smoke:
                type(WORKLOADS[run.workload]).epochs = 1
            about = {"workload": run.workload, "method": run.method, "seed": run.seed}
            environment = describe_environment(torch.device(device))
            result = train(run.workload, run.method, run.rho, run.seed, self.data, device)
            content = {**about, **result, "source": source(), "environment": environment}
            path = options.output / run.file
            path.parent.mkdir(parents=True, exist_ok=True)
            ended = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
            replace_file(path, json.dumps({**content, "ended": ended}, indent=1) + "\n")


def source() -> str:
    """Return a hash of the files that define the benchmark, without the report."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def final_runs(best: dict[tuple[str, str], float]) -> list[Run]:
    """Return the runs of the table, seed by seed: each method in its one setting, and with its best radius."""
    return [
        Run(workload, name, rho, seed)
        for seed in SEEDS
        for workload in WORKLOADS
        for name, method in METHODS.items()
        for rho in dict.fromkeys((method.rho, best.get((workload, name), method.rho)))
    ]


def search_runs(found: list[dict[str, Any]]) -> list[Run]:
    """Return the runs that choose a radius, as far as the runs that there are tell."""
    return [
        Run(workload, name, rho, seed)
        for (workload, name), (radii, _) in searches(found).items()
        for rho in radii
        for seed in SEARCH_SEEDS
    ]


def missing(runs: list[Run], places: list[Path]) -> list[Run]:
    """Return the runs without a file in any of the places."""
    return [run for run in runs if not any((place / run.file).is_file() for place in places)]


def results(places: list[Path]) -> list[dict[str, Any]]:
    """Read all runs in some places; a run counts once."""
    return [*read(places, WORKLOADS).values()]


def measurements(places: list[Path]) -> dict[str, dict[str, Any]]:
    """Read what the methods' steps took, by the name of the machine's file."""
    return {file.stem: content for file, content in read(places, [TIMES]).items()}


def read(places: list[Path], folders: Iterable[str]) -> dict[Path, dict[str, Any]]:
    """Read the files in some folders. A file of an earlier place stands for those in later ones."""
    files = {
        file.relative_to(place): file
        for place in reversed(places)
        for folder in folders
        for file in (place / FOLDER / folder).glob("*.json")
    }
    return {file: json.loads(path.read_text(encoding="utf-8")) for file, path in sorted(files.items())}


def searches(found: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[list[float], float | None]]:
    """Return which radii are searched for each workload and method, and which is best on validation data.

    A search begins with the method's radii. While the best is at an end, it goes on beyond it, by halves or doubles.
    The best of a search that is not finished is None.
    """
    values = {
        (result["workload"], result["method"], result["rho"], result["seed"]): goodness(result) for result in found
    }

    def search(workload: str, name: str) -> tuple[list[float], float | None]:
        radii = [*METHODS[name].search]
        while True:
            means = [sum(values.get((workload, name, rho, seed), nan) for seed in SEARCH_SEEDS) for rho in radii]
            if any(map(isnan, means)):
                return radii, None
            best = radii[means.index(max(means))]
            if best == radii[0]:
                radii.insert(0, radii[0] / 2)
            elif best == radii[-1]:
                radii.append(2 * radii[-1])
            else:
                return radii, best

    return {
        (workload, name): search(workload, name)
        for workload in WORKLOADS
        for name, method in METHODS.items()
        if method.search
    }


def best_radii(found: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """Return the best radius on validation data, where a search is finished."""
    return {key: best for key, (_, best) in searches(found).items() if best is not None}


def goodness(result: dict[str, Any]) -> float:
    """Return the metric on validation data, positive is better; a training that diverged has the worst."""
    value = result["validation"]["last"]
    sign = -1 if WORKLOADS[result["workload"]].lower_is_better else 1
    return -inf if value is None else sign * value
