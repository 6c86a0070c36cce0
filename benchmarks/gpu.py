"""Train what the documentation still lacks: `make gpu`.

gpu.toml lists jobs, the most important first: one list for the GPU, one for CPU cores. A job is a set of rows of
`sparsam reproduce`. Runs that have files in results/ are left out. On the GPU one run trains after another. Beside it
each core trains a run of the other list, with one thread. The same command again goes on where it was stopped.

    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --data DATA --minutes 25

At the end the files that are to be committed are packed into OUTPUT.tar.gz, to be unpacked in results/: recipe,
environment, metrics, summary and what was measured of the weights, but no weights.
"""

import argparse
import io
import json
import os
import pickle
import shlex
import shutil
import sys
import tarfile
import tempfile
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from processes import Slots, count, run_all

from sparsam.cli import main as sparsam
from sparsam.data.cifar import LAYOUTS, TEST, TRAIN
from sparsam.errors import UserError
from sparsam.reproduce.comparison import find_runs
from sparsam.reproduce.experiments import chosen, find_experiments
from sparsam.reproduce.plan import plan_runs, without_known
from sparsam.runs.directory import RunDirectory, directories_in
from sparsam.runs.same import INCIDENTAL
from sparsam.training.planned import PlannedRun, check_planned
from sparsam.training.progress import LogProgress
from sparsam.training.turns import train_runs

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
SMOKE = [  # instead of a list's settings
    "data.limit=16",
    "data.batch_size=4",
    "mask.samples=4",
    "train.max_steps=2",
    "train.checkpoint_epochs=none",
]
KEPT = ("*.json", "metrics.jsonl", "analysis/*.json")  # the files of a run that are committed
DATA_ROOT = "data.root"
GPU, CPU = "gpu", "cpu"


@dataclass(frozen=True)
class Job:
    """Rows of tables, to be trained with some seeds.

    Args:
        why: What the runs are for.
        folder: Where they lie in results/.
        tables: Names of the paper's tables, or files.
        minutes: How long a run takes, roughly. Near the end of the time no run is begun that would not end in it.
        only: Texts that choose rows, as for `sparsam reproduce --only`; none: all rows.
        set: Settings for all rows.
        seeds: How many seeds. All rows are trained with the first seed, then with the second.
        share_start: Whether runs of a seed take their common base steps once.
        afterwards: A command of `sparsam` after the runs of a seed, which may need their weights. {runs} stands for
            their paths, {output} for the folder, {seed} for the seed, {set} for those settings that choose runs.
        smoke: Options that shorten this command in a smoke test.
    """

    why: str
    folder: str
    tables: list[str]
    minutes: float
    only: list[str] = field(default_factory=list)
    set: list[str] = field(default_factory=list)
    seeds: int = 1
    share_start: bool = False
    afterwards: str = ""
    smoke: str = ""

    def units(self, settings, options, known):
        """Return what is still to be trained, in parts that a process trains as a whole."""
        tables = chosen(find_experiments(self.tables), self.only)
        if options.smoke:
            tables = [replace(table, rows=tuple(map(_without_smoke_settings, table.rows))) for table in tables]
        # A setting of the list is for rows that it has a meaning for: SGD has no mask.
        meant = {setting for table in tables for row in table.rows for setting in row.relevant(settings)}
        changes = (*self.set, *(setting for setting in settings if setting in meant))
        seeds = 1 if options.smoke else self.seeds
        missing, _ = without_known(plan_runs(tables, seeds, options.output / self.folder, changes), known)
        groups = {}
        for run in sorted(missing, key=lambda run: run.recipe.train.seed):
            together = options.smoke or self.share_start or self.afterwards
            groups.setdefault(run.recipe.train.seed if together else run.path, []).append(run)
        return [Unit(self, tuple(runs), changes) for runs in groups.values()]


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
    def unfinished(self):
        """The runs that are not finished."""
        return [run for run in self.runs if not RunDirectory(run.path).finished]

    @property
    def count(self):
        """How many runs are not finished."""
        return len(self.unfinished)

    @property
    def minutes(self):
        """How long they take, roughly."""
        return self.job.minutes * self.count

    @property
    def progress(self):
        """The run that is trained now and its epoch, in words."""
        runs = [RunDirectory(run.path) for run in self.runs]
        current = next((run for run in runs if run.exists and not run.finished), None)
        return f"{current.path.name}, epoch {len(current.epochs()) + 1}" if current else self.name

    def log(self, output, suffix="log"):
        """Return where its process writes what it prints; with the suffix "done", what says that all is done."""
        return output / "logs" / f"{self.runs[0].path.name}.{suffix}"

    def is_done(self, output):
        """Whether all is done that the unit asks for."""
        return not self.unfinished and self.log(output, "done").is_file()

    def train(self, device, options):
        """Train the runs, then run the command. This is all that a process does."""
        failed = train_runs(
            self.unfinished,
            device=torch.device(device),
            keep_going=True,
            share_start=self.job.share_start,
            progress=lambda: LogProgress(ends=True),
        )
        if failed:
            raise UserError("\n".join(failed))
        if command := self.command(options):
            run_command(command)
        self.log(options.output, "done").touch()
        if options.smoke:  # the weights of all rows would fill a disk
            for run in self.runs:
                shutil.rmtree(run.path / "checkpoints", ignore_errors=True)

    def command(self, options):
        """Return the words of the command after the runs, if there is one."""
        text = self.job.afterwards + (f" {self.job.smoke}" if options.smoke else "")
        chooses = [
            text for text in self.settings if (key := text.partition("=")[0]) not in INCIDENTAL or key == DATA_ROOT
        ]
        words = {
            "runs": shlex.join(str(run.path) for run in self.runs),
            "set": shlex.join(word for setting in chooses for word in ("--set", setting)),
            "seed": self.runs[0].recipe.train.seed,
        }
        return shlex.split(text.format(output=options.output, **words))


def read_table():
    """Return the settings and the jobs of each list."""
    content = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {kind: (content[kind]["set"], [Job(**job) for job in content[kind]["jobs"]]) for kind in (GPU, CPU)}


def units_of(kind, options, known):
    """Return what is to be trained of a list, the most important first. A run that two jobs need is in the first."""
    settings, jobs = read_table()[kind]
    changes = [*(SMOKE if options.smoke else settings), f"data.root={options.data}"]
    units, planned = [], set()
    for job in jobs:
        for unit in job.units(changes, options, known):
            runs = tuple(run for run in unit.runs if run.path.name not in planned)
            planned |= {run.path.name for run in runs}
            if runs and not (left := replace(unit, runs=runs)).is_done(options.output):
                units.append(left)
    return units


def run_command(words):
    """Run a command of `sparsam`. It ends with an exit of its own."""
    sys.argv = ["sparsam", *words]
    try:
        sparsam()
    except SystemExit as end:
        if end.code:
            raise UserError(f"sparsam {shlex.join(words)} failed") from end


def pack(output):
    """Write the small files of all finished runs into one archive; return its path and how many runs it holds."""
    finished = [path for path in directories_in(output) if RunDirectory(path).finished]
    archive = output.parent / f"{output.name}.tar.gz"
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
    return archive, len(finished)


def write_noise(folder):
    """Write random images in the layout of CIFAR-10 and CIFAR-100."""
    for layout in LAYOUTS.values():
        place = folder / layout.folder
        place.mkdir(parents=True)
        for files, total in ((layout.train, TRAIN), (layout.test, TEST)):
            for file in files:
                images = total // len(files)
                content = {
                    b"data": np.random.default_rng(0).integers(0, 256, (images, 3 * 32 * 32), np.uint8),
                    layout.labels: [i % layout.classes for i in range(images)],
                }
                with (place / file).open("wb") as opened:
                    pickle.dump(content, opened)


def show(kind, units):
    """Print what a list still lacks, a line for each job."""
    print(f"{kind}: {count(units)} runs, {sum(unit.minutes for unit in units):.0f} minutes")
    for job in dict.fromkeys(unit.job.why for unit in units):
        own = [unit for unit in units if unit.job.why == job]
        more = ", ..." if count(own) > 1 else ""
        print(f"{count(own):5} runs, {sum(unit.minutes for unit in own):4.0f} min: {job} ({own[0].name}{more})")


def train(options, known):
    """Train until nothing is left or the time is up; return the units that failed."""
    slots = []
    for kind in options.lists:
        units = units_of(kind, options, known)
        runs = [run for unit in units for run in unit.runs]
        check_planned(runs)
        check_data(runs, options.data)
        show(kind, units)
        on_gpu = kind == GPU and not options.smoke
        slots.append(Slots(kind, units, 1 if on_gpu else options.cores, "cuda" if on_gpu else "cpu", options))
    return run_all(slots, options.minutes)


def check_data(runs, folder):
    """Raise an error if a data set that runs need is not there."""
    for name in {run.recipe.data.name for run in runs} & LAYOUTS.keys():
        if not (folder / LAYOUTS[name].folder).is_dir():
            raise UserError(f"--data must be a folder that holds {LAYOUTS[name].folder}, but {folder} does not")


def positive(text):
    """Read a number above 0."""
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, but is {text}")
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder with CIFAR-10 and CIFAR-100")
    parser.add_argument("--minutes", type=positive, help="stop after this many minutes; the same command goes on later")
    parser.add_argument("--cores", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="CPU runs at once")
    parser.add_argument("--lists", nargs="+", choices=[GPU, CPU], default=[GPU, CPU], help="which lists to train")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="where runs are written")
    parser.add_argument("--list", action="store_true", help="show what is to be trained, and train nothing")
    parser.add_argument("--smoke", action="store_true", help="two steps of each row on the CPU, on random images")
    options = parser.parse_args()
    if options.cores < 1:
        parser.error(f"--cores must be at least 1, but is {options.cores}")
    options.output, options.data = options.output.absolute(), options.data.absolute()
    os.chdir(ROOT)  # tables name their recipes from here
    known = [] if options.smoke else find_runs(ROOT / "results")
    if options.list:
        for kind in options.lists:
            show(kind, units_of(kind, options, known))
        return
    if GPU in options.lists and not options.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU; --lists cpu trains what CPU cores are for, --smoke tries two steps of each row")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come
    try:
        with tempfile.TemporaryDirectory() as folder:
            if options.smoke:
                options.data = Path(folder)
                write_noise(options.data)
            failed = train(options, known)
    except UserError as error:
        parser.error(str(error))
    archive, packed = pack(options.output)
    print(f"{packed} finished runs: {archive}")
    for unit in failed:
        print(f"failed: {unit.name}; see {unit.log(options.output)}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
