"""Run directories for tests of the report, written without a trainer."""

import json
import math

import numpy as np

from sparsam.report import summary_table

EPOCHS = 12
PLACE = "a & b #1 100%"  # a folder that a link must quote
LAYERS = ("stem", "layer1", "head")
METHODS = {  # label, sam, mask, weight decay, ms a step, share perturbed, theoretical FLOPs
    "sgd": ("SGD", False, "dense", 5e-4, 3.0, None, 1.0),
    "sam": ("SAM", True, "dense", 1e-3, 5.7, 1.0, 2.0),
    "ssam-f": ("SSAM-F", True, "fisher", 1e-3, 6.3, 0.5, 1.647),
}


def metric(name, seed, epoch):
    """One line of metrics: smooth, and different for every run."""
    own = 0.01 * list(METHODS).index(name) + 0.003 * seed
    step = METHODS[name][4]
    density = {layer: 0.2 + 0.2 * i + 0.01 * epoch + 0.02 * seed for i, layer in enumerate(LAYERS)}
    return {
        "epoch": epoch,
        "steps": 10,
        "train_loss": 2.0 * math.exp(-0.4 * epoch) + own,
        "test_loss": 1.0,
        "test_accuracy": 0.9 + own - 0.7 * math.exp(-0.5 * epoch) - 0.004 * (epoch == EPOCHS),
        "lr": 0.05,
        "rho": 0.1 if METHODS[name][1] else None,
        "seconds": 0.01 * step,
        "elapsed": 0.01 * step * epoch,
        "step_ms": step + 0.001 * epoch,
        "perturbed": METHODS[name][5],
        "mask_density": density if METHODS[name][2] == "fisher" else None,
    }


def make_run(root, name="sgd", seed=0, *, epochs=EPOCHS, recipe=(), environment=(), summary=(), finished=True):
    """Write a run directory as the trainer does. The last three overwrite values, the recipe's by dotted key."""
    label, sam, mask, weight_decay, step, perturbed, flops = METHODS[name]
    settings = {
        "name": name,
        "model": {"name": "resnet-small"},
        "data": {"name": "digits", "batch_size": 128, "validation": None},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": weight_decay},
        "sam": {"enabled": sam, "rho": 0.1, "adaptive": False},
        "mask": {"name": mask, **({"sparsity": 0.5} if mask == "fisher" else {})},
        "train": {"epochs": EPOCHS, "seed": seed, "precision": "fp32"},
    }
    for key, value in dict(recipe).items():
        section, dot, setting = key.partition(".")
        if dot:
            settings[section][setting] = value
        else:
            settings[key] = value
    lines = [metric(name, seed, epoch) for epoch in range(1, epochs + 1)]
    directory = root / f"run-{len(list(root.iterdir()))}"
    directory.mkdir()
    (directory / "recipe.json").write_text(json.dumps(settings))
    (directory / "environment.json").write_text(
        json.dumps(
            {
                "sparsam": "0.1.0",
                "torch": "2.13.0",
                "python": "3.11.7",
                "device": "cpu",
                "git": None,
                "platform": "Linux",
                "threads": 2,
                "started": f"2026-02-0{1 + seed}T10:00:00+00:00",
                **dict(environment),
            }
        )
    )
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        accuracies = [line["test_accuracy"] for line in lines]
        result = {
            "name": settings["name"],
            "method": label,
            "seed": seed,
            "epochs": epochs,
            "test_accuracy": accuracies[-1],
            "best_accuracy": max(accuracies),
            "best_epoch": 1 + int(np.argmax(accuracies)),
            "evaluated_on": "test",
            "step_ms": step + 0.1 * seed,
            "seconds": lines[-1]["elapsed"],
            "peak_memory_mb": 1000 * step + seed,
            "perturbed": perturbed,
            "theoretical_flops": flops,
            "extra": {},
            **dict(summary),
        }
        (directory / "summary.json").write_text(json.dumps(result))
    return directory


def make_runs(root, seeds=2):
    root.mkdir(exist_ok=True)
    return [make_run(root, name, seed) for name in METHODS for seed in range(seeds)]


def accuracies(name, seeds):
    return [metric(name, seed, EPOCHS)["test_accuracy"] for seed in range(seeds)]


def row(methods, label):
    """A row of the table as {column: (text, note)}."""
    table = summary_table(methods)
    cells = next(cells for cells in table.rows if cells[0].text == label)
    return {column: (cell.text, cell.note) for column, cell in zip(table.columns, cells, strict=True)}


HOSTILE = '</script ><script>window.hacked=1</script><img src=x onerror="window.hacked=2">&amp;<!--<script >'


def hostile_run(root):
    """A run that tries to get markup into the page wherever a text of its files goes."""
    return make_run(
        root,
        "ssam-f",
        recipe={"name": HOSTILE, "model.name": HOSTILE, f"mask.{HOSTILE}": HOSTILE},
        environment={"device": HOSTILE, "git": HOSTILE, "torch": HOSTILE},
        summary={"method": HOSTILE, "extra": {HOSTILE: 1}},
    )


def analysed_runs(root, figures):
    """Two runs, really trained, and all that the commands find out about them and draw."""
    import torch
    from trained_runs import train_digits

    from sparsam.analysis.run_sharpness import measure_sharpness
    from sparsam.cli import gradients, hessian, landscape
    from sparsam.report.mask_figure import RunMasks, draw_masks
    from sparsam.runs.directory import RunDirectory

    device = torch.device("cpu")
    runs = [root / f"digits-{method}-seed0" for method in ("sgd", "ssam-f")]
    for run in runs:
        train_digits(run, run.name.removeprefix("digits-").removesuffix("-seed0"))
        measure_sharpness(run, rho=0.2, samples=32, noise=2, best=run is runs[0], device=device)
    some = {"samples": 32, "seed": 0, "precision": "fp32", "best": False, "device": device}
    few = {"top": 5, "products": 20, "probes": 2, "steps": 3, "memory": 1.0}
    hessian.show(runs, [hessian.measure(run, **some, **few) for run in runs], figures)
    few = {"rho": 0.1, "batch_size": 32, "batches": 1, "best": False, "device": device}
    gradients.show(runs, [gradients.measure(run, **few) for run in runs], figures)
    few = {"points": 4, "range": 1.0, "directions": "random", "checkpoints": []}
    for dimensions in (1, 2):
        found = [landscape.measure(run, dimensions=dimensions, **some, **few) for run in runs]
        landscape.show(runs, found, figures)
    draw_masks([RunMasks(run.name, "SSAM-F", RunDirectory(run).metrics()) for run in runs[1:]], figures / "masks")
    return runs
