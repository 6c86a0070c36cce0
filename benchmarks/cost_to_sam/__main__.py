"""The command: `train`, `measure` and `report`."""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

from pictures import changed
from processes import Slots, run_all

from sparsam.runs.files import replace_file

from .methods import METHODS
from .report import files
from .runs import Run, Unit, best_radii, final_runs, measurements, missing, results, search_runs
from .times import measure
from .workloads import WORKLOADS

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "results"
ON_GPU = 8  # runs of a process: beginning one takes as long as training a small network


def planned(options, places):
    """Return what is to be trained: the search first, since the table needs its radii."""
    if options.smoke:
        runs = [Run(workload, name, method.rho, 0) for workload in WORKLOADS for name, method in METHODS.items()]
    else:
        found = results(places)
        runs = dict.fromkeys([*search_runs(found), *final_runs(best_radii(found))])
    return [
        run
        for run in runs
        if run.workload in options.workloads and run.method in options.methods and run.seed in options.seeds
    ]


def train(options):
    """Train what has no file yet."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come
    places = [options.output, COMMITTED]
    left = missing(planned(options, places), places)
    count = 1 if options.device == "cpu" else ON_GPU
    units = [Unit(tuple(left[i : i + count]), options.data.absolute()) for i in range(0, len(left), count)]
    print(f"{len(left)} runs, about {sum(run.minutes for run in left) / 60:.1f} hours on one core")
    if options.list:
        for workload, count in Counter(run.workload for run in left).items():
            print(f"{workload}: {count}")
        return 0
    for name in sorted({WORKLOADS[run.workload].needs for run in left} - {""}):
        if not (options.data / name).exists():
            sys.exit(f"--data must be a folder that holds {name}, but {options.data} does not")
    failed = run_all([Slots("cost to SAM", units, options.cores, options.device, options)], options.minutes)
    for unit in failed:
        print(f"failed: {unit.name}; see {unit.log(options.output)}")
    return 1 if failed else 0


def report(options):
    """Write the page and the picture, or only say which of them would change."""
    places = [*filter(None, [options.output]), COMMITTED]
    texts = files(results(places), measurements(places), ROOT)
    if options.check:
        names = [str(path.relative_to(ROOT)) for path in changed(texts)]
        if names:
            sys.exit(f"not up to date: {', '.join(names)}; run python -m cost_to_sam report")
        return 0
    for path, text in texts.items():
        replace_file(path, text)
        print(path.relative_to(ROOT))
    return 0


def choose(command):
    """Let a command take names of workloads and methods."""
    for option, known in (("--workloads", WORKLOADS), ("--methods", METHODS)):
        names = f"{', '.join(known)}; all if not given"
        command.add_argument(option, nargs="+", choices=list(known), default=list(known), metavar="NAME", help=names)


def main():
    parser = argparse.ArgumentParser(
        prog="python -m cost_to_sam",
        description=sys.modules[__package__].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train", help="train what has no file yet")
    training.set_defaults(run=train)
    training.add_argument("--data", type=Path, default=Path("data"), help="holds CIFAR-10's folder and ETTh1.csv")
    choose(training)
    training.add_argument("--seeds", nargs="+", type=int, default=list(range(5)), help="all if not given")
    training.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="runs at once, a thread each")
    training.add_argument("--device", default="cpu", help="where the networks are, such as cuda")
    training.add_argument(
        "--minutes", type=float, help="stop after this many minutes; a run that is stopped starts again"
    )
    training.add_argument("--list", action="store_true", help="say how much is left, and train nothing")
    training.add_argument("--smoke", action="store_true", help="one epoch of each method and workload")
    training.add_argument("--output", type=Path, default=Path("runs"), help="where runs are written")
    measuring = commands.add_parser("measure", help="time the methods in turn, to compare with what is counted")
    measuring.set_defaults(run=measure)
    measuring.add_argument("--data", type=Path, default=Path("data"), help="holds CIFAR-10's folder and ETTh1.csv")
    choose(measuring)
    measuring.add_argument("--device", default="cpu", help="where the networks are, such as cuda")
    measuring.add_argument("--rounds", type=int, default=15, help="how often each method takes its turn")
    measuring.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    reporting = commands.add_parser("report", help="write results/cost-to-sam/README.md and the picture")
    reporting.set_defaults(run=report)
    reporting.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    reporting.add_argument("--output", type=Path, help="a folder whose runs are read too, beside those in results/")
    options = parser.parse_args()
    options.output = options.output and options.output.absolute()
    run = vars(options).pop("run")  # the processes get the options, and could not find this function
    sys.exit(run(options))


if __name__ == "__main__":
    main()
