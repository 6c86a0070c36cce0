"""Several runs on one device: one after the other, or side by side, a step each in turn."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from sparsam.errors import UserError, UserRuntimeError
from sparsam.randomness import RngState, get_rng_state, set_rng_state
from sparsam.runs.directory import RunDirectory
from sparsam.runs.recipe import Recipe
from sparsam.runs.schema import RecipeError
from sparsam.training.environment import measured_with
from sparsam.training.interrupt import Interrupted, stopping_on_signals
from sparsam.training.launch import open_run
from sparsam.training.planned import PlannedRun
from sparsam.training.progress import Progress
from sparsam.training.shared_start import SharedStart
from sparsam.training.step_times import step_ratios
from sparsam.training.trainer import Trainer


def train_runs(
    planned: Sequence[PlannedRun],
    *,
    device: torch.device,
    at_once: int = 1,
    shared: bool = False,
    keep_going: bool = False,
    share_start: bool = False,
    progress: Callable[[], Progress] = Progress,
) -> list[str]:
    """Train those runs that are not finished; continue those that were stopped. Return which failed, and why.

    Args:
        planned: What to train, and where.
        device: Where to train.
        at_once: How many runs take turns on the device, a step each; on a GPU they overlap, on streams of their own.
            Their step times and memory would not be those of a run alone, so summaries of such runs have none.
        shared: Whether other processes train on the device too, which counts as above.
        keep_going: After an error that the user can mend, train the other runs. Else it is raised.
        share_start: Whether runs that begin with the same steps take them once (:mod:`~.shared_start`).
        progress: Makes what shows the progress, anew for each run.
    """
    threads = torch.get_num_threads()
    names: dict[str, set[str]] = {}  # of the recipes of each method
    for recipe, _ in planned:
        names.setdefault(recipe.method, set()).add(recipe.name)

    def trainer(run: PlannedRun) -> Trainer | None:
        gc.collect()  # the run before must not count in this one's memory
        torch.set_num_threads(threads)
        shown = progress()
        shown.place = f"{planned.index(run) + 1} of {len(planned)}" if len(planned) > 1 else ""
        shown.label = run.recipe.method if len(names[run.recipe.method]) == 1 else run.recipe.name
        return open_run(run.recipe, run.path, device=device, progress=shown)

    unfinished = [run for run in planned if not RunDirectory(run.path).finished]
    start = SharedStart(unfinished if share_start else [])
    failed = _take_turns(unfinished, trainer, start, at_once, device, shared=shared, keep_going=keep_going)
    torch.set_num_threads(threads)
    return failed


def time_steps(
    planned: Sequence[PlannedRun], *, device: torch.device, rounds: int, about: dict[str, str | None] | None = None
) -> None:
    """Time all methods in turn and write the result into the runs' summaries, if one of them lacks it.

    Args:
        planned: Finished runs.
        device: Where.
        rounds: How many times each method takes a step (:mod:`sparsam.training.step_times`).
        about: What it is measured with; None: that is found out here (:func:`~.environment.measured_with`).
    """
    if all("step_ratio" in RunDirectory(path).summary() for _, path in planned):
        return
    about = about or measured_with(device)
    methods = list(dict.fromkeys(without_seed(recipe) for recipe, _ in planned))
    try:
        found = step_ratios(methods, device=device, rounds=rounds)
    except torch.OutOfMemoryError as error:
        raise UserRuntimeError(
            "all runs are finished, but there is too little memory to time them in turn; name fewer, or leave it out"
        ) from error
    ratios = dict(zip(methods, found, strict=True))
    for recipe, path in planned:
        ratio = ratios[without_seed(recipe)].to_dict()
        RunDirectory(path).add_to_summary({"step_ratio": ratio, "measured": {"step_ratio": about}})


def without_seed(recipe: Recipe) -> Recipe:
    """Return what the seeds of a method have in common, and with it the time of their steps."""
    return replace(recipe, train=replace(recipe.train, seed=0))


def _take_turns(
    waiting: list[PlannedRun],
    trainer: Callable[[PlannedRun], Trainer | None],
    start: SharedStart,
    at_once: int,
    device: torch.device,
    *,
    shared: bool,
    keep_going: bool,
) -> list[str]:
    """Train `at_once` runs side by side, a step each in turn, until none is left."""
    turns = deque[_Turns]()
    failed: list[str] = []
    errors: list[Exception] = []
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        for turn in turns:
            turn.run.stop()

    def fail(recipe: Recipe, error: Exception) -> None:
        """Save the other runs before an error is raised."""
        if isinstance(error, UserError):
            named = RecipeError(f"{recipe.name}, seed {recipe.train.seed}: {error}")
            if keep_going:
                failed.append(str(named))
                return
            named.__cause__, error = error, named
        errors.append(error)
        stop()

    with stopping_on_signals(stop):
        while True:
            free = len(turns) < at_once and not stopped
            if free and (planned := next(filter(start.is_ready, waiting), None)):
                waiting.remove(planned)
                try:
                    run = trainer(planned)
                except Exception as error:
                    fail(planned.recipe, error)
                    for other, reason in start.not_opened(planned, error):
                        waiting.remove(other)
                        fail(other.recipe, reason)
                    continue
                if run is None:  # another process has finished it
                    start.release(planned.path)
                    continue
                start.attach(run)
                turns.appendleft(_Turns(run, device, alone=at_once == 1, shared=shared))
                if stopped:  # while it was being made
                    run.stop()
                run = None  # it must be gone before the next one is made
            if not turns:
                break
            try:
                turns[0].take()
                turns.rotate(-1)
            except StopIteration:
                start.release(turns.popleft().run.directory.path)
            except Exception as error:
                run = turns.popleft().run
                start.release(run.directory.path)
                fail(run.recipe, error)
                run = None
    if stopped:
        none = Interrupted("stopped before the next run was begun")
        raise min(errors, key=lambda error: isinstance(error, Interrupted), default=none)  # why runs were stopped
    return failed


class _Turns:
    """A run that takes turns with others: its steps, its stream, and its random numbers, which others must not move."""

    def __init__(self, run: Trainer, device: torch.device, *, alone: bool, shared: bool) -> None:
        self.run, self.device, self.alone = run, device, alone
        run.untimed |= shared or not alone
        self._steps = run.steps()
        self._stream = None if alone else _stream(device)
        self._random: RngState = get_rng_state([device])

    def take(self) -> None:
        """Take one step."""
        if self.alone:
            next(self._steps)
            return
        set_rng_state(self._random)
        with torch.cuda.stream(self._stream):
            try:
                next(self._steps)
            finally:
                self._random = get_rng_state([self.device])


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))  # for what the run's making has launched
    return stream
