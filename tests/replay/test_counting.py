"""What a step costs, counted: against torch's counter, by hand, and against step times that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from replay_models import CASES, Checkpointed, differences, snapshot, vectors
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sparsam.models import build_model
from sparsam.replay.counting import ELEMENT, PERTURBING, STEPPING, Counts, Work, count_costs

MEASURED = Path(__file__).parents[2] / "results" / "ssam-c" / "step-times.json"
ROWS = {  # what benchmarks/ssam_c.py calls what follows a cut
    "resnet18": {
        "layer2": "stages 2-4",
        "layer3": "stages 3+4",
        "layer3.1": "half of stage 3, stage 4",
        "layer4": "stage 4",
        "layer4.1": "last block",
    },
    "wrn-28-10": {
        "layer2": "groups 2+3",
        "layer3": "group 3",
        "layer3.1": "last 3 blocks",
        "layer3.2": "last 2 blocks",
        "layer3.3": "last block",
    },
}


def on_meta(network: str, batch: int = 128) -> Counts:
    """Count a network without computing anything."""
    return count_costs(build_model(network, 100).to("meta"), torch.empty(batch, 3, 32, 32, device="meta"))


def test_a_chain_by_hand():
    """In a batch of 3: 5 → 7 → 11 → 2. The batch needs no gradient, so the first layer has one product less."""
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 11, bias=False), nn.Linear(11, 2, bias=False))
    counts = count_costs(model, torch.ones(3, 5))
    a, b, c, ab, bc, cd = 3 * 5, 3 * 7, 3 * 11, 5 * 7, 7 * 11, 11 * 2
    d = 3 * 2
    third = Work(3 * 2 * 3 * cd, 3 * (c + cd + d))  # forward, and the gradients of weight and input
    second = Work(3 * 2 * 3 * bc, 3 * (b + bc + c))
    first = Work(2 * 2 * 3 * ab, 2 * (a + ab + b))
    after = {"2": third, "1": _sum(second, third), "0": _sum(first, second, third)}
    assert {cut.name: cut.after for cut in counts.cuts} == after
    assert counts.whole == after["0"]
    assert counts.weights == ab + bc + cd
    middle = counts.cuts[1]
    extra = after["1"].flops + ELEMENT * (after["1"].elements + PERTURBING * (bc + cd))
    base = counts.whole.flops + ELEMENT * (counts.whole.elements + STEPPING * counts.weights)
    assert counts.costs()[middle] == pytest.approx(1 + extra / base)
    assert counts.costs(perturbing=0)[middle] == pytest.approx(1 + (extra - ELEMENT * PERTURBING * (bc + cd)) / base)


def test_weights_that_no_pass_uses_are_trained_all_the_same():
    """Of 640 weights 64 follow the cut; the step and perturbing count by the same number."""

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.unused = (nn.Linear(8, size, bias=False) for size in (8, 8, 64))

        def forward(self, x):
            return self.b(self.a(x).relu())

    counts = count_costs(Unused(), torch.ones(4, 8))
    assert counts.weights == 640
    assert [(cut.name, cut.weights) for cut in counts.cuts] == [("a", 0.2), ("b", 0.1)]
    last = counts.cuts[1]
    extra = last.after.flops + ELEMENT * (last.after.elements + PERTURBING * 64)
    base = counts.whole.flops + ELEMENT * (counts.whole.elements + STEPPING * 640)
    assert counts.cost(last) == pytest.approx(1 + extra / base)


def _sum(*works: Work) -> Work:
    return Work(sum(w.flops for w in works), sum(w.elements for w in works))


@pytest.mark.parametrize("name", ["resnet", "wrn-10-2", "vgg", "vit", "encoder", "gpt"])
def test_the_whole_is_what_torch_counts(name):
    model, (x, _) = CASES[name].model(), CASES[name].batch()
    with (
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(x).sum().backward()
    counts = count_costs(model, x)
    assert counts.whole.flops == counter.get_total_flops() > 0
    flops = [cut.after.flops for cut in counts.cuts]
    assert flops == sorted(flops, reverse=True)
    assert set(CASES[name].cuts) - {"stem"} <= {cut.name for cut in counts.cuts}


@pytest.mark.parametrize("network", ROWS)
def test_the_cost_agrees_with_measured_steps(network):
    rows = [row for row in json.loads(MEASURED.read_text())["rows"] if row["network"] == network]
    measured = {row["method"]: row["ratio"] for row in rows}
    costs = {cut.name: cost for cut, cost in on_meta(network).costs().items()}
    expected = {cut: measured[f"SSAM-C, {words}"] for cut, words in ROWS[network].items()}
    assert {cut: costs[cut] for cut in expected} == pytest.approx(expected, abs=0.04)
    assert costs["stem"] == pytest.approx(measured["SAM"], abs=0.04)


def test_nothing_moves():
    model, (x, _) = CASES["vgg"].model(), CASES["vgg"].batch()
    model[1].eval()
    model(x).square().mean().backward()
    grads, modes = [p.grad for p in model.parameters()], [m.training for m in model.modules()]
    torch.manual_seed(4)
    before, batch = snapshot(model), x.clone()
    count_costs(model, x)
    assert differences(before, snapshot(model)) == []
    assert [p.grad for p in model.parameters()] == grads
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(x, batch)


def test_a_first_layer_that_works_in_place_leaves_the_example():
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    before = x.clone()
    count_costs(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2)), x)
    assert torch.equal(x, before)


class SometimesSkips(nn.Module):
    """Skips layers at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(20))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if torch.rand(()) < 0.5 else x
        return x


def test_random_numbers_do_not_matter():
    model, x = SometimesSkips(), torch.ones(2, 4)
    counts = []
    for seed in range(3):
        torch.manual_seed(seed)
        counts.append(count_costs(model, x))
    assert counts[0] == counts[1] == counts[2]
    assert len(counts[0].cuts) < 20


def test_recurrent_layers_and_attention_are_taken_apart():
    """Where a device has one operation for all of it, torch's counter knows nothing of that."""
    lstm = nn.LSTM(4, 5)
    enabled = torch.backends.mkldnn.enabled
    counts = count_costs(lstm, torch.ones(3, 2, 4))
    inputs, states = 2 * 2 * 4 * 20, 2 * 2 * 5 * 20  # in each of three time steps
    # Both weights have a gradient in each time step; inputs have none, and states all but the first.
    assert counts.whole.flops == 2 * 3 * (inputs + states) + 2 * states
    assert torch.backends.mkldnn.enabled == enabled
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.ones(3, 4, 8)
    projections, products = 2 * 3 * 4 * 8 * (4 * 8), 2 * 3 * 4 * 4 * 8 * 2
    counts = count_costs(attention, {"query": x, "key": x, "value": x, "need_weights": False})
    # each product has two gradients, but the batch needs none: of the projections, only the last has both
    assert counts.whole.flops == 2 * projections + projections // 4 + 3 * products


def test_inputs_by_position_and_by_name():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(5, 3)

        def forward(self, x, y):
            return {"sum": self.a(x) + self.b(y), "note": "no tensor"}

    model, x, y = Two(), torch.ones(2, 4), torch.ones(2, 5)
    assert count_costs(model, (x, y)) == count_costs(model, [x, y]) == count_costs(model, {"y": y, "x": x})
    assert count_costs(model, (x, y)).whole.flops == 2 * 2 * (2 * 3 * (4 + 5))


def test_what_is_checkpointed_is_computed_twice():
    x, _ = vectors()
    plain, twice = (count_costs(Checkpointed(which, reentrant=False).double(), x) for which in ((), (1,)))
    assert twice.whole.flops == plain.whole.flops + 2 * 8 * 8 * 8  # the block's layer, forward
    with pytest.raises(ValueError, match="use_reentrant=False"):
        count_costs(Checkpointed((1,), reentrant=True).double(), x)


def refuse(graph, inputs):
    raise AssertionError("nothing must be compiled")


def wrapped(model):
    return torch.compile(model, backend=refuse)


def by_method(model):
    model.compile(backend=refuse)
    return model


@pytest.mark.parametrize("compiled", [wrapped, by_method])
def test_what_is_compiled_as_a_whole_has_no_cut(compiled):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    counts = count_costs(compiled(model), torch.ones(3, 4))
    assert counts.cuts == []
    assert counts.whole.flops == 672


def test_compiled_blocks_are_counted_without_compiling():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    plain = count_costs(model, torch.ones(3, 4))
    for block in model:
        block.compile(backend=refuse)
    assert count_costs(model, torch.ones(3, 4)) == plain


def test_outputs_that_no_loss_uses_do_not_hide_cuts():
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x)
            return self.b(h), h

    assert [cut.name for cut in count_costs(Cache(), torch.ones(2, 4)).cuts] == ["a", "b"]


def test_refused():
    with pytest.raises(TypeError, match="model must be a module, but is a list"):
        count_costs([torch.ones(2)], torch.ones(2))
    with pytest.raises(ValueError, match="model must have an output that depends on a parameter that requires a grad"):
        count_costs(nn.Linear(2, 2).requires_grad_(False), torch.ones(2, 2))
    rule = "^example_inputs must be what the model is called with in training, without targets, but "
    with pytest.raises(ValueError, match=rf"{rule}model\(inputs\) with inputs of type int raised TypeError"):
        count_costs(nn.Linear(2, 2), 3)
    with pytest.raises(ValueError, match=rf"{rule}model\(inputs\) with inputs of shape \(2, 5\) raised RuntimeErr"):
        count_costs(nn.Linear(2, 2), torch.ones(2, 5))
    words = rf"{rule}model\(\*\*inputs\) with the keys 'x' raised TypeError: .* gets it in a tuple: \(dict,\) as inputs"
    with pytest.raises(ValueError, match=words):
        count_costs(nn.Linear(2, 2), {"x": torch.ones(2, 2)})
