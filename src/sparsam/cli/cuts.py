"""`sparsam cuts`: where a network can be cut, what a step from there costs, and what a budget buys."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer

from sparsam.ascents import FriendlyAscent
from sparsam.cli.analysis import Device, find_device
from sparsam.cli.console import plain_console
from sparsam.data.shapes import SHAPES, Images
from sparsam.errors import UserValueError
from sparsam.replay import Counts, count_costs
from sparsam.runs.build import build_loss, build_network, usual_images
from sparsam.runs.config import BASE_METHODS
from sparsam.runs.library import packaged_recipes
from sparsam.runs.recipe import Recipe, load_recipe, recipe_from
from sparsam.step_cost import PASSES, TIMINGS, Clock, Cut, Direction, StepRatio, cut_costs
from sparsam.thrifty import BUDGET, FRIENDLY, bought, check_budget, choose
from sparsam.training.build import build_base
from sparsam.training.environment import processor
from sparsam.training.step import autocast, is_captured
from sparsam.training.trainer import prepare_torch

DIFFERENT = 0.1  # base steps between what is counted and what is measured: so much is worth a remark
MANY_STEPS = 1_000_000  # how long a training is does not matter here


class Costs(NamedTuple):
    """What a sharpness-aware step costs from each cut, in base steps; `measured` is empty if it was only counted."""

    measured: dict[Cut, StepRatio]
    counts: Counts


def cuts(
    model: Annotated[
        str, typer.Argument(help="A network, such as wrn-28-10 or timm:NAME, or a recipe by name or file (*.toml).")
    ],
    batch_size: Annotated[int | None, typer.Option(min=1, help="Default: 128, or the recipe's.")] = None,
    image_size: Annotated[int | None, typer.Option(min=1, help="Default: 32, or the recipe's.")] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, help="Default: 10, or the recipe's (image folders: 1000).")
    ] = None,
    channels: Annotated[int | None, typer.Option(min=1, help="Default: 3, or the recipe's.")] = None,
    budget: Annotated[
        float, typer.Option(help="What a training may cost, relative to that of the base optimizer alone.")
    ] = BUDGET,
    rounds: Annotated[int, typer.Option(min=0, help="How often to measure; the median counts. 0: only count.")] = 3,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; default: fp32, or the recipe's.")] = None,
    device: Device = None,
) -> None:
    """List where a network can be cut, what a step from each cut costs, and which part of the steps a budget buys.

    Costs are counted, which gives the same on every machine, and measured here and now, on random images. Measuring can
    take minutes; --rounds 0 only counts.

    Examples:
    ```
    sparsam cuts resnet18 --budget 1.25
    sparsam cuts resnet18 --rounds 0
    sparsam cuts cifar10-wrn28-10-sam --batch-size 32
    ```
    """
    check_budget(budget)
    recipe, images = load(
        model, batch_size=batch_size, precision=precision, size=image_size, classes=classes, channels=channels
    )
    place = find_device(device)
    doing = "Measuring ... (--rounds 0 only counts)" if rounds else "Counting ..."
    with Console(stderr=True).status(doing, refresh_per_second=2):  # drawing delays what is measured
        costs = measure(recipe, images, place, rounds)
    show(recipe, images, costs, place, budget)


def load(model: str, *, batch_size: int | None, precision: str | None, **shape: int | None) -> tuple[Recipe, Images]:
    """Return the settings for the name of a network or of a recipe, and the images it is measured on.

    Args:
        model: A network's name, or the name or the path of a recipe.
        batch_size: None: the recipe's.
        precision: None: the recipe's.
        shape: Fields of :class:`Images`; None: those of the recipe's data.
    """
    if model.endswith(".toml") or model in packaged_recipes():
        given = {"data.batch_size": batch_size, "train.precision": precision}
        recipe = load_recipe(model, [f"{key}={value}" for key, value in given.items() if value is not None])
        images = usual_images(recipe)
    else:  # as in a plain training loop: torch's own memory layout, and no CUDA graph
        train = {"precision": precision or "fp32", "channels_last": False, "cuda_graph": False}
        recipe = recipe_from({"model": {"name": model}, "data": {"batch_size": batch_size or 128}, "train": train})
        images = SHAPES["cifar10"]
    return recipe, images._replace(**{key: value for key, value in shape.items() if value is not None})


def measure(recipe: Recipe, images: Images, device: torch.device, rounds: int) -> Costs:
    """Count what a step of F-SAM costs from each cut of a recipe's network, and measure it in some rounds."""
    prepare_torch(recipe, device)
    network = build_network(recipe, images.classes, images.channels, device)
    layout = torch.channels_last if recipe.train.channels_last else torch.contiguous_format
    x = torch.randn(recipe.data.batch_size, images.channels, images.size, images.size, device=device)
    x = x.contiguous(memory_format=layout)
    y = torch.randint(images.classes, (len(x),), device=device)
    loss_fn = build_loss(recipe)

    def closure() -> Any:
        network.zero_grad()
        with autocast(recipe, device):
            loss = loss_fn(network(x), y)
        loss.backward()
        return loss

    try:
        closure()
    except RuntimeError as error:  # what torch says of images too small for a network, and of too little memory
        raise UserValueError(f"{recipe.model.name} could not take {_batch(recipe, images)}: {error}") from error
    base = build_base(recipe, network, captured=False)
    clock = Clock(device, device_time=is_captured(recipe, device))
    try:
        counts, direction = count_costs(network, x), _friendly(base)
        if rounds:
            _announce(recipe, rounds)
        found = [
            cut_costs(network, closure, base, adaptive=recipe.sam.adaptive, direction=direction, clock=clock)
            for _ in range(rounds)
        ]
        return Costs(_ratios(found), counts)
    except torch.OutOfMemoryError as error:
        raise UserValueError(
            f"there is too little memory to measure {recipe.model.name} on {_batch(recipe, images)}; a smaller "
            f"--batch-size needs less"
        ) from error


def _announce(recipe: Recipe, rounds: int) -> None:
    """Say in a log that something goes on, and how to do without; a terminal shows that it does."""
    if not sys.stderr.isatty():
        how_often = "1 round" if rounds == 1 else f"{rounds} rounds"
        text = f"Measuring {recipe.model.name} in {how_often}, which can take minutes; --rounds 0 only counts"
        print(text, file=sys.stderr, flush=True)


def _ratios(rounds: Sequence[dict[Cut, float]]) -> dict[Cut, StepRatio]:
    """Return the costs of several rounds. Their cuts have the same names, but other times."""
    if not rounds:
        return {}
    named = [{cut.name: cost for cut, cost in costs.items()} for costs in rounds]
    return {cut: StepRatio.of([costs[cut.name] for costs in named]) for cut in rounds[0]}


def _friendly(base: Optimizer) -> Direction:
    """Return what F-SAM makes of gradients, with all that it does in a step."""
    ascent, memory = FriendlyAscent(), {}  # type: ignore[var-annotated]

    def direction(params: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor]:
        d = ascent.direction(params, grads, memory, base)
        ascent.remember(params, grads, memory, torch.ones((), device=params[0].device))()
        return d

    return direction


def show(recipe: Recipe, images: Images, costs: Costs, device: torch.device, budget: float) -> None:
    """Print the cuts, how they were counted and measured, what a budget buys, and how to use it."""
    if not costs.counts.cuts:
        raise UserValueError(f"{recipe.model.name} has no cut: nothing of a step could be left out")
    choice = choose(costs.counts, total_steps=MANY_STEPS, budget=budget)
    assert choice.cut is not None  # without whole_passes it has one
    measured = {cut.name: cost for cut, cost in costs.measured.items()}
    of_sam = {cut.name: cost for cut, cost in costs.counts.costs().items()}
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("Cut before", no_wrap=True)
    costly = ["SAM, ×\ncounted", "F-SAM, ×\ncounted", *(["F-SAM, ×\nmeasured"] if measured else [])]
    for heading in ("Weights\nafter, %", *costly, f"{budget:g} buys,\n% of steps"):
        table.add_column(heading, justify="right")
    different = []
    for cut, own in costs.counts.costs(FRIENDLY).items():
        if measured and cut.name not in measured:  # the loss shows that it is none
            continue
        fraction, steps = f"{100 * bought(budget, own):.1f}", [f"{of_sam[cut.name]:.2f}", f"{own:.2f}"]
        if measured:
            cost = measured[cut.name]
            steps.append(f"{cost.median:.2f}" + (f" ± {cost.spread:.2f}" if cost.rounds > 1 else ""))
            enough = f"{100 * bought(budget, cost.median):.1f}"
            if abs(own - cost.median) > DIFFERENT and enough != fraction:
                both = f"counted {own:.2f}, measured {cost.median:.2f}"
                different.append(f"  {cut.name}: {both}: the last {enough} % of the steps")
        chosen = cut.name == choice.cut
        mark, style = (["← thrifty"], "bold") if chosen else ([], "")
        table.add_row(cut.name, f"{100 * cut.weights:.2f}", *steps, fraction, *mark, style=style)
    console = plain_console()
    console.print(table)
    rounds = next((cost.rounds for cost in measured.values()), 0)
    console.print(f"{_how(recipe, images, device, rounds)}\n{_meaning(recipe)}", style="dim")
    if different:
        console.print(
            f"Counted and measured differ by more than a tenth of a step from these cuts. On this machine another "
            f"fraction meets the budget of {budget:g}:"
        )
        console.print(*different, sep="\n")
        console.print("Thrifty keeps to what is counted, unless step_cost is given: thrifty(..., step_cost=...).")
    console.print(
        f"With a budget of {budget:g} base steps thrifty SAM perturbs what follows {choice.cut}, "
        f"{100 * choice.weights:.3g} % of the weights, in the last {100 * choice.fraction:.3g} % of the steps:"
    )
    base = f"torch.optim.{BASE_METHODS[recipe.optimizer.name]}"
    console.print(f"  thrifty(model, {base}, x, total_steps=..., budget={budget:g}, lr=...)", soft_wrap=True)
    console.print(
        f"SSAM-C perturbs it in every step, at {of_sam[choice.cut]:.2f} base steps each, and computes nothing "
        f"before the cut twice:"
    )
    console.print(f'  SuffixMask(model, cut="{choice.cut}")', soft_wrap=True)


def _how(recipe: Recipe, images: Images, device: torch.device, rounds: int) -> str:
    """Say how costs were measured, or that they were not."""
    batch = f"{_batch(recipe, images)}, {images.classes} classes"
    if not rounds:
        return f"Counted, not measured (--rounds 0), on {recipe.model.name}: {batch}."
    threads = torch.get_num_threads()
    where = f"{processor()}, {threads} thread{'' if threads == 1 else 's'}" if device.type == "cpu" else device.type
    if device.type == "cuda":
        how = "the GPU's own time, as in a CUDA graph" if is_captured(recipe, device) else "launched from Python"
        where = f"{torch.cuda.get_device_name(device)} ({how})"
    median = f": median of {rounds} rounds ± half of the range between the quartiles" if rounds > 1 else ""
    return (
        f"Measured on {recipe.model.name}, warmed up{median}. The share of a pass after a cut is the median of "
        f"{PASSES}; the times of a pass, an optimizer step and a perturbation are each the shortest of {TIMINGS}. "
        f"{batch}, {recipe.train.precision}; {where}; torch {torch.__version__}."
    )


def _meaning(recipe: Recipe) -> str:
    return (
        f"×: cost of a step relative to one {BASE_METHODS[recipe.optimizer.name]} step: 1 + what follows the cut + the "
        f"perturbation. F-SAM (Friendly SAM) is how thrifty SAM perturbs; it keeps a mean of gradients."
    )


def _batch(recipe: Recipe, images: Images) -> str:
    return f"{recipe.data.batch_size} random images of {images.channels}×{images.size}×{images.size}"
