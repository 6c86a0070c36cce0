"""Train what the documentation still lacks: `make gpu`.

gpu.toml lists jobs, the most important first: one list for the GPU, one for CPU cores. A job is a set of rows of
`sparsam reproduce`. Runs that have files in results/ are left out. On the GPU one run trains after another; beside it
each core trains a run of the other list, with one thread. The same command again goes on where it was stopped.

    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --data DATA --minutes 25 --archive runs/gpu.tar.gz

The archive holds what is to be committed to results/: recipe, environment, metrics, summary and what was measured of
the weights, but no weights.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import pickle
import shlex
import sys
import tarfile
import tempfile
import time
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from sparsam.cli import main as sparsam
from sparsam.data.cifar import LAYOUTS, TEST, TRAIN
from sparsam.errors import UserError
from sparsam.reproduce.comparison import find_runs
from sparsam.reproduce.experiments import chosen, find_experiments
from sparsam.reproduce.plan import plan_runs, without_known
from sparsam.runs.directory import RunDirectory, directories_in
from sparsam.training.interrupt import Interrupted
from sparsam.training.planned import PlannedRun, check_planned
from sparsam.training.progress import LogProgress
from sparsam.training.turns import train_runs

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
SMOKE = ["data.limit=16", "data.batch_size=4", "mask.samples=4", "train.max_steps=2"]  # in place of a list's settings
KEPT = ("*.json", "metrics.jsonl", "analysis/*.json")  # the files of a run that are committed
GPU, CPU = "gpu", "cpu"


@dataclass(frozen=True)
class Job:
    """Rows of tables, to be trained with some seeds.

    Args:
        why: What the runs are for.
        tables: Names of the paper's tables, or files.
        minutes: How long a run takes, roughly. Near the end of the time no run is begun that would not end in it.
        only: Texts that choose rows, as for `sparsam reproduce --only`; none: all rows.
        set: Settings for all rows.
        seeds: How many seeds. All rows are trained with the first one, then with the second one.
        share_start: Whether runs of a seed take their common base steps once.
        then: A command of `sparsam` after the runs of a seed, which may need their weights. {runs} stands for their
            paths, {output} for the folder, {set} for the settings.
        smoke: What shortens that command in a smoke test.
    """

    why: str
    tables: list[str]
    minutes: float
    only: list[str] = field(default_factory=list)
    set: list[str] = field(default_factory=list)
    seeds: int = 1
    share_start: bool = False
    then: str = ""
    smoke: str = ""

    def units(self, output, settings, known, *, smoke):
        """Return what is still to be trained, in parts that a process trains as a whole."""
        tables = chosen(find_experiments(self.tables), self.only)
        if smoke:
            tables = [replace(table, rows=tuple(map(_without_smoke_settings, table.rows))) for table in tables]
        wanted = [*self.set, *settings]
        meant = {setting for table in tables for row in table.rows for setting in row.relevant(wanted)}
        settings = tuple(setting for setting in wanted if setting in meant)
        missing, _ = without_known(plan_runs(tables, 1 if smoke else self.seeds, output, settings), known)
        groups = {}
        for run in sorted(missing, key=lambda run: run.recipe.train.seed):
            together = smoke or self.share_start or self.then
            groups.setdefault(run.recipe.train.seed if together else run.path, []).append(run)
        return [Unit(self, tuple(runs), settings) for runs in groups.values()]


def _without_smoke_settings(row):
    """Return a row of a table without the settings that a smoke test has for all rows."""
    keys = {setting.partition("=")[0] for setting in SMOKE}
    return replace(row, overrides=tuple(text for text in row.overrides if text.partition("=")[0] not in keys))


@dataclass(frozen=True)
class Unit:
    """Runs of a job that one process trains, one after another, and their settings."""

    job: Job
    runs: tuple[PlannedRun, ...]
    settings: tuple[str, ...]

    @property
    def name(self):
        """The first run's name, and how many more there are."""
        more = len(self.runs) - 1
        return self.runs[0].path.name + (f" and {more} more" if more else "")

    @property
    def minutes(self):
        """How long the unit takes, roughly."""
        return self.job.minutes * len(self.runs)

    def command(self, output, *, smoke):
        """Return the words of the command after the runs; none: there is none."""
        runs = shlex.join(str(run.path) for run in self.runs)
        changes = shlex.join(word for setting in self.settings for word in ("--set", setting))
        text = f"{self.job.then} {self.job.smoke if smoke else ''}"
        return shlex.split(text.format(runs=runs, output=output, set=changes))


def read_table():
    """Return the settings and the jobs of each list."""
    content = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {kind: (content[kind]["set"], [Job(**job) for job in content[kind]["jobs"]]) for kind in (GPU, CPU)}


def units_of(kind, options, known):
    """Return what is to be trained of a list, the most important first. A run that two jobs need is the first one's."""
    settings, jobs = read_table()[kind]
    changes = [*(SMOKE if options.smoke else settings), f"data.root={options.data.absolute()}"]
    units, planned = [], set()
    for job in jobs:
        for unit in job.units(options.output, changes, known, smoke=options.smoke):
            if runs := tuple(run for run in unit.runs if run.path not in planned):
                units.append(replace(unit, runs=runs))
                planned |= {run.path for run in runs}
    check_planned([run for unit in units for run in unit.runs])
    return units


def train_unit(unit, device, options, log):
    """Train the runs of a unit, then take its command. This is all that a process does."""
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            failed = train_runs(
                unit.runs,
                device=torch.device(device),
                keep_going=True,
                share_start=unit.job.share_start,
                progress=lambda: LogProgress(ends=True),
            )
            if failed:
                raise UserError("\n".join(failed))
            if command := unit.command(options.output, smoke=options.smoke):
                sys.argv = ["sparsam", *command]
                sparsam()
        except (Interrupted, UserError) as error:
            print(error)
            raise SystemExit(1) from error


class Slots:
    """Processes that train units side by side, as many as there are places.

    Args:
        units: What to train, the most important first.
        places: How many at once.
        device: Where.
        options: Of the command.
    """

    def __init__(self, units, places, device, options):
        self.waiting, self.places, self.device, self.options = list(units), places, device, options
        self.running, self.failed = [], []
        self.logs = options.output / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def poll(self, left):
        """Note what has ended, and begin what fits into the minutes that are left."""
        for entry in self.running.copy():
            unit, process, started = entry
            if process.exitcode is None:
                continue
            self.running.remove(entry)
            ended = all(RunDirectory(run.path).finished for run in unit.runs) and process.exitcode == 0
            word = "finished" if ended else "not finished"
            print(f"{self.device}: {unit.name}: {word} after {(time.monotonic() - started) / 60:.1f} min", flush=True)
            if not ended:
                self.failed.append(unit)
        while len(self.running) < self.places and (unit := next((u for u in self.waiting if u.minutes <= left), None)):
            self.waiting.remove(unit)
            log = self.logs / f"{unit.runs[0].path.name}.log"
            context = multiprocessing.get_context("spawn")
            process = context.Process(target=train_unit, args=(unit, self.device, self.options, log))
            process.start()
            self.running.append((unit, process, time.monotonic()))

    def stop(self):
        """Let every process save its run and end."""
        for _, process, _ in self.running:
            process.terminate()
        for _, process, _ in self.running:
            process.join()

    def place(self):
        """Return in a few words how far it is: the epoch of its first process."""
        now = [RunDirectory(run.path) for unit, *_ in self.running[:1] for run in unit.runs]
        current = next((run for run in now if run.exists and not run.finished), None)
        where = f" {current.path.name}, epoch {len(current.epochs()) + 1};" if current else ""
        return f"{self.device}:{where} {len(self.running)} running, {len(self.waiting)} waiting"


def pack(output, archive):
    """Write the small files of all finished runs into one archive; return how many runs it holds."""
    finished = [path for path in directories_in(output) if RunDirectory(path).finished]
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
        for path in finished:
            for file in sorted(file for pattern in KEPT for file in path.glob(pattern)):
                content = file.read_bytes()
                if file.name == "recipe.json":  # where the data were says nothing to others
                    recipe = json.loads(content)
                    recipe["data"]["root"] = "data"
                    content = (json.dumps(recipe, indent=2) + "\n").encode()
                entry = tarfile.TarInfo(str(file.relative_to(output)))
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return len(finished)


def write_noise(folder):
    """Write random images in the layout of CIFAR-10 and CIFAR-100."""
    for layout in LAYOUTS.values():
        place = folder / layout.folder
        place.mkdir(parents=True)
        for files, count in ((layout.train, TRAIN), (layout.test, TEST)):
            for file in files:
                images = count // len(files)
                content = {
                    b"data": np.random.default_rng(0).integers(0, 256, (images, 3 * 32 * 32), np.uint8),
                    layout.labels: [i % layout.classes for i in range(images)],
                }
                with (place / file).open("wb") as opened:
                    pickle.dump(content, opened)


def show(kind, units):
    """Print what a list still lacks, a line for each job."""
    print(f"{kind}: {sum(len(unit.runs) for unit in units)} runs, {sum(unit.minutes for unit in units):.0f} minutes")
    for job in dict.fromkeys(unit.job.why for unit in units):
        own = [unit for unit in units if unit.job.why == job]
        count, minutes = sum(len(unit.runs) for unit in own), sum(unit.minutes for unit in own)
        print(f"{count:5} runs, {minutes:4.0f} min: {job} ({own[0].runs[0].path.name}{', ...' if count > 1 else ''})")


def train(options, known):
    """Train; return whether all that was begun has ended well."""
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    slots = []
    for kind in options.lists:
        units = units_of(kind, options, known)
        show(kind, units)
        on_gpu = kind == GPU and not options.smoke
        slots.append(Slots(units, 1 if on_gpu else options.cores, "cuda" if on_gpu else "cpu", options))
    shown = time.monotonic()
    try:
        while True:
            left = (deadline - time.monotonic()) / 60
            for slot in slots:
                slot.poll(left)
            if left <= 0 or not any(slot.running for slot in slots):
                break
            if time.monotonic() - shown > 60:
                shown = time.monotonic()
                print("; ".join(slot.place() for slot in slots), flush=True)
            time.sleep(0.2)
    except KeyboardInterrupt:
        left = 0
        print("stopping; the same command goes on from here")
    for slot in slots:
        slot.stop()
        slot.poll(left=0)
    failed = [unit for slot in slots for unit in slot.failed]
    for unit in failed:
        print(f"not finished: {unit.name}; its log: {options.output}/logs/{unit.runs[0].path.name}.log")
    return left <= 0 or not failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder with CIFAR-10 and CIFAR-100")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes; the same command goes on later")
    parser.add_argument("--cores", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="CPU runs at once")
    parser.add_argument("--lists", nargs="+", choices=[GPU, CPU], default=[GPU, CPU], help="which lists to train")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="where runs are written")
    parser.add_argument("--archive", type=Path, help="where the small files are packed; default: OUTPUT.tar.gz")
    parser.add_argument("--list", action="store_true", help="show what is to be trained, and train nothing")
    parser.add_argument("--smoke", action="store_true", help="two steps of each row on the CPU, on random images")
    options = parser.parse_args()
    options.output = options.output.absolute()
    os.chdir(ROOT)  # tables name their recipes from here
    known = [] if options.smoke else find_runs(ROOT / "results")
    if options.list:
        for kind in options.lists:
            show(kind, units_of(kind, options, known))
        return
    if GPU in options.lists and not options.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU; --lists cpu trains what CPU cores are for, --smoke tries two steps of each row")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            options.data = Path(folder)
            write_noise(options.data)
        good = train(options, known)
    archive = options.archive or options.output.with_suffix(".tar.gz")
    print(f"{pack(options.output, archive)} finished runs: {archive}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
