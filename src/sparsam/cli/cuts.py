"""`sparsam cuts`: where a network can be cut, and what a step from there costs."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsam.errors import UserValueError
from sparsam.masks import BudgetMask
from sparsam.masks.budget import choose_cut, step_limit
from sparsam.replay.costs import cut_costs
from sparsam.replay.cuts import PASSES, WARM_UP, Cut
from sparsam.runs.build import build_loss, build_network
from sparsam.sam import SAM
from sparsam.training import Recipe, load_recipe, recipe_from
from sparsam.training.build import build_base
from sparsam.training.environment import processor
from sparsam.training.trainer import AUTOCAST

USUAL_COST = 1.25  # the example in the last line costs about BudgetMask's default budget
LATE_COST = 1.65  # or, where only the last steps perturb, what layer2 of a ResNet-18 does


class Images(NamedTuple):
    """What a network is built for."""

    channels: int
    size: int
    classes: int


# Of a recipe's data, which are not opened: nothing but their shape matters here.
SHAPES = {
    "digits": Images(1, 8, 10),
    "cifar10": Images(3, 32, 10),
    "cifar100": Images(3, 32, 100),
    "imagefolder": Images(3, 224, 1000),
}


def load(model: str, *, batch_size: int | None, precision: str | None, **shape: int | None) -> tuple[Recipe, Images]:
    """Return the settings for the name of a network or of a recipe file, and the images it is measured on.

    Args:
        model: A network's name, or the path of a recipe.
        batch_size: None: the recipe's.
        precision: None: the recipe's.
        shape: Fields of :class:`Images`; None: those of the recipe's data.
    """
    if model.endswith(".toml"):
        given = {"data.batch_size": batch_size, "train.precision": precision}
        recipe = load_recipe(model, [f"{key}={value}" for key, value in given.items() if value is not None])
        images = SHAPES[recipe.data.name]
        if recipe.data.name == "imagefolder":
            images = images._replace(size=recipe.data.image_size)
    else:  # as in a plain training loop: torch's own memory layout, and no CUDA graph
        train = {"precision": precision or "fp32", "channels_last": False, "cuda_graph": False}
        recipe = recipe_from({"model": {"name": model}, "data": {"batch_size": batch_size or 128}, "train": train})
        images = SHAPES["cifar10"]
    return recipe, images._replace(**{key: value for key, value in shape.items() if value is not None})


def measure(recipe: Recipe, images: Images, device: torch.device, budget: float | None = None) -> dict[Cut, float]:
    """Measure what a step of a recipe's network would cost from each cut, on random images."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # whose events take the time
        torch.backends.cudnn.benchmark = not recipe.train.deterministic  # as the trainer does
    network = build_network(recipe, images.classes, images.channels, device)
    layout = torch.channels_last if recipe.train.channels_last else torch.contiguous_format
    x = torch.randn(recipe.data.batch_size, images.channels, images.size, images.size, device=device)
    x = x.contiguous(memory_format=layout)
    y = torch.randint(images.classes, (len(x),), device=device)
    loss_fn, dtype = build_loss(recipe), AUTOCAST.get(recipe.train.precision)

    def closure() -> Any:
        network.zero_grad()
        with torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext():
            loss = loss_fn(network(x), y)
        loss.backward()
        return loss

    try:
        base = build_base(recipe, network, captured=False)
        opt = SAM.wrap(base, mask=BudgetMask(network))
        return cut_costs(
            network,
            closure,
            base,
            partial(opt.rehearsal, closure),
            device_time=_captured(recipe),
            limit=None if budget is None or recipe.mask.late else step_limit(budget, recipe.mask.full),
        )
    except RuntimeError as error:  # what torch says of images too small for a network, and of too little memory
        raise UserValueError(f"{recipe.model.name} could not take {_batch(recipe, images)}: {error}") from error


def show(
    recipe: Recipe, images: Images, costs: dict[Cut, float], device: torch.device, budget: float | None = None
) -> None:
    """Print the cuts, how they were measured and how to use them; where none fits the budget, raise at the end."""
    if not costs:
        raise UserValueError(f"{recipe.model.name} has no cut: nothing of a step could be left out")
    mask, chosen, refusal = recipe.mask, None, None
    if budget is not None and not mask.late:  # which buys steps, not a cut
        try:
            chosen = choose_cut({cut.name: cost for cut, cost in costs.items()}, budget, mask.full)
        except ValueError as error:
            refusal = error
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("Cut before", no_wrap=True)
    for heading in ("Weights behind, %", "Pass behind, %", "Step, ×"):
        table.add_column(heading, justify="right")
    for cut, cost in costs.items():
        numbers = (f"{100 * cut.weights:.2f}", f"{100 * (cut.step or 0.0):.1f}", f"{cost:.2f}")
        if cut.name == chosen:
            table.add_row(cut.name, *numbers, f"← budget {budget:g}", style="bold")
        else:
            table.add_row(cut.name, *numbers)
    console = Console(highlight=False)
    console.print(table)
    console.print(_caption(recipe, images, device), style="dim")
    if mask.late:
        console.print("The recipe's budget buys last steps, from the cut that it names, and no cut (mask.late = true).")
    if refusal:
        raise refusal
    usual_cost = LATE_COST if mask.late else USUAL_COST
    usual = min(costs, key=lambda cut: abs(costs[cut] - usual_cost)).name
    example = mask.cut or chosen or usual
    console.print("To perturb only what lies behind a cut, and to compute nothing before it twice:")
    options = {name: getattr(mask, name) for name in ("full", "full_rho", "late_share", "momentum_rho")}
    others = "".join(f", {name}={value:g}" for name, value in options.items() if value)
    if mask.late:
        bought = "" if mask.late_share else f", budget={budget or mask.budget:g}"
        others = f"{bought}, total_steps=STEPS{others}"
    console.print(f'  BudgetMask(model, cut="{example}"{others})', soft_wrap=True)


def _caption(recipe: Recipe, images: Images, device: torch.device) -> str:
    where = f"{processor()}, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type
    if device.type == "cuda":
        how = "the GPU's own time, as in a CUDA graph" if _captured(recipe) else "launched from Python"
        where = f"{torch.cuda.get_device_name(device)} ({how})"
    return (
        f"{recipe.model.name}: median of {PASSES} timed passes, forward and backward, after {WARM_UP} to warm up; "
        f"{_batch(recipe, images)}, {images.classes} classes, {recipe.train.precision}; {where}; torch "
        f"{torch.__version__}.\n"
        f"Step: in steps of {recipe.optimizer.name} alone: 1 + what lies behind the cut + the perturbation."
    )


def _batch(recipe: Recipe, images: Images) -> str:
    return f"{recipe.data.batch_size} random images of {images.channels}×{images.size}×{images.size}"


def _captured(recipe: Recipe) -> bool:
    """Return whether the trainer would capture the steps in a CUDA graph, if there is a GPU."""
    return recipe.train.cuda_graph and recipe.train.precision != "fp16"
