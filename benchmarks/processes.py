"""Trainings side by side, a process each: begun in order, stopped in time, with what they print in files.

A unit is what a process trains. It has a `name`, a `count` of runs, the `minutes` that they take, its `progress` in
words, and `log(output)`, the file for what it prints. `train(device, options)` does the work and goes
on where it was stopped.
"""

import contextlib
import multiprocessing
import signal
import threading
import time

from sparsam.errors import UserError
from sparsam.training.interrupt import Interrupted, stopping_on_signals

STOPPED = 3  # how a process ends that was asked to stop


class Slots:
    """Processes that train the units of a list side by side, as many as there are places.

    Args:
        kind: The list.
        units: What to train, the most important first.
        places: How many units at once.
        device: Where.
        options: Of the command.
    """

    def __init__(self, kind, units, places, device, options):
        self.kind, self.waiting, self.places, self.device, self.options = kind, list(units), places, device, options
        self.running, self.failed = [], []
        (options.output / "logs").mkdir(parents=True, exist_ok=True)

    def poll(self, left):
        """Report the processes that have ended, and begin those that fit into the minutes that are left."""
        for entry in self.running.copy():
            unit, process, started = entry
            if process.exitcode is None:
                continue
            self.running.remove(entry)
            how = {0: "finished", STOPPED: "stopped", -signal.SIGTERM: "stopped"}.get(process.exitcode, "failed")
            print(f"{self.kind}: {unit.name}: {how} after {(time.monotonic() - started) / 60:.1f} min", flush=True)
            if how == "failed":
                self.failed.append(unit)
        while len(self.running) < self.places and (unit := next((u for u in self.waiting if u.minutes <= left), None)):
            self.waiting.remove(unit)
            context = multiprocessing.get_context("spawn")
            process = context.Process(target=train, args=(unit, self.device, self.options))
            process.start()
            self.running.append((unit, process, time.monotonic()))

    def stop(self):
        """Let every process save its run and end."""
        for _, process, _ in self.running:
            process.terminate()
        for _, process, _ in self.running:
            process.join()

    def progress(self):
        """Return in a few words how far the list is, with what its first process trains."""
        first = "".join(f" {unit.progress};" for unit, *_ in self.running[:1])
        return f"{self.kind}:{first} {len(self.running)} running, {len(self.waiting)} waiting"


def train(unit, device, options):
    """Train a unit. This is all that a process does."""
    with unit.log(options.output).open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            unit.train(device, options)
        except (Interrupted, UserError) as error:
            print(error)
            raise SystemExit(STOPPED if isinstance(error, Interrupted) else 1) from error


def run_all(slots, minutes=None):
    """Train until nothing is left, or for this many minutes; return the units that failed."""
    deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    asked, shown = threading.Event(), time.monotonic()
    with stopping_on_signals(asked.set):
        while (left := (deadline - time.monotonic()) / 60) > 0 and not asked.wait(0.2):
            for slot in slots:
                slot.poll(left)
            if not any(slot.running for slot in slots):
                break
            if time.monotonic() - shown > 60:
                shown = time.monotonic()
                print("; ".join(slot.progress() for slot in slots), flush=True)
        if any(slot.running for slot in slots):
            print("stopping: runs are saved, and the same command goes on from there", flush=True)
        for slot in slots:
            slot.stop()
            slot.poll(left=0)
            if slot.waiting:
                print(f"{slot.kind}: {count(slot.waiting)} runs are left; there was no time for them")
    return [unit for slot in slots for unit in slot.failed]


def count(units):
    """Return how many runs units have."""
    return sum(unit.count for unit in units)
