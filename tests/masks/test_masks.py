"""What each policy selects."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from cases import task
from sparsam import SAM, DynamicMask, FisherMask, Mask, NMMask, NormMask, RandomMask, SuffixMask, TopKMask
from sparsam.selection import expand, flatten

shapes = st.lists(st.sampled_from([(), (0,), (1,), (7,), (3, 5), (2, 2, 2, 2), (0, 3)]), min_size=1, max_size=6)
sparsities = st.floats(0, 1) | st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])
dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


def parameters(shapes, dtype, seed, *, ties=False):
    torch.manual_seed(seed)
    params = [nn.Parameter(torch.randn(s).to(dtype)) for s in shapes]
    for p in params:
        p.grad = torch.randint(-1, 2, p.shape).to(dtype) if ties else torch.randn(p.shape).to(dtype)
    return params


def chosen(mask, params, step=0, previous=None):
    return expand(mask.select(params, step, previous), params)


@given(shapes=shapes, sparsity=sparsities, dtype=dtypes, seed=st.integers(0, 999), ties=st.booleans())
@pytest.mark.parametrize("kind", ["random", "topk", "dynamic"])
def test_exactly_k_for_any_shape_dtype_and_sparsity(kind, shapes, sparsity, dtype, seed, ties):
    params = parameters(shapes, dtype, seed, ties=ties)
    mask = {
        "random": lambda: RandomMask(sparsity, seed=seed),
        "topk": lambda: TopKMask(sparsity, lambda ps: [p.grad for p in ps]),
        "dynamic": lambda: DynamicMask(sparsity, interval=1, total_steps=5, seed=seed),
    }[kind]()
    previous = None
    for step in range(4):
        previous = chosen(mask, params, step, previous)
        assert [m.shape for m in previous] == [p.shape for p in params]
        assert sum(int(m.sum()) for m in previous) == round((1 - sparsity) * sum(p.numel() for p in params))


@given(
    shapes=shapes,
    sparsity=sparsities,
    drop=st.floats(0, 1),
    criterion=st.sampled_from(["flattest", "sharpest", "random"]),
    interval=st.integers(1, 4),
    total_steps=st.integers(1, 12),
    seed=st.integers(0, 99),
    ties=st.booleans(),
)
def test_drop_and_grow_counts_over_a_whole_schedule(
    shapes, sparsity, drop, criterion, interval, total_steps, seed, ties
):
    total = sum(math.prod(s) for s in shapes)
    k = round((1 - sparsity) * total)
    mask = DynamicMask(sparsity, interval=interval, total_steps=total_steps, drop=drop, criterion=criterion, seed=seed)
    before = None
    for step in range(0, total_steps + 3, interval):
        params = parameters(shapes, torch.float32, 100 + step, ties=ties)
        after = chosen(mask, params, step, before)
        if before is not None:
            decay = drop / 2 * (1 + math.cos(math.pi * step / total_steps)) if step < total_steps else 0.0
            number = min(round(decay * (1 - sparsity) * total), total - k, k)
            old, new = flatten(before), flatten(after)
            assert int((old & ~new).sum()) == int((~old & new).sum()) == number
            g = flatten(p.grad for p in params).abs()
            dropped, kept = g[old & ~new], g[old & new]
            if len(dropped) and len(kept) and criterion != "random":
                assert dropped.max() <= kept.min() if criterion == "flattest" else dropped.min() >= kept.max()
        before = after


def test_growth_is_uniform_over_what_was_not_perturbed():
    """Each of 60 idle weights grows in 10 of 60 updates on average; dropped ones never come back at once."""
    p = nn.Parameter(torch.zeros(100))
    p.grad = torch.arange(100.0)
    before = [torch.arange(100) < 40]
    grown = torch.zeros(100)
    draws = 3000
    for seed in range(draws):
        mask = DynamicMask(0.6, interval=1, total_steps=10, drop=0.25, seed=seed)
        after = chosen(mask, [p], 0, before)[0]
        assert not after[:10].any()  # the ten flattest of the perturbed
        assert after[10:40].all()
        grown += after
    share = grown[40:] / draws
    assert share.mean().item() == pytest.approx(10 / 60)
    assert (share - 10 / 60).abs().max() < 5 * math.sqrt(1 / 6 * 5 / 6 / draws)


def test_random_mask_is_uniform():
    p = nn.Parameter(torch.zeros(50))
    share = sum(chosen(RandomMask(0.8, seed=seed), [p])[0].float() for seed in range(3000)) / 3000
    assert (share - 0.2).abs().max() < 5 * math.sqrt(0.2 * 0.8 / 3000)


def test_a_gradient_that_is_not_finite_leaves_the_dynamic_mask_alone():
    params = parameters([(5,), (4, 4)], torch.float32, 0)
    mask = DynamicMask(0.5, interval=1, total_steps=9)
    before = chosen(mask, params)
    for bad in (math.nan, math.inf):
        params[0].grad[2] = bad
        after = chosen(mask, params, 3, before)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_missing_gradient_counts_as_flat():
    params = parameters([(10,), (10,)], torch.float32, 0)
    params[0].grad = None
    everything_but_one = [torch.ones(10, dtype=torch.bool), torch.arange(10) < 9]
    mask = DynamicMask(0.05, interval=1, total_steps=9, drop=1.0)
    after = chosen(mask, params, 0, everything_but_one)
    assert after[0].tolist() == [False] + [True] * 9  # the first of ten equals goes
    assert after[1].all()


def test_masks_update_only_when_due():
    t = task()
    opt = SAM(t.model.parameters(), torch.optim.SGD, mask=RandomMask(0.5, interval=3), lr=0.1)
    seen = []
    for _ in range(7):
        opt.step(t.closure(opt))
        seen.append(flatten(opt.masks()).tolist())
    assert seen[0] == seen[1] == seen[2] != seen[3] == seen[4] == seen[5] != seen[6]


def test_score_functions_with_defaults_are_called_without_arguments():
    params = parameters([(4,)], torch.float32, 0)
    mask = TopKMask(0.5, lambda scale=2.0: {p: p.abs() * scale for p in params})
    assert int(chosen(mask, params)[0].sum()) == 2


def test_topk_takes_lists_mappings_and_functions_without_arguments():
    params = parameters([(4,), (2, 3)], torch.float32, 0)
    by_list = chosen(TopKMask(0.5, lambda ps: [p.abs() for p in ps]), params)
    by_mapping = chosen(TopKMask(0.5, lambda: {p: p.abs() for p in reversed(params)}), params)
    without = chosen(TopKMask(0.5, lambda: [p.abs() for p in params]), params)
    for one, other, third in zip(by_list, by_mapping, without, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


def test_topk_scores_may_have_ties_infinities_and_other_dtypes():
    p = nn.Parameter(torch.zeros(6))
    assert chosen(TopKMask(0.5, lambda: [torch.tensor([1, 7, 7, 7, 7, 0])]), [p])[0].nonzero().flatten().tolist() == [
        1,
        2,
        3,
    ]
    scores = torch.tensor([math.inf, 1, 2, -math.inf, 0, 3])
    assert chosen(TopKMask(0.5, lambda: [scores]), [p])[0].nonzero().flatten().tolist() == [0, 2, 5]


class LlamaStyleRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def test_norm_mask_takes_normalisation_layers_of_any_origin():
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(3, 3),
            "batch": nn.BatchNorm1d(3),
            "layer": nn.LayerNorm(3),
            "group": nn.GroupNorm(1, 3),
            "instance": nn.InstanceNorm1d(3, affine=True),
            "rms": LlamaStyleRMSNorm(),
            "attention": nn.MultiheadAttention(2, 1),
        }
    )
    selected = dict(
        zip(
            [n for n, _ in model.named_parameters()],
            NormMask(model).select(list(model.parameters()), 0, None),
            strict=True,
        )
    )
    assert {name.split(".")[0] for name, s in selected.items() if s} == {"batch", "layer", "group", "instance", "rms"}
    assert not any(s for name, s in selected.items() if name.startswith(("linear", "attention")))


def test_nm_mask_on_a_network():
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Conv2d(8, 4, 3), nn.Linear(6, 5))
    params = list(model.parameters())
    masks = chosen(NMMask(2, 4, lambda ps: [p.abs() for p in ps]), params)
    assert masks[0].all()  # 3 inputs: left over
    assert masks[1].all()  # a bias
    assert (masks[2].view(4, 2, 4, 3, 3).sum(2) == 2).all()
    assert (masks[4][:, :4].sum(1) == 2).all()
    assert masks[4][:, 4:].all()


def test_fisher_mask_draws_new_samples_at_each_update_from_its_own_generator():
    t = task()
    drawn = []

    class Spy(TensorDataset):
        def __getitem__(self, i):
            drawn.append(i)
            return super().__getitem__(i)

    mask = FisherMask(0.5, t.model, F.cross_entropy, Spy(t.x, t.y), samples=10, interval=1, seed=4)
    params = list(t.model.parameters())
    state = torch.get_rng_state()
    mask.select(params, 0, None)
    mask.select(params, 1, None)
    first, second = drawn[:10], drawn[10:]
    assert len(set(first)) == len(set(second)) == 10
    assert first != second
    drawn.clear()
    mask.select(params, 1, None)
    assert drawn == second
    assert torch.equal(torch.get_rng_state(), state)


def test_fisher_mask_on_data_that_draws_augmentations():
    """Same seed and step, same mask, and the run's own random numbers are left alone."""
    t = task(dropout=0.5)

    class Noisy(TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + torch.randn_like(x), y

    mask = FisherMask(0.5, t.model, F.cross_entropy, Noisy(t.x, t.y), samples=10, interval=1)
    params = list(t.model.parameters())
    one, other, later = (flatten(chosen(mask, params, step)) for step in (0, 0, 1))
    assert torch.equal(one, other)
    assert not torch.equal(one, later)
    opt = SAM(t.model.parameters(), torch.optim.SGD, mask=mask, lr=0.1)
    losses = []
    opt.param_groups[0]["rho"] = 0.0
    opt.step(lambda: losses.append(t.closure(opt)().item()))  # warns if random numbers were disturbed
    assert losses[0] == losses[1]


class TakesADict(nn.Module):
    """A model whose one argument is a dict."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, batch):
        return self.linear(batch["a"])


@pytest.mark.parametrize("method", ["signs", "exact"])
def test_fisher_mask_of_a_model_that_takes_a_dict_itself(method):
    model = TakesADict()

    def mask(inputs):
        return FisherMask(0.5, model, F.cross_entropy, [(inputs, i % 2) for i in range(6)], samples=4, method=method)

    assert flatten(chosen(mask(({"a": torch.randn(3)},)), list(model.parameters()))).sum() == 4
    with pytest.raises(
        ValueError,
        match=r"^inputs \(of FisherMask: those in dataset\) must be .* raised TypeError: .*; a model that takes the dict "
        r"itself gets it in a tuple: \(dict,\) as inputs, \(\(dict,\), y\) as a batch or item$",
    ):
        chosen(mask({"a": torch.randn(3)}), list(model.parameters()))


def test_repr_says_what_matters():
    assert repr(RandomMask(0.5, interval=3)) == "RandomMask(interval=3, sparsity=0.5)"


def test_normalisation_layers_of_a_suffix():
    t = task()
    opt = SAM(t.model.parameters(), mask=SuffixMask(t.model, "3", inner=NormMask(t.model)), lr=0.1)
    opt.step(t.closure(opt))
    names = [name for name, _ in t.model.named_parameters()]
    assert [name for name, m in zip(names, opt.masks(), strict=True) if m.any()] == ["4.weight", "4.bias"]
    opt = SAM(t.model.parameters(), mask=SuffixMask(t.model, "8", inner=NormMask(t.model)), lr=0.1)
    with pytest.raises(ValueError, match=r"or none in the suffix of the mask around it$"):
        opt.step(t.closure(opt))


def test_the_contract_of_a_mask_is_small():
    class Everything(Mask):
        def select(self, params, step, previous):
            return [True] * len(params)

    public = {name for name in dir(Everything(interval=3)) if not name.startswith("_")}
    assert public == {"select", "settings", "interval", "seed", "scope", "same_on_all_ranks"}
