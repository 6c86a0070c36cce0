"""Thrifty SAM: what a budget buys, and that the optimizer is the one that its policies make."""

from __future__ import annotations

import copy
import logging
import math
import re
import time
import warnings
from pathlib import Path

import pytest
import torch
from ranks import in_ranks
from replay_models import CASES, closure_of, differences, snapshot
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsam import SAM, FriendlyAscent, LastSteps, SuffixMask, find_cuts, thrifty
from sparsam.errors import UserTypeError
from sparsam.models import build_model
from sparsam.replay.counting import ELEMENT, STEPPING, CountedCut, Counts, Work, count_costs
from sparsam.step_cost import Clock, StepRatio
from sparsam.thrifty import FRIENDLY, RHO, choose

BASE = {"lr": 0.05, "momentum": 0.9}


def counts(**after: tuple[float, float]) -> Counts:
    """Make up a model of a million weights, by the cost of a step from each cut and the weights that follow it."""
    weights = 10**6
    whole = ELEMENT * FRIENDLY * weights
    base = whole + ELEMENT * STEPPING * weights
    cuts = []
    for name, (cost, share) in after.items():
        flops = round((cost - 1) * base) - ELEMENT * FRIENDLY * round(share * weights)
        cuts.append(CountedCut(name, share, Work(flops)))
    return Counts(Work(whole), weights, cuts, {})


PASS = FRIENDLY / (FRIENDLY + STEPPING)  # a whole pass of these models, in base steps; a proof takes two

MADE_UP = counts(a=(2.0, 1.0), b=(1.6, 0.9), c=(1.2, 0.5), d=(1.02, 0.01))


def test_made_up_costs_are_those_that_were_asked_for():
    costs = {cut.name: cost for cut, cost in MADE_UP.costs(FRIENDLY).items()}
    assert costs == pytest.approx({"a": 2.0, "b": 1.6, "c": 1.2, "d": 1.02})


CHOSEN = {
    "many weights in many steps": ({"budget": 1.15}, ("b", 0.25)),  # a: 0.96 · 0.53, b: 0.86 · 0.71, c: 0.49 · 0.98
    "a smaller budget": ({"budget": 1.09}, ("b", 0.15)),  # a: 0.96 · 0.36, b: 0.86 · 0.53, c: 0.49 · 0.89
    "a small budget: fewer weights in more steps": ({"budget": 1.01}, ("c", 0.05)),  # 0.05, 0.07, 0.11
    "a large budget goes into steps": ({"budget": 1.3}, ("b", 0.5)),  # a: 0.96 · 0.78, b: 0.86 · 0.92
    "a larger one into weights": ({"budget": 1.5}, ("a", 0.5)),  # a: 0.96 · 0.92, b: 0.86 · 0.98
    "more than everything": ({"budget": 2.5}, ("a", 1.0)),
    "a cut": ({"budget": 1.15, "cut": "a"}, ("a", 0.15)),
    "a late cut": ({"budget": 1.15, "cut": "d"}, ("d", 1.0)),
    "a fraction": ({"budget": 1.15, "fraction": 0.1498}, ("a", 0.1498)),
    "a fraction that leaves nothing for proofs": ({"budget": 1.15, "fraction": 0.15}, ("b", 0.15)),
    "a larger fraction": ({"budget": 1.15, "fraction": 0.2}, ("b", 0.2)),
    "both, whatever the budget": ({"budget": 1.001, "cut": "a", "fraction": 0.9}, ("a", 0.9)),
}
TOTAL = 10_000


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_chosen(name):
    arguments, (cut, fraction) = CHOSEN[name]
    choice = choose(MADE_UP, total_steps=TOTAL, **arguments)
    costs = {c.name: cost for c, cost in MADE_UP.costs(FRIENDLY).items()}
    assert (choice.cut, choice.step_cost, choice.measured) == (cut, costs[cut], False)
    assert choice.cost == pytest.approx(1 + choice.fraction * (costs[cut] - 1) + 2 * PASS / TOTAL)
    if "fraction" in arguments:
        assert choice.fraction == fraction
    else:  # proofs take the place of some steps
        fewer = 0 if fraction == 1 else 2 * PASS / (costs[cut] - 1)
        assert fraction * TOTAL - fewer - 1 < choice.fraction * TOTAL <= fraction * TOTAL - fewer + 1e-6
        assert choice.cost <= arguments["budget"] + 1e-9


def test_the_number_of_steps_follows_from_a_measured_cost_and_the_cut_from_the_counted_ones():
    for step_cost in (1.0, 1.3, 1.6, 1.9, 2.5):
        choice = choose(MADE_UP, total_steps=TOTAL, budget=1.15, step_cost=step_cost)
        steps = TOTAL if step_cost == 1 else math.floor((0.15 * TOTAL - 2 * PASS) / (step_cost - 1))
        assert (choice.cut, round(choice.fraction * TOTAL)) == ("b", steps)
        assert choice.cost == pytest.approx(1 + (steps * (step_cost - 1) + 2 * PASS) / TOTAL)
        assert (choice.step_cost, choice.measured) == (step_cost, True)
        assert str(choice).endswith(f"{choice.cost:.2f} base steps, by step_cost={step_cost:g}")


def test_a_measured_cost_beside_a_fraction_only_says_what_it_costs():
    choice = choose(MADE_UP, total_steps=TOTAL, cut="a", fraction=0.3, step_cost=2.4)
    assert (choice.fraction, choice.cost) == (0.3, pytest.approx(1 + 0.3 * 1.4 + 2 * PASS / TOTAL))
    with pytest.raises(ValueError, match=r"budget must be at least 1\.3\d* to buy 2,000 of 10,000 steps from 'b' on"):
        choose(MADE_UP, total_steps=TOTAL, fraction=0.2, step_cost=2.9)  # the cut is not named, so the budget counts


def test_whole_passes_perturb_everything_and_prove_nothing():
    weights, whole = MADE_UP.weights, MADE_UP.whole
    step = 1 + (whole.flops + ELEMENT * FRIENDLY * weights) / (whole.flops + ELEMENT * STEPPING * weights)
    for step_cost in (None, 2.5):
        choice = choose(MADE_UP, total_steps=TOTAL, whole_passes=True, step_cost=step_cost)
        cost = step_cost or step
        steps = math.floor(0.15 * TOTAL / (cost - 1))
        assert (choice.cut, choice.weights, choice.step_cost) == (None, 1.0, pytest.approx(cost))
        assert (round(choice.fraction * TOTAL), choice.cost) == (steps, pytest.approx(1 + steps * (cost - 1) / TOTAL))
        assert str(choice).startswith(f"all weights in whole passes, in the last {100 * choice.fraction:.3g} % of ")
    assert choose(counts(), total_steps=TOTAL, whole_passes=True).cut is None  # a model without a cut
    assert choose(MADE_UP, total_steps=TOTAL, whole_passes=True, fraction=0.9).fraction == 0.9
    with pytest.raises(
        ValueError, match="cut must be None with whole_passes=True, which perturbs all weights, but is 'a'"
    ):
        choose(MADE_UP, total_steps=TOTAL, whole_passes=True, cut="a")


def test_proofs_in_a_distributed_model_take_twice_the_passes():
    alone, distributed = (
        choose(MADE_UP, total_steps=TOTAL, cut="b", fraction=0.5, distributed=d) for d in (False, True)
    )
    assert distributed.cost - alone.cost == pytest.approx(2 * PASS / TOTAL)


@pytest.mark.parametrize("total_steps", [1, 2, 3, 4])
def test_a_single_step_has_a_single_proof(total_steps):
    """From b a step costs 1.6, and a proof a pass: one step is bought by 0.6 + PASS, and two by twice as much."""
    one = 1 + (0.6 + PASS) / total_steps
    for budget, steps in ((one - 0.001, 0), (one + 0.001, 1), (2 * one - 1.001, 1), (2 * one - 0.999, 2)):
        if steps:
            choice = choose(MADE_UP, total_steps=total_steps, budget=budget, cut="b")
            assert round(choice.fraction * total_steps) == min(steps, total_steps)
        else:
            with pytest.raises(ValueError, match="budget must be at least"):
                choose(MADE_UP, total_steps=total_steps, budget=budget, cut="b")


def test_steps_are_whole_and_never_cost_more():
    for total_steps in (1, 7, 10, 33, 1000):
        for budget in (1.05, 1.1, 1.15, 1.3, 1.7, 2.5):
            try:
                choice = choose(MADE_UP, total_steps=total_steps, budget=budget)
            except ValueError as error:
                assert "to buy 1 of" in str(error)
                continue
            steps = total_steps - LastSteps(choice.fraction, total_steps).first
            assert steps == pytest.approx(choice.fraction * total_steps)
            assert choice.cost <= budget + 1e-9


@pytest.mark.parametrize("total_steps", [10, 33, 1000])
def test_a_named_fraction_costs_no_more_than_the_budget(total_steps):
    """0.241 of 10 steps are 3, which d, at 1.02 a step, has for 1.006, and its proofs for 0.124."""
    choice = choose(MADE_UP, total_steps=total_steps, budget=1.15, fraction=0.241)
    assert choice.cut == {10: "d", 33: "c", 1000: "b"}[total_steps]
    assert choice.cost <= 1.15 + 1e-9


def test_much_work_after_a_cut_is_worth_nothing_without_weights():
    assert choose(counts(a=(2.0, 1.0), b=(1.5, 0.06)), total_steps=1000).cut == "a"
    assert choose(counts(a=(2.0, 1.0), b=(1.5, 0.6)), total_steps=1000).cut == "b"


def test_late_cuts_only_where_there_is_nothing_else():
    assert choose(counts(head=(1.3, 0.04)), total_steps=100).cut == "head"
    assert choose(counts(a=(1.9, 0.05), head=(1.01, 0.04)), total_steps=100, budget=1.02).cut == "a"


def test_the_least_budget_is_that_of_a_cut_that_would_be_chosen():
    costs = counts(a=(1.9, 0.5), b=(1.4, 0.2), head=(1.01, 0.04))
    with pytest.raises(
        ValueError, match=r"at least 1.2039 to buy 1 of 5 steps from 'b' on, but is 1.17; it buys one of 6 "
    ):
        choose(costs, total_steps=5, budget=1.17)
    assert choose(costs, total_steps=5, budget=1.2039).cut == "b"
    assert choose(costs, total_steps=6, budget=1.17).cut == "b"


def test_of_cuts_with_the_same_weights_the_cheapest_is_taken():
    same = counts(a=(1.3, 0.5), b=(1.2, 0.5), head=(1.01, 0.0))
    for given in ({"budget": 1.5}, {"fraction": 0.3}):  # enough for every step from any cut
        assert choose(same, total_steps=100, **given).cut == "b"


ABOVE_ONE = "budget must be a number above 1, what the base optimizer alone costs, but is "
NO_CUT = (
    "model has no cut, so no part of a sharpness-aware step could be left out. If it is compiled as a whole, compile its "
    "blocks instead: `for block in model.blocks: block.compile()`. Otherwise give whole_passes=True, which perturbs all "
    "weights: the budget of 1.15 buys the last 12.1 % of the steps"
)
REFUSED = {
    "no cut": (counts(), {}, NO_CUT),
    "one": (MADE_UP, {"budget": 1}, ABOVE_ONE + "1"),
    "no number": (MADE_UP, {"budget": "1.2"}, ABOVE_ONE + "'1.2'"),
    "not a number": (MADE_UP, {"budget": float("nan")}, ABOVE_ONE + "nan"),
    "no bound": (MADE_UP, {"budget": float("inf")}, ABOVE_ONE + "inf"),
    "no step": (
        MADE_UP,
        {"budget": 1.0001},
        "budget must be at least 1.0082 to buy 1 of 100 steps from 'c' on, but is 1.0001; it buys one of 8,191"
        " (total_steps counts optimizer steps, not epochs)",
    ),
    "no step from the cut": (
        MADE_UP,
        {"budget": 1.009, "cut": "a"},
        "budget must be at least 1.0162 to buy 1 of 100 steps from 'a' on, but is 1.009; it buys one of 180"
        " (total_steps counts optimizer steps, not epochs)",
    ),
    "a fraction that is too large": (
        MADE_UP,
        {"budget": 1.01, "fraction": 0.7},
        "budget must be at least 1.0264 to buy 70 of 100 steps from 'd' on, but is 1.01; it buys 1 of them",
    ),
    "no step in whole passes": (
        MADE_UP,
        {"budget": 1.0001, "whole_passes": True},
        "budget must be at least 1.0124 to buy 1 of 100 steps in whole passes, but is 1.0001; it buys one of 12,381"
        " (total_steps counts optimizer steps, not epochs)",
    ),
    "a cost below one": (MADE_UP, {"step_cost": 0.9}, "step_cost must be a number >= 1, in base steps, but is 0.9"),
    "no fraction": (MADE_UP, {"fraction": 0}, "fraction must be a number in (0, 1], but is 0"),
    "no steps": (MADE_UP, {"total_steps": 0}, "total_steps must be a whole number >= 1, but is 0"),
    "a module": (
        MADE_UP,
        {"cut": nn.Linear(1, 1)},
        "cut must be where the model can be cut, such as 'a', 'b', 'c', 'd', but is a Linear and no name; "
        "find_cuts(model, closure) and `sparsam cuts` list all",
    ),
    "another cut": (
        MADE_UP,
        {"cut": "e"},
        "cut must be where the model can be cut, such as 'a', 'b', 'c', 'd', but is 'e'; find_cuts(model, closure) and "
        "`sparsam cuts` list all",
    ),
}


def test_a_measurement_is_not_a_number():
    with pytest.raises(TypeError, match=r"^step_cost must be a number, so that .*: give step_cost=1\.62$"):
        choose(MADE_UP, total_steps=100, step_cost=StepRatio.of([1.5, 1.62, 1.7]))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    given, arguments, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        choose(given, **{"total_steps": 100, **arguments})


@pytest.mark.parametrize(
    "arguments", [{}, {"cut": "a"}, {"fraction": 0.7}, {"whole_passes": True}, {"step_cost": 3}, {"fraction": 0.7, "step_cost": 3}]
)  # fmt: skip
def test_the_remedies_work(arguments):
    """What an error names as the least budget is enough, and less is not."""
    arguments = {"total_steps": 100, **arguments}
    with pytest.raises(ValueError, match="budget must be at least") as caught:
        choose(MADE_UP, budget=1.0001, **arguments)
    least = float(re.search(r"at least (\S+) to buy", str(caught.value))[1])
    assert choose(MADE_UP, budget=least, **arguments).cost <= least + 1e-9
    with pytest.raises(ValueError, match="budget must be at least"):
        choose(MADE_UP, budget=least - 2e-4, **arguments)


def test_a_measured_cost_buys_steps_where_the_counted_one_buys_none():
    arguments = {"total_steps": 100, "budget": 1.007, "step_cost": 1.05}
    assert choose(MADE_UP, **arguments).fraction == 0.01


def test_the_page_says_what_is_chosen_for_resnet18():
    page = (Path(__file__).parents[1] / "docs" / "thrifty.md").read_text(encoding="utf-8")
    model = build_model("resnet18", 100).to("meta")
    counted = count_costs(model, torch.empty(128, 3, 32, 32, device="meta"))
    for whole_passes in (False, True):
        choice = choose(counted, total_steps=78_000, budget=1.15, whole_passes=whole_passes)
        assert f"print(opt.choice)  # ResNet-18: {choice}\n" in page
    rows = re.findall(
        r"^\| (1\.\d\d) \| from `(\S+)` on, (\S+) % of the weights, in the last (\S+) % ", page, re.MULTILINE
    )
    assert len(rows) == 5
    for budget, *row in rows:
        choice = choose(counted, total_steps=10**6, budget=float(budget))  # as `sparsam cuts`
        assert [choice.cut, f"{100 * choice.weights:.3g}", f"{100 * choice.fraction:.3g}"] == row


# ------------------------------------------------------------------------------------------------- the optimizer


def build(name="vgg", **arguments):
    model, batch = CASES[name].model(), CASES[name].batch()
    opt = thrifty(model, torch.optim.SGD, batch[0], **{"total_steps": 8, "budget": 1.6, **BASE, **arguments})
    return model, batch, opt


def test_it_is_the_sam_of_its_policies():
    model, batch, opt = build()
    choice = opt.choice
    assert isinstance(opt, SAM)
    assert repr(opt.mask) == repr(SuffixMask(model, choice.cut))
    assert repr(opt.ascent) == repr(FriendlyAscent())
    assert repr(opt.schedule) == repr(LastSteps(choice.fraction, 8))
    assert all(group["rho"] == RHO for group in opt.param_groups)
    assert 0 < opt.schedule.first < 8

    twin = CASES["vgg"].model()
    written_out = SAM(
        twin.parameters(),
        torch.optim.SGD,
        rho=RHO,
        mask=SuffixMask(twin, choice.cut),
        ascent=FriendlyAscent(),
        schedule=LastSteps(choice.fraction, 8),
        **BASE,
    )
    for _ in range(8):
        for network, optimizer in ((model, opt), (twin, written_out)):
            torch.manual_seed(1)
            optimizer.step(closure_of(network, optimizer.zero_grad, batch))
    assert differences(snapshot(model), snapshot(twin)) == []
    written_out.load_state_dict(opt.state_dict())  # the settings are the same


def test_nothing_moves_when_it_is_built():
    model, (x, _) = CASES["vgg"].model(), CASES["vgg"].batch()
    before = snapshot(model)
    thrifty(model, torch.optim.SGD, x, total_steps=8, budget=1.6, **BASE)
    assert differences(before, snapshot(model)) == []


def test_it_says_what_it_chose(caplog):
    with caplog.at_level(logging.INFO, logger="sparsam"):
        _, _, opt = build()
    assert [record.getMessage() for record in caplog.records] == [f"thrifty: {opt.choice}"]
    assert str(opt.choice) in repr(opt)
    assert "lr: 0.05" in repr(opt)
    assert copy.deepcopy(opt).choice == opt.choice


def test_groups_and_settings_are_passed_on():
    model, (x, _) = CASES["vgg"].model(), CASES["vgg"].batch()
    first, *rest = model.parameters()
    groups = [{"params": [first], "lr": 0.3, "rho": 0.7}, {"params": rest}]
    opt = thrifty(model, torch.optim.AdamW, x, total_steps=9, budget=1.6, rho=0.05, params=groups, lr=0.1)
    assert isinstance(opt.base_optimizer, torch.optim.AdamW)
    assert [(group["lr"], group["rho"]) for group in opt.param_groups] == [(0.3, 0.7), (0.1, 0.05)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"bugdet": 1.5},
            "'bugdet' is an argument neither of thrifty nor of SGD: did you mean budget? thrifty has budget, rho, "
            "params, cut, fraction, step_cost, whole_passes, adaptive, perturbation, process_group; all others go to SGD",
        ),
        ({"adaptiv": True}, "'adaptiv' is an argument neither of thrifty nor of SGD: did you mean adaptive? "),
        ({"mask": None}, "mask must not be given: thrifty chooses it. SAM takes one of your own"),
    ],
    ids=["bugdet", "adaptiv", "mask"],
)
def test_misspelled_arguments_are_named(arguments, message):
    model, (x, _) = CASES["vgg"].model(), CASES["vgg"].batch()
    with pytest.raises(UserTypeError, match=f"^{re.escape(message)}"):
        thrifty(model, torch.optim.SGD, x, total_steps=9, **arguments, **BASE)


def test_a_budget_in_percent_gives_a_warning():
    model, (x, _) = CASES["vgg"].model(), CASES["vgg"].batch()
    words = r"^budget is 115, far more than 2\.\d+, what a training costs if every step perturbs from '.*' on"
    with pytest.warns(UserWarning, match=words + "; it is a factor, such as 1.15$"):
        thrifty(model, torch.optim.SGD, x, total_steps=9, budget=115, **BASE)


def test_eval_mode_gives_a_warning():
    """A head that only training uses would not count."""
    model, (x, _) = CASES["vgg"].model().eval(), CASES["vgg"].batch()
    with pytest.warns(UserWarning, match=r"^thrifty counts the model as it is, in eval mode; .* call model.train\(\) "):
        thrifty(model, torch.optim.SGD, x, total_steps=9, budget=1.6, **BASE)


class WithTwoHeads(nn.Module):
    """Five layers of 16, and a head after the second: a loss of both outputs goes past every later cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.early = layers(), nn.Linear(16, 16)

    def forward(self, x):
        middle = self.layers[:2](x)
        return {"early": self.early(middle), "late": self.layers[2:](middle)}


def test_the_output_of_an_auxiliary_head_may_be_a_part_of_the_loss():
    model, x = WithTwoHeads(), torch.ones(256, 16)
    opt = chain(model, cut=None, fraction=1.0, budget=2.5)
    assert chain(model, cut="layers.3").choice.cut == "layers.3"  # the loss may use the late output alone

    def closure():
        opt.zero_grad()
        loss = sum(output.square().mean() for output in model(x).values())
        loss.backward()
        return loss

    cuts = [cut.name for cut in find_cuts(model, closure, passes=0)]
    assert cuts == [cut.name for cut in find_cuts(model, lambda: closure() and None, passes=0)]
    assert cuts == ["layers.0", "layers.1"]
    of_late = [cut.name for cut in find_cuts(model, lambda: model(x)["late"].mean(), passes=0)]
    assert of_late == ["layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "layers.5"]
    assert opt.choice.cut in cuts
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is replayed
        for _ in range(3):
            opt.step(closure)


class HeadFirst(nn.Module):
    """Registers its head before its layers, and has one more layer, which is used in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.layers, self.spare = nn.Linear(16, 4), layers(), nn.Linear(16, 4)

    def forward(self, x, *, training=False):
        h = self.layers(x)
        return self.head(h) + self.spare(h) if training else self.head(h)


@pytest.mark.parametrize("spare", [False, True])
def test_without_a_closure_the_weights_after_the_cut_are_those_that_were_counted(spare):
    model, x = HeadFirst(), torch.ones(2, 16)
    model.spare.requires_grad_(spare)
    opt = thrifty(model, torch.optim.SGD, x, total_steps=2, cut="layers.4", fraction=1.0, **BASE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for half in (opt.first_step, opt.second_step) * 2:
            model(x, training=True).sum().backward()
            half()
            opt.zero_grad()
    names = [name for (name, _), m in zip(model.named_parameters(), opt.masks(), strict=True) if m.any()]
    moved = {name.rpartition(".")[0] for name in names}
    assert moved == {"head", "layers.4", "layers.5", *(["spare"] if spare else [])}
    (warning,) = [str(w.message) for w in caught]
    assert ("which of 2 parameters follow 'layers.4' is not seen: those of modules" in warning) is spare  # not counted


def test_weights_outside_the_model_follow_every_cut_and_are_not_guessed():
    model, x, w = HeadFirst(), torch.ones(2, 16), nn.Parameter(torch.ones(4))
    model.spare.requires_grad_(False)
    params = [*model.parameters(), w]
    opt = thrifty(model, torch.optim.SGD, x, total_steps=1, cut="layers.4", fraction=1.0, params=params, **BASE)
    with pytest.warns(
        UserWarning, match=r"^the second pass is computed in full, exact but slower: only step\(closure\)"
    ):
        for half in (opt.first_step, opt.second_step):
            (model(x) * w).sum().backward()
            half()
            opt.zero_grad()
    assert opt.masks()[-1].all()


def test_few_weights_give_a_warning():
    with pytest.warns(
        UserWarning,
        match=r"thrifty perturbs few weights: from 2 on, 3\.82 % of .*; a larger budget, a smaller fraction, or cut=, perturbs more",
    ):
        thrifty(
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Linear(1, 50)),
            torch.optim.SGD,
            torch.ones(512, 64),
            total_steps=100,
            cut="2",
        )


def layers() -> nn.Sequential:
    """Build six layers of 272 weights each."""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))


def chain(model, params=None, **arguments):
    given = {"total_steps": 1000, "budget": 1.15, "params": params, "lr": 0.1, **arguments}
    return thrifty(model, torch.optim.SGD, torch.ones(256, 16), **given)


def cost_of(cut: int, *, trained: int, perturbed: int) -> tuple[float, float]:
    """Return the costs of a step of the chain and of its proofs, by hand, if so many layers are trained and perturbed.

    The first proof is a whole pass and a forward pass before the cut, the second a whole pass.
    """
    forward = 2 * 256 * 16 * 16 + ELEMENT * (2 * 256 * 16 + 16 * 16 + 16)  # with the bias
    backward = 2 * 256 * 16 * 16 + ELEMENT * (2 * 256 * 16 + 16 * 16)  # of the input, and the same of the weight
    after = (6 - cut) * (forward + 2 * backward) - (backward if cut == 0 else 0)
    whole = 6 * (forward + 2 * backward) - backward
    base = whole + ELEMENT * STEPPING * 272 * trained
    return 1 + (after + ELEMENT * FRIENDLY * 272 * perturbed) / base, (2 * whole + cut * forward) / base


@pytest.mark.parametrize(("first", "end"), [(0, 6), (4, 6), (2, 4), (0, 2)])
def test_the_choice_counts_the_weights_that_are_trained(first, end):
    """No cut before which nothing is trained, or after which nothing is; the rule by hand."""
    best = None
    for cut in range(first, end):
        cost, proofs = cost_of(cut, trained=end - first, perturbed=end - cut)
        weights, fraction = (end - cut) / (end - first), int((1000 * 0.15 - proofs) / (cost - 1)) / 1000
        gain = (1 - math.exp(-min(weights, cost - 1) / 0.3)) * (1 - math.exp(-fraction / 0.2))
        best = max(best or (0,), (gain, str(cut), weights, fraction, 1 + fraction * (cost - 1) + proofs / 1000))
    model = layers()
    choice = chain(model, model[first:end].parameters()).choice
    assert (choice.cut, choice.weights, choice.fraction) == best[1:4]
    assert choice.cost == pytest.approx(best[4])


def test_without_params_everything_is_trained():
    model = layers()
    assert chain(model).choice == chain(model, model.parameters()).choice


@pytest.mark.parametrize("frozen", ["by requires_grad", "by params"])
def test_frozen_weights_do_not_count(frozen):
    model = layers()
    params = [*model[2:4].parameters()]
    if frozen == "by requires_grad":
        model[:2].requires_grad_(False)
        model[4:].requires_grad_(False)
        params = [*model.parameters()]
    choice = chain(model, params, fraction=0.01).choice
    assert (choice.cut, choice.weights) == ("2", 1.0)  # of all that perturb both, the cheapest
    assert chain(model, params, cut="3", fraction=0.01).choice.weights == 0.5


def test_few_of_the_weights_that_are_trained_give_a_warning():
    """Of 2 · 272 + 16 weights, 16 follow the cut."""
    model = layers()
    with pytest.warns(UserWarning, match=r"thrifty perturbs few weights: from 5 on, 2\.86 % of the weights"):
        chain(model, [*model[:2].parameters(), model[5].bias], cut="5")


def test_weights_outside_the_model_are_perturbed_and_count():
    """Those of a loss, say. The model has 6 · 272 weights, of which 4 · 272 follow the cut."""
    model, centers = layers(), nn.Parameter(torch.ones(272))
    opt = chain(model, [*model.parameters(), centers], cut="2", fraction=1.0)
    cost, proofs = cost_of(2, trained=7, perturbed=5)
    assert opt.choice.weights == pytest.approx(5 / 7)
    assert opt.choice.cost == pytest.approx(cost + proofs / 1000)

    def closure():
        opt.zero_grad()
        loss = (model(torch.ones(2, 16)).sum(1) * centers[:2]).sum()
        loss.backward()
        return loss

    opt.step(closure)
    assert opt.masks()[-1].all()


def test_params_must_hold_something_after_the_cut():
    words = "params must hold weights of the model {}, where they are perturbed, but hold none that require a gradient"
    model, elsewhere = layers(), nn.Linear(2, 2)
    for module, cut, where in (
        (model[0], "3", "from '3' on"),
        (elsewhere, "3", "from '3' on"),
        (elsewhere, None, "after a cut"),
    ):
        with pytest.raises(ValueError, match=f"^{words.format(where)}$"):
            chain(model, module.parameters(), cut=cut)


def test_params_must_be_parameters():
    model = layers()
    with pytest.raises(TypeError, match=r"params must be parameters .*, but is a module; pass model.parameters\(\)"):
        chain(model, model)


def test_weights_are_those_of_params():
    """Of the last three layers, two follow the cut, and are perturbed."""
    model = layers()
    assert chain(model, model.parameters(), cut="4").choice.weights == pytest.approx(1 / 3)
    opt = chain(model, model[3:].parameters(), cut="4", fraction=1.0)
    assert opt.choice.weights == pytest.approx(2 / 3)
    opt.step(closure_of(model, opt.zero_grad, (torch.randn(8, 16), torch.randint(16, (8,)))))
    assert [bool(m.all()) for m in opt.masks()] == [False] * 2 + [True] * 4


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (torch.ones(2, 4), "base_optimizer must be a class such as torch.optim.SGD, but is a Tensor"),
        (nn.Linear(2, 2), "base_optimizer must be a class such as torch.optim.SGD, but is a Linear"),
        (SAM([nn.Parameter(torch.zeros(1))], torch.optim.SGD, lr=1), "base_optimizer must be a plain optimizer, but"),
    ],
)
def test_a_base_that_is_neither_a_class_nor_a_plain_optimizer(base, message):
    with pytest.raises(TypeError, match=message):
        thrifty(nn.Linear(4, 2), base, torch.ones(2, 4), total_steps=10)


def test_an_optimizer_that_exists():
    """It trains as one that thrifty has built; its groups, and rho in them, stay."""
    results = []
    for exists in (False, True):
        model, batch = CASES["vgg"].model(), CASES["vgg"].batch()
        first, *rest = model.parameters()
        groups = [{"params": [first], "lr": 0.3, "rho": 0.7}, {"params": rest}]
        given = {"total_steps": 9, "cut": next(iter(CASES["vgg"].cuts)), "fraction": 0.5, "adaptive": True}
        base = torch.optim.SGD(groups, **BASE)
        opt = (
            thrifty(model, base, batch[0], **given)
            if exists
            else thrifty(model, torch.optim.SGD, batch[0], params=groups, **given, **BASE)
        )
        assert (opt.base_optimizer is base) == exists
        assert opt.adaptive
        assert [(group["lr"], group["rho"]) for group in opt.param_groups] == [(0.3, 0.7), (0.05, RHO)]
        for _ in range(9):
            torch.manual_seed(1)
            opt.step(closure_of(model, opt.zero_grad, batch))
        results.append((snapshot(model), opt.choice))
    assert differences(results[0][0], results[1][0]) == []
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"lr": 0.1},
            "'lr' must not be given with an optimizer that exists: the SGD has its settings; thrifty has bud",
        ),
        ({"bugdet": 2}, "'bugdet' must not be given with an optimizer that exists: "),
        ({"params": []}, "params must be None with an optimizer that exists: the SGD has its parameters"),
    ],
)
def test_an_optimizer_that_exists_takes_no_settings(arguments, message):
    model = layers()
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        thrifty(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 16), total_steps=9, **arguments)


def test_a_named_fraction_is_one_of_whole_steps():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    opt = thrifty(model, torch.optim.SGD, torch.ones(64, 16), total_steps=12, cut="2", fraction=0.34, lr=0.1)
    aware = [step for step in range(12) if opt.schedule.ascent(step, opt.ascent) is not None]
    assert len(aware) == 5
    assert opt.choice.fraction == pytest.approx(5 / 12)


def test_a_model_without_a_cut():
    model = nn.Linear(4, 2)
    with pytest.raises(ValueError, match=r"^model has no cut, so no part"):
        thrifty(model, torch.optim.SGD, torch.ones(3, 4), total_steps=10)
    with pytest.raises(TypeError, match="model must be a module, but is a generator"):
        thrifty(model.parameters(), torch.optim.SGD, torch.ones(3, 4), total_steps=10)
    with pytest.raises(ValueError, match="rho must be a finite number >= 0, but is -1"):
        thrifty(model, torch.optim.SGD, torch.ones(3, 4), total_steps=10, rho=-1)


def test_the_choice_asks_no_clock(monkeypatch):
    def ask(*_, **__):
        pytest.fail("thrifty asks a clock, so its choice can change from one call to the next")

    for clock in ("perf_counter", "process_time", "monotonic", "time"):
        monkeypatch.setattr(time, clock, ask)
    monkeypatch.setattr(Clock, "now", ask)
    model = build_model("resnet-small", 10, channels=1)
    opt = thrifty(model, torch.optim.SGD, torch.randn(16, 1, 8, 8), total_steps=1000, budget=1.3, lr=0.1)
    monkeypatch.undo()
    assert opt.choice.cut == "layer3"


def train_in_rank(rank: int) -> tuple:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).double())
    x = torch.randn(256, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    opt = thrifty(model, torch.optim.SGD, x, total_steps=6, budget=1.6, lr=0.1)

    def closure():
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(6):
        opt.step(closure)
    return tuple(opt.choice), [p.detach() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
def test_ranks_agree():
    (one, weights), (other, others) = in_ranks(train_in_rank)
    assert one == other
    assert 0 < one[2] < 1
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
