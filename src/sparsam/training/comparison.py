"""Several recipes, several seeds."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import torch

from sparsam.errors import UserError
from sparsam.randomness import get_rng_state, set_rng_state
from sparsam.runs.directory import RunDirectory
from sparsam.runs.recipe import BUDGET_KEYS, Recipe, RecipeError, load_recipe
from sparsam.settings import differences
from sparsam.training.progress import Progress
from sparsam.training.trainer import Interrupted, Trainer, new_run, old_run, stopping_on_signals


def compare_recipes(
    recipes: Sequence[Path],
    seeds: int,
    output: Path,
    *,
    overrides: Sequence[str] | None = None,
    device: torch.device,
    at_once: int = 1,
    progress: Callable[[], Progress] = Progress,
) -> list[Path]:
    """Train every recipe with every seed; return the runs' directories.

    A run that is finished is left as it is and one that was stopped is continued, if its recipe is still the same.

    Args:
        recipes: Files.
        seeds: How many runs of each, with seeds 0, 1, ...
        output: Where the runs are written, as NAME-seedN.
        overrides: `key=value`, for all runs that they concern: those of `mask` go to recipes with a sparse mask only,
            those of a budget to recipes with one, those of `sam` to recipes with SAM.
        device: Where to train.
        at_once: How many runs take turns on the device, a step each; on a GPU they overlap, on streams of their own.
            Their step times and memory would not be those of a run alone, so summaries of such runs have none.
        progress: Makes the one who is told, anew for each run.
    """
    planned = []
    for file in recipes:  # everything is checked before the first is trained
        for seed in range(seeds):
            recipe = load_recipe(file, [*_concerned(file, overrides or []), f"train.seed={seed}"])
            path = output / f"{recipe.name}-seed{seed}"
            if (path / "recipe.json").is_file() and RunDirectory(path).recipe() != recipe:
                others = ", ".join(differences(RunDirectory(path).recipe().to_dict(), recipe.to_dict()))
                raise RecipeError(
                    f"{path} holds a run of another recipe, which differs in {others}; choose another --output or "
                    f"delete it"
                )
            planned.append((recipe, path))
    if at_once > 1 and len({recipe.train.deterministic for recipe, _ in planned}) > 1:
        raise RecipeError("runs at once must agree in train.deterministic, which holds for the whole process")
    if len({path for _, path in planned}) < len(planned):
        raise RecipeError("the recipes must have different names, but two have the same")

    begun = WeakValueDictionary[str, Trainer]()  # a run of each recipe that is going on: kept, it would keep its memory

    def trainer(recipe: Recipe, path: Path) -> Trainer:
        gc.collect()  # the run before must not count in this one's memory
        if (path / "recipe.json").is_file():
            run = old_run(path, device=device, progress=progress())
        else:
            run = new_run(recipe, path, device=device, progress=progress())
            finished = [RunDirectory(p) for r, p in planned if r.name == recipe.name and RunDirectory(p).finished]
            other = begun.get(recipe.name)
            run.use_measured(other.measured() if other else finished[0].summary() if finished else {})
        begun.setdefault(recipe.name, run)
        return run

    waiting = (
        partial(trainer, recipe, path)
        for recipe, path in planned
        if not ((path / "recipe.json").is_file() and RunDirectory(path).finished)
    )
    _take_turns(waiting, at_once, device)
    return [path for _, path in planned]


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
                # Its first step comes next, in which it may measure what another seed then uses.
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
            except Exception as error:  # the others are saved before it is told
                recipe = turns.popleft().run.recipe
                if isinstance(error, UserError):  # a budget that is too small, say
                    told = RecipeError(f"{recipe.name}, seed {recipe.train.seed}: {error}")
                    told.__cause__, error = error, told
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
        self._random = get_rng_state([device])

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


def _concerned(file: Path, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that concern a recipe: SGD has no rho, SAM no sparsity, and only SSAM-C a cut."""
    recipe = load_recipe(file)
    absent: tuple[str, ...] = ()
    if recipe.mask.kind == "dense":
        absent = ("mask.",) if recipe.sam.enabled else ("mask.", "sam.")
    elif recipe.mask.kind != "budget":
        absent = tuple(f"mask.{key}=" for key in BUDGET_KEYS)
    return [override for override in overrides if not override.startswith(absent)]
