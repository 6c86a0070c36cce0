"""`sparsam cuts`, as a user types it: names and shares of the weights, never a time."""

from __future__ import annotations

import re

import pytest
import torch
from commands import invoke
from torch import nn

from sparsam.cli import cuts
from sparsam.data import load_digits
from sparsam.data.cifar import LAYOUTS
from sparsam.errors import UserError
from sparsam.models import build_model
from sparsam.replay.costs import cut_costs
from sparsam.replay.cuts import Cut

SMALL = ["--batch-size", 2, "--image-size", 16, "--device", "cpu"]
ROW = re.compile(r"^ (\S+) +(\d+\.\d\d) +(\d+\.\d) +(\d\.\d\d)(?: +← budget (\S+))? *$", re.M)


COSTS = {Cut("layer3", 0.9, 0.5): 1.6, Cut("layer4", 0.5, 0.2): 1.3, Cut("head", 0.1, 0.1): 1.1}


def rows(text):
    """The table: name, weights after, pass after, step, and the mark."""
    return [row.groups() for row in ROW.finditer(text)]


def weights_from(model, cut):
    """The share of the weights in a chain's modules from the cut on, in %, by their order alone."""
    sizes = [(name, p.numel()) for name, p in model.named_parameters()]
    first = next(i for i, (name, _) in enumerate(sizes) if f"{name}.".startswith(f"{cut}."))
    return 100 * sum(n for _, n in sizes[first:]) / sum(n for _, n in sizes)


def test_lists_the_cuts_with_their_weights():
    text = invoke("cuts", "resnet18", *SMALL).stdout
    table = rows(text)
    blocks = [f"layer{i}{block}" for i in range(1, 5) for block in ("", ".1")]
    assert [row[0] for row in table] == ["stem", "stem.1", *blocks, "head.2"]  # earliest first
    model = build_model("resnet18", 10)
    for name, weights, after, step, mark in table:
        assert weights == f"{weights_from(model, name):.2f}"
        assert float(step) >= 1
        assert 0 < float(after) <= 100
        assert mark is None
    words = " ".join(text.split())
    assert "median of 3 timed passes" in words
    assert "2 random images of 3×16×16, 10 classes, fp32" in words
    assert f"torch {torch.__version__}" in words
    assert "Step: cost relative to one SGD step" in words
    assert re.search(r", (1 thread|\d+ threads);", words)
    assert re.search(r'SuffixMask\(model, cut="(stem|layer|head)[.0-9]*"\)', text)


def test_the_options_and_a_recipe_say_what_is_measured():
    recipe = "digits-sam"
    arguments = ["--batch-size", 4, "--classes", 7, "--precision", "bf16", "--device", "cpu"]
    text = invoke("cuts", recipe, *arguments).stdout
    assert "4 random images of 1×8×8, 7 classes, bf16" in " ".join(text.split())
    model = build_model("resnet-small", 7, channels=1)
    assert [row[:2] for row in rows(text)] == [
        (name, f"{weights_from(model, name):.2f}")
        for name in ("stem", "stem.1", "layer1", "layer2", "layer3", "head.2")
    ]


def test_the_shapes_of_data_that_are_not_opened():
    digits = load_digits()
    assert cuts.SHAPES["digits"] == (*digits.train.x.shape[1:3], digits.classes)
    assert {name: cuts.SHAPES[name].classes for name in LAYOUTS} == {n: layout.classes for n, layout in LAYOUTS.items()}
    recipe, images = cuts.load("imagenet-resnet50-sam", batch_size=None, precision=None, size=None)
    assert (recipe.data.batch_size, recipe.model.stem, images) == (256, "imagenet", (3, 224, 1000))


def test_a_budget_marks_the_earliest_cut_that_fits():
    text = invoke("cuts", "resnet-small", *SMALL, "--budget", 99).stdout  # whatever the times: everything fits
    assert [(row[0], row[4]) for row in rows(text) if row[4]] == [("stem", "99")]
    assert 'SuffixMask(model, cut="stem")' in text


@pytest.mark.parametrize(("budget", "expected"), [(1.6, "layer3"), (1.3, "layer4"), (1.29, "head")])
def test_a_budget_is_held_against_the_costs(capsys, budget, expected):
    recipe, images = cuts.load("plain", batch_size=None, precision=None)
    cuts.show(recipe, images, COSTS, torch.device("cpu"), budget=budget)
    assert [row[0] for row in rows(capsys.readouterr().out) if row[4]] == [expected]


@pytest.mark.parametrize(
    ("settings", "budget", "example"),
    [
        ("", None, "layer3"),  # which costs about what layer2 of a ResNet-18 does
        ('[mask]\nname = "suffix"\ncut = "head"\n', None, "head"),  # the recipe's own
        ('[mask]\nname = "suffix"\ncut = "head"\n', 1.4, "layer4"),
    ],
)
def test_the_example_is_the_cut_of_the_budget_or_of_the_recipe(capsys, tmp_path, settings, budget, example):
    file = tmp_path / "own.toml"
    file.write_text(settings)
    recipe, images = cuts.load(str(file), batch_size=None, precision=None)
    cuts.show(recipe, images, COSTS, torch.device("cpu"), budget=budget)
    assert f'SuffixMask(model, cut="{example}")' in capsys.readouterr().out


def test_a_budget_that_nothing_fits_is_refused_below_the_table():
    done = invoke("cuts", "resnet-small", *SMALL, "--budget", 1.0000001, code=1)
    assert re.search(
        "error: budget must be at least 1.*, the cost of a step from the cheapest cut, 'head.2'", done.stderr
    )
    assert len(rows(done.stdout)) == 6
    assert "←" not in done.stdout


def test_a_network_without_a_cut():
    model = nn.Linear(4, 2)
    base = torch.optim.SGD(model.parameters())
    costs = cut_costs(model, lambda: model(torch.ones(3, 4)).sum().backward(), base)
    recipe, images = cuts.load("plain", batch_size=None, precision=None)
    with pytest.raises(ValueError, match="plain has no cut: nothing of a step could be left out"):
        cuts.show(recipe, images, costs, torch.device("cpu"))


REFUSED = [
    (["resnet19"], "error: model must be one of resnet18,"),
    (["none.toml"], "error: there is no recipe at none.toml"),
    (["resnet18", "--precision", "fp8"], "error: train.precision must be one of fp32, bf16, fp16, but is 'fp8'"),
    (
        ["resnet18", "--budget", "1"],
        "error: budget must be a number above 1, what the base step alone costs, but is 1.0",
    ),
    (
        ["resnet18", "--budget", "nan"],
        "error: budget must be a number above 1, what the base step alone costs, but is nan",
    ),
    (["vgg11-bn", "--image-size", "16"], "error: vgg11-bn could not take 2 random images of 3×16×16: "),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(r[0]) for r in REFUSED])
def test_errors_have_no_traceback(arguments, message):
    done = invoke("cuts", *arguments, "--device", "cpu", "--batch-size", 2, code=1)
    assert message in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (
            torch.OutOfMemoryError(),
            UserError,
            "too little memory to measure resnet-small on 2 random images of 3×32×32",
        ),
        (RuntimeError("a bug"), RuntimeError, "^a bug$"),  # is no fault of the images
    ],
)
def test_only_a_pass_and_too_little_memory_are_the_users(monkeypatch, raised, expected, message):
    def costs(*arguments, **options):
        raise raised

    monkeypatch.setattr("sparsam.replay.costs.cut_costs", costs)
    recipe, images = cuts.load("resnet-small", batch_size=2, precision=None)
    with pytest.raises(expected, match=message):
        cuts.measure(recipe, images, torch.device("cpu"))


def test_help_has_examples():
    assert "sparsam cuts resnet18" in invoke("cuts", "--help").stdout
