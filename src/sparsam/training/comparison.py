"""Several recipes, several seeds."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from sparsam.errors import UserError, UserRuntimeError
from sparsam.randomness import RngState, get_rng_state, set_rng_state
from sparsam.runs.directory import RunDirectory
from sparsam.runs.recipe import Recipe, load_recipe, relevant_overrides
from sparsam.runs.schema import RecipeError
from sparsam.settings import differences
from sparsam.training.interrupt import Interrupted, stopping_on_signals
from sparsam.training.launch import new_run, old_run
from sparsam.training.progress import Progress
from sparsam.training.step_times import time_in_turn
from sparsam.training.trainer import Trainer

OF_THE_PROCESS = ("deterministic", "threads")  # settings of `train` that hold for all runs of a process


def compare_recipes(
    recipes: Sequence[str | Path],
    seeds: int,
    output: Path,
    *,
    overrides: Sequence[str] = (),
    device: torch.device,
    at_once: int = 1,
    rounds: int = 0,
    progress: Callable[[], Progress] = Progress,
) -> list[Path]:
    """Train every recipe with every seed; return the runs' directories.

    A run that is finished is left as it is and one that was stopped is continued, if its recipe is still the same.

    Args:
        recipes: Names or files.
        seeds: How many runs of each, with seeds 0, 1, ...
        output: Where the runs are written, as NAME-seedN.
        overrides: `key=value`, for all recipes that they have a meaning for: a sparsity is for sparse masks only.
        device: Where to train.
        at_once: How many runs take turns on the device, a step each; on a GPU they overlap, on streams of their own.
            Their step times and memory would not be those of a run alone, so summaries of such runs have none.
        rounds: Time the steps of all methods in turn afterwards (:mod:`sparsam.training.step_times`); 0: do not.
        progress: Makes what shows the progress, anew for each run.
    """
    planned = _plan(recipes, seeds, output, overrides, at_once)
    threads = torch.get_num_threads()

    def trainer(recipe: Recipe, path: Path) -> Trainer:
        gc.collect()  # the run before must not count in this one's memory
        torch.set_num_threads(threads)
        if RunDirectory(path).exists:
            return old_run(path, device=device, progress=progress())
        return new_run(recipe, path, device=device, progress=progress())

    unfinished = [(recipe, path) for recipe, path in planned if not RunDirectory(path).finished]
    _take_turns((partial(trainer, recipe, path) for recipe, path in unfinished), at_once, device)
    if rounds:
        torch.set_num_threads(threads)
        _time_steps(planned, device, rounds)
    return [path for _, path in planned]


def _plan(
    sources: Sequence[str | Path], seeds: int, output: Path, overrides: Sequence[str], at_once: int
) -> list[tuple[Recipe, Path]]:
    """Return the runs; check all of them before the first is trained."""
    planned = []
    used: set[str] = set()
    for source in sources:
        relevant = relevant_overrides(source, overrides)
        used.update(relevant)
        for seed in range(seeds):
            recipe = load_recipe(source, [*relevant, f"train.seed={seed}"])
            path = output / f"{recipe.name}-seed{seed}"
            run = RunDirectory(path)
            if run.exists and (changed := differences(run.recipe().to_dict(), recipe.to_dict())):
                raise RecipeError(
                    f"{path} holds a run of another recipe, which differs in {', '.join(changed)}; choose another "
                    f"--output or delete it"
                )
            planned.append((recipe, path))
    for override in overrides:
        if override not in used:
            raise RecipeError(f"{override.partition('=')[0]} has no meaning for any of the recipes; leave it out")
    for key in OF_THE_PROCESS:
        if at_once > 1 and len({getattr(recipe.train, key) for recipe, _ in planned}) > 1:
            raise RecipeError(f"runs at once must agree in train.{key}, which holds for the whole process")
    if len({path for _, path in planned}) < len(planned):
        raise RecipeError("the recipes must have different names, but two have the same")
    return planned


def _time_steps(planned: Sequence[tuple[Recipe, Path]], device: torch.device, rounds: int) -> None:
    """Time all methods in turn and write the result into the runs' summaries, if one of them lacks it."""
    if all("step_ratio" in RunDirectory(path).summary() for _, path in planned):
        return
    methods = {recipe.name: recipe for recipe, _ in planned}
    try:
        times = time_in_turn(list(methods.values()), device=device, rounds=rounds)
    except torch.OutOfMemoryError as error:
        raise UserRuntimeError(
            "all runs are finished, but there is too little memory to time them in turn; --rounds 0 leaves it out"
        ) from error
    ratios = dict(zip(methods, times, strict=True))
    for recipe, path in planned:
        directory = RunDirectory(path)
        directory.write_summary({**directory.summary(), "step_ratio": ratios[recipe.name].to_dict()})


def _take_turns(waiting: Iterable[Callable[[], Trainer]], at_once: int, device: torch.device) -> None:
    """Train `at_once` runs side by side, a step each in turn, until none is left."""
    waiting, turns = iter(waiting), deque[_Turns]()
    stopped: list[Exception] = []

    def stop() -> None:
        stopped.append(Interrupted("stopped before the next run was begun"))
        for turn in turns:
            turn.run.stop()

    with stopping_on_signals(stop):
        while True:
            if len(turns) < at_once and not stopped and (start := next(waiting, None)):
                turns.appendleft(_Turns(start(), device, alone=at_once == 1))
                if stopped:  # while it was being made
                    turns[0].run.stop()
            if not turns:
                break
            try:
                turns[0].take()
                turns.rotate(-1)
            except StopIteration:
                turns.popleft()
            except Exception as error:  # the others are saved before it is raised
                recipe = turns.popleft().run.recipe
                if isinstance(error, UserError):
                    named = RecipeError(f"{recipe.name}, seed {recipe.train.seed}: {error}")
                    named.__cause__, error = error, named
                stopped.insert(0, error)
                stop()
    if stopped:
        raise stopped[0]


class _Turns:
    """A run that takes turns with others: its steps, its stream, and its random numbers, which others must not move."""

    def __init__(self, run: Trainer, device: torch.device, *, alone: bool) -> None:
        self.run, self.device, self.alone = run, device, alone
        run.shared = not alone
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
