"""`sparsam cuts`, as a user types it: names, shares of the weights and what is counted, never a time."""

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
from sparsam.replay.counting import count_costs
from sparsam.step_cost import Cut, StepRatio, cut_costs
from sparsam.thrifty import FRIENDLY, bought, choose

SMALL = ["--batch-size", 2, "--image-size", 16, "--rounds", 1, "--device", "cpu"]
SPREAD = r"(?: ± \d\.\d\d)?"
ROW = re.compile(
    rf"^ (\S+) +(\d+\.\d\d) +(\d\.\d\d) +(\d\.\d\d) +(\d\.\d\d{SPREAD}) +(\d+\.\d)(?: +(← thrifty))? *$", re.M
)


def rows(text):
    """The table: name, weights after, SAM and F-SAM counted, measured, steps that the budget buys, and the mark."""
    return [row.groups() for row in ROW.finditer(text)]


def made_up(*measured):
    """Costs of resnet-small as they are counted, and as they might have been measured: so much more in each round."""
    counts = count_costs(build_model("resnet-small", 10), torch.ones(64, 3, 16, 16))
    counted = {cut.name: cost for cut, cost in counts.costs(FRIENDLY).items()}
    ratios = {name: StepRatio.of([cost + more for more in measured]) for name, cost in counted.items()}
    return cuts.Costs({Cut(c.name, c.weights, 0.5): ratios[c.name] for c in counts.cuts}, counts), counted


def shown(capsys, *measured, budget=1.15, recipe="resnet-small"):
    """Show made-up costs; return the text, and what is counted."""
    settings, images = cuts.load(str(recipe), batch_size=None, precision=None)
    costs, counted = made_up(*(measured or (0.0,)))
    cuts.show(settings, images, costs, torch.device("cpu"), budget)
    return capsys.readouterr().out, counted


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
    counts = count_costs(model, torch.ones(2, 3, 16, 16))
    costs = {cut.name: cost for cut, cost in counts.costs(FRIENDLY).items()}
    of_sam = {cut.name: cost for cut, cost in counts.costs().items()}
    for name, weights, sam, counted, measured, buys, _ in table:
        assert sam == f"{of_sam[name]:.2f}"
        assert weights == f"{weights_from(model, name):.2f}"
        assert counted == f"{costs[name]:.2f}"
        assert float(measured) >= 1
        assert buys == f"{100 * min(1, 0.15 / (costs[name] - 1)):.1f}"
    assert [row[0] for row in table if row[6]] == [choose(counts, total_steps=10**6).cut]
    words = " ".join(text.split())
    assert "Measured on resnet18, warmed up. The share of a pass after a cut is the median of 3; the times of" in words
    assert "a pass, an optimizer step and a perturbation are each the shortest of 5. 2 random images" in words
    assert "2 random images of 3×16×16, 10 classes, fp32" in words
    assert f"torch {torch.__version__}" in words
    assert "×: cost of a step relative to one SGD step" in words
    assert re.search(r", (1 thread|\d+ threads);", words)
    assert re.search(r'SuffixMask\(model, cut="(stem|layer|head)[.0-9]*"\)', text)


def test_no_rounds_only_count(monkeypatch):
    monkeypatch.setattr("sparsam.cli.cuts.cut_costs", lambda *_, **__: pytest.fail("it measures"))
    done = invoke("cuts", "resnet-small", *SMALL, "--rounds", 0)
    assert done.stderr == ""
    assert re.search(r"^ +Weights +SAM, × +F-SAM, × +1\.15 buys, *$", done.stdout, re.M)
    assert re.search(r"^ Cut before +after, % +counted +counted +% of steps *$", done.stdout, re.M)
    counts = count_costs(build_model("resnet-small", 10), torch.ones(2, 3, 16, 16))
    expected = [
        (cut.name, f"{100 * cut.weights:.2f}", f"{sam:.2f}", f"{own:.2f}", f"{100 * bought(1.15, own):.1f}")
        for (cut, own), sam in zip(counts.costs(FRIENDLY).items(), counts.costs().values(), strict=True)
    ]
    row = re.compile(r"^ (\S+) +(\d+\.\d\d) +(\d\.\d\d) +(\d\.\d\d) +(\d+\.\d)(?: +← thrifty)? *$", re.M)
    assert row.findall(done.stdout) == expected
    words = " ".join(done.stdout.split())
    assert (
        "Counted, not measured (--rounds 0), on resnet-small: 2 random images of 3×16×16, 10 classes. ×: cost" in words
    )
    assert "Measured on" not in words
    assert f'SuffixMask(model, cut="{choose(counts, total_steps=10**6).cut}")' in words


@pytest.mark.parametrize(("rounds", "words"), [(1, "1 round"), (2, "2 rounds")])
def test_a_log_says_that_measuring_has_begun(monkeypatch, capsys, rounds, words):
    def costs(*arguments, **options):
        told.append(capsys.readouterr().err)
        return {Cut("layer2", 0.9, 0.5): 1.3}

    told = []
    monkeypatch.setattr("sparsam.cli.cuts.cut_costs", costs)
    recipe, images = cuts.load("resnet-small", batch_size=2, precision=None)
    cuts.measure(recipe, images, torch.device("cpu"), rounds)
    assert told[0] == f"Measuring resnet-small in {words}, which can take minutes; --rounds 0 only counts\n"
    assert told[1:] == [""] * (rounds - 1)


def test_the_options_and_a_recipe_say_what_is_measured():
    recipe = "digits-sam"
    arguments = ["--batch-size", 4, "--classes", 7, "--precision", "bf16", "--rounds", 1, "--device", "cpu"]
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


@pytest.mark.parametrize("budget", [1.1, 1.15, 1.4, 3.0])
def test_a_budget_marks_what_thrifty_chooses(capsys, budget):
    text, counted = shown(capsys, budget=budget)
    choice = choose(made_up(0.0)[0].counts, total_steps=10**6, budget=budget)
    assert [row[0] for row in rows(text) if row[6]] == [choice.cut]
    assert [row[5] for row in rows(text)] == [f"{100 * bought(budget, cost):.1f}" for cost in counted.values()]
    words = " ".join(text.split())
    assert f"With a budget of {budget:g} base steps thrifty SAM perturbs what follows {choice.cut}," in words
    assert f"in the last {100 * choice.fraction:.3g} % of the steps: thrifty(model," in words
    assert f'SuffixMask(model, cut="{choice.cut}")' in text


def test_a_budget_in_percent_gives_a_warning(capsys):
    with pytest.warns(UserWarning, match=r"^budget is 15, far more than .*; it is a factor, such as 1\.15$"):
        shown(capsys, budget=15)


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_and_columns_say_whose_costs_they_have(width):
    text = invoke("cuts", "resnet-small", *SMALL, "--rounds", 2, width=width).stdout
    words = " ".join(text.split())
    assert "median of 2 rounds ± half of the range between the quartiles. The share of a pass" in words
    assert all(re.fullmatch(r"\d\.\d\d ± \d\.\d\d", row[4]) for row in rows(text))
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"^ +Weights +SAM, × +F-SAM, × +F-SAM, × +1\.15 buys, *$", text, re.M)
    assert re.search(r"^ Cut before +after, % +counted +counted +measured +% of steps *$", text, re.M)
    (chosen,) = (row for row in rows(text) if row[6])
    assert f"SSAM-C perturbs it in every step, at {chosen[2]} base steps each" in words


def test_the_budget_can_be_given():
    text = invoke("cuts", "resnet-small", *SMALL, "--budget", 4).stdout  # everything fits
    assert [(row[0], row[5]) for row in rows(text) if row[6]] == [("stem", "100.0")]


@pytest.mark.parametrize(("measured", "remark"), [(0.09, False), (-0.09, False), (0.11, True), (-0.11, True)])
def test_counted_and_measured_costs_that_differ_by_a_tenth_get_a_remark(capsys, measured, remark):
    text, counted = shown(capsys, measured)
    assert ("Counted and measured differ by more than a tenth" in text) == remark
    assert ("another fraction meets the budget of 1.15:" in " ".join(text.split())) == remark
    assert [row[4] for row in rows(text)] == [f"{cost + measured:.2f}" for cost in counted.values()]
    for name, cost in counted.items():
        fraction = min(1.0, 0.15 / (cost + measured - 1)) if cost + measured > 1 else 1.0
        steps = f"the last {100 * fraction:.1f} % of the steps"
        line = f"  {name}: counted {cost:.2f}, measured {cost + measured:.2f}: {steps}\n"
        assert (line in text) == (remark and fraction != min(1.0, 0.15 / (cost - 1)))


@pytest.mark.parametrize("measured", [0.5, -0.5])
def test_a_fraction_that_is_in_the_table_already_gets_no_remark(capsys, measured):
    text, counted = shown(capsys, measured, budget=1.6)
    remarked = {name for name in counted if f"  {name}: counted" in text}
    assert remarked == {name for name, cost in counted.items() if max(cost, cost + measured) > 1.6}
    assert 0 < len(remarked) < len(counted)  # the head costs little by either
    with pytest.warns(UserWarning, match="^budget is 115, "):
        assert "differ by more than a tenth" not in shown(capsys, measured, budget=115)[0]


def test_the_fraction_that_meets_the_budget_is_that_of_the_median_round(capsys):
    text, counted = shown(capsys, 0.5, 0.2, 0.6, 9.0, 0.4)
    fraction = 0.15 / (counted["layer2"] + 0.5 - 1)
    assert f"  layer2: counted {counted['layer2']:.2f}, " in text
    assert f"measured {counted['layer2'] + 0.5:.2f}: the last {100 * fraction:.1f} % of the steps\n" in text


def test_the_spread_is_half_of_the_range_between_the_quartiles(capsys):
    text, counted = shown(capsys, 0.0, 0.02, 0.01, 0.09, 0.05)  # quartiles: 0.01 and 0.05 more than counted
    assert [row[4] for row in rows(text)] == [f"{cost + 0.02:.2f} ± 0.02" for cost in counted.values()]
    assert "median of 5 rounds ± half of the range" in " ".join(text.split())


def test_every_round_is_measured_anew(monkeypatch):
    """Three rounds, in which a step costs 1.3, 1.5 and 1.4, whatever share of a pass was found to follow the cut."""
    found = iter([1.3, 1.5, 1.4])

    def costs(*arguments, **options):
        cost = next(found)
        return {Cut("layer2", 0.9, cost / 2): cost, Cut("head", 0.1, cost / 9): cost / 1.3}

    monkeypatch.setattr("sparsam.cli.cuts.cut_costs", costs)
    recipe, images = cuts.load("resnet-small", batch_size=2, precision=None)
    first, second = cuts.measure(recipe, images, torch.device("cpu"), rounds=3).measured.items()
    assert (first[0].name, first[1].rounds, first[1].spread) == ("layer2", 3, pytest.approx(0.05))
    assert (first[1].low, first[1].median, first[1].high) == pytest.approx((1.35, 1.4, 1.45))
    assert (second[0].name, second[1].median) == ("head", pytest.approx(1.4 / 1.3))


@pytest.mark.parametrize("captured", [False, True])
def test_where_steps_are_captured_the_devices_own_time_counts(monkeypatch, captured):
    clocks = []

    def costs(*arguments, clock, **options):
        clocks.append((clock.device, clock.device_time))
        return {Cut("layer2", 0.9, 0.5): 1.3}

    monkeypatch.setattr("sparsam.cli.cuts.is_captured", lambda recipe, device: captured)
    monkeypatch.setattr("sparsam.cli.cuts.cut_costs", costs)
    recipe, images = cuts.load("resnet-small", batch_size=2, precision=None)
    cuts.measure(recipe, images, torch.device("cpu"), rounds=2)
    assert clocks == [(torch.device("cpu"), captured)] * 2


def test_the_example_has_the_recipes_optimizer_and_the_marked_cut(capsys, tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('[optimizer]\nname = "adamw"\n[mask]\nname = "suffix"\ncut = "head"\n')
    text, _ = shown(capsys, recipe=file)
    assert "thrifty(model, torch.optim.AdamW, x," in text
    assert [f'SuffixMask(model, cut="{row[0]}")' in text for row in rows(text) if row[6]] == [True]


def test_a_network_without_a_cut():
    model = nn.Linear(4, 2)
    base = torch.optim.SGD(model.parameters())
    x = torch.ones(3, 4)
    measured = {cut: StepRatio.of([c]) for cut, c in cut_costs(model, lambda: model(x).sum().backward(), base).items()}
    costs = cuts.Costs(measured, count_costs(model, x))
    recipe, images = cuts.load("plain", batch_size=None, precision=None)
    with pytest.raises(ValueError, match="plain has no cut: nothing of a step could be left out"):
        cuts.show(recipe, images, costs, torch.device("cpu"), 1.15)


REFUSED = [
    (["resnet19"], "error: model must be one of resnet18,"),
    (["none.toml"], "error: there is no recipe at none.toml"),
    (["resnet18", "--precision", "fp8"], "error: train.precision must be one of fp32, bf16, fp16, but is 'fp8'"),
    (
        ["resnet18", "--budget", "1"],
        "error: budget must be a number above 1, what the base optimizer alone costs, but is 1.0",
    ),
    (
        ["resnet18", "--budget", "nan"],
        "error: budget must be a number above 1, what the base optimizer alone costs, but is nan",
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

    monkeypatch.setattr("sparsam.cli.cuts.cut_costs", costs)
    recipe, images = cuts.load("resnet-small", batch_size=2, precision=None)
    with pytest.raises(expected, match=message):
        cuts.measure(recipe, images, torch.device("cpu"), rounds=1)


def test_help_has_examples():
    assert "sparsam cuts resnet18" in invoke("cuts", "--help").stdout
