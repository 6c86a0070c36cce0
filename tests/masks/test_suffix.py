"""What a SuffixMask takes and refuses. What it computes is in tests/replay."""

from __future__ import annotations

import pytest
from replay_models import Chain
from torch import nn

from sparsam import RandomMask, SuffixMask

REFUSED = {
    "a misspelt cut": (
        {"cut": "block.1"},
        "cut must be the name of a module, such as .*'blocks.1'.*, but is 'block.1'; find_cuts",
    ),
    "another cut": ({"cut": "conv"}, "cut must be the name of a module, such as 'stem', .*, but is 'conv'; find_cuts"),
    "a cut by its number": ({"cut": 1}, "cut must be the name of a module, such as .*, but is 1; find_cuts"),
    "no cut": ({"cut": None}, "cut must be the name of a module, such as .*, but is a NoneType; find_cuts"),
    "an inner mask by name": (
        {"cut": "blocks.1", "inner": "fisher"},
        "inner must be a mask without a cut of its own, but is 'fisher'$",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_by_name(name):
    options, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        SuffixMask(Chain(), **options)


def test_a_suffix_in_a_suffix_is_refused():
    model = Chain()
    with pytest.raises(TypeError, match=r"^inner must be a mask without a cut of its own, but is SuffixMask\("):
        SuffixMask(model, "blocks.1", inner=SuffixMask(model, "head"))


@pytest.mark.parametrize("model", [None, [nn.Linear(2, 2)], nn.Linear])
def test_a_model_that_is_none_is_refused(model):
    with pytest.raises(TypeError, match=r"^model must be a module, but is "):
        SuffixMask(model, "0")


def test_a_data_parallel_model_is_refused():
    with pytest.raises(TypeError, match=r"^model must not be a DataParallel, .*; use DistributedDataParallel$"):
        SuffixMask(nn.DataParallel(Chain()), "head")


def test_interval_and_seed_are_those_of_the_inner_mask():
    inner = RandomMask(0.5, interval=3, seed=7)
    mask = SuffixMask(Chain(), "blocks.1", inner=inner)
    assert (mask.interval, mask.seed) == (3, 7)
    mask.seed = 9
    assert inner.seed == 9
    assert repr(mask) == ("SuffixMask(interval=3, cut='blocks.1', inner=RandomMask(interval=3, sparsity=0.5))")
