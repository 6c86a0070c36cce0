"""Saved states: hooks are called, and what is not a state of this optimizer changes nothing."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from cases import optimizer, same, task
from sparsam import SAM, EveryNth, SuffixMask


def trained(steps: int = 2, **policy) -> SAM:
    t = task()
    opt = optimizer(t, **policy)
    for _ in range(steps):
        opt.step(t.closure(opt))
    return opt


def changed(state, *path, value):
    """Return a state with one entry changed."""
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return state


def without(state, key):
    state = copy.deepcopy(state)
    del state["sparsam"][key]
    return state


WRONG = {
    "negative steps": (
        lambda s: changed(s, "sparsam", "steps", value=-1),
        "steps in state_dict must be a whole number >= 0, but is -1",
    ),
    "steps that are text": (
        lambda s: changed(s, "sparsam", "steps", value="2"),
        "steps in state_dict must be a whole number >= 0, but is '2'",
    ),
    "rho is NaN": (
        lambda s: changed(s, "param_groups", 0, "rho", value=float("nan")),
        "rho of parameter group 0 in state_dict must be a finite number >= 0, but is nan",
    ),
    "a foreign entry": (
        lambda s: changed(s, "sparsam", "colour", value=1),
        "state_dict['sparsam'] must have the entries settings, shapes, steps, mask, passes, moved, memories, but has "
        "'colour', which is not known",
    ),
    "a missing entry": (lambda s: without(s, "mask"), "but has no 'mask'"),
    "a mask of another shape": (
        lambda s: changed(s, "sparsam", "mask", "made", "selection", 0, value=torch.ones(2, dtype=torch.bool)),
        "mask in state_dict must have a bool or a bool tensor for each parameter, but has not",
    ),
    "too few masks": (
        lambda s: changed(s, "sparsam", "moved", value=[True]),
        "moved in state_dict must have a bool or a bool tensor for each parameter, but has not",
    ),
    "memories of other ascents": (
        lambda s: changed(s, "sparsam", "memories", value=[]),
        "memories in state_dict must have an entry for each ascent and parameter, but have not",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_state_that_is_none_changes_nothing(name):
    make, message = WRONG[name]
    opt = trained(mask="random", ascent="friendly")
    wrong = make(trained(steps=3, mask="random", ascent="friendly").state_dict())
    before = repr(opt.state_dict())
    with pytest.raises(ValueError, match=re.escape(message)):
        opt.load_state_dict(wrong)
    assert repr(opt.state_dict()) == before


def test_hooks_of_states_are_called():
    opt, seen = trained(), []
    opt.register_state_dict_pre_hook(lambda o: seen.append("before saving"))
    opt.register_state_dict_post_hook(lambda o, state: {**state, "mine": 1})
    opt.register_load_state_dict_pre_hook(lambda o, state: {k: v for k, v in state.items() if k != "mine"})
    opt.register_load_state_dict_post_hook(lambda o: seen.append("after loading"))
    state = opt.state_dict()
    assert state["mine"] == 1
    opt.load_state_dict(state)
    assert seen == ["before saving", "after loading"]


def test_weights_that_share_memory_need_one_rho():
    both = torch.zeros(6)
    a, b = nn.Parameter(both[:4]), nn.Parameter(both[2:])
    groups = [{"params": [a], "rho": 0.1}, {"params": [b], "rho": 0.2}]
    message = (
        r"^weights that share memory must have the same rho, but parameter groups 0 and 1 share some and have 0.1 and"
    )
    with pytest.raises(ValueError, match=message):
        SAM(groups, torch.optim.SGD, lr=0.1)
    SAM([{**group, "rho": 0.1} for group in groups], torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("rho", [float("nan"), -1.0, float("inf")])
def test_a_rho_in_a_tensor_is_looked_into_once(rho):
    with pytest.raises(ValueError, match=r"^rho of parameter group 0 must be a finite number >= 0, but is "):
        SAM([nn.Parameter(torch.ones(2))], torch.optim.SGD, rho=torch.tensor(rho), lr=0.1)


def test_wrap_takes_no_class():
    message = r"^base_optimizer must be an optimizer, but is the class SGD; SAM\(params, SGD\) takes a class$"
    with pytest.raises(TypeError, match=message):
        SAM.wrap(torch.optim.SGD)


def test_a_model_that_is_none():
    with pytest.raises(TypeError, match=r"^model must be a module, but is a str; pass the model, not its parameters$"):
        SAM([nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=0.1, model="resnet")


def test_memory_that_is_shared_by_groups_of_equal_rho_comes_back():
    """Equal numbers in different objects make two buckets: the second is saved after the first was perturbed."""
    w = torch.randn(4, dtype=torch.float64)
    a, b = nn.Parameter(w), nn.Parameter(w)
    before = w.clone()
    opt = SAM([{"params": [a], "rho": 0.5}, {"params": [b], "rho": float("0.5")}], torch.optim.SGD, lr=0.0)
    (a.square().sum() + b.sum()).backward()
    with opt.perturbed():
        pass
    assert torch.equal(w, before)


def test_views_that_do_not_overlap_may_differ_in_rho():
    flat = torch.randn(8)
    halves = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    SAM([{"params": [halves[0]], "rho": 0.1}, {"params": [halves[1]], "rho": 0.0}], torch.optim.SGD, lr=0.1)


def test_a_state_from_between_a_new_group_and_its_first_sharpness_aware_step():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    extra, x = nn.Parameter(torch.ones(4)), torch.linspace(-1, 1, 18).view(6, 3)
    opt = SAM(model.parameters(), rho=0.1, mask=SuffixMask(model, "2"), schedule=EveryNth(2), lr=0.1)

    def closure():
        opt.zero_grad()
        loss = (model(x) * extra).square().sum()
        loss.backward()
        return loss

    opt.step(closure)
    opt.add_param_group({"params": [extra]})
    opt.step(closure)
    state = copy.deepcopy(opt.state_dict())
    weights = [p.detach().clone() for p in (*model.parameters(), extra)]
    opt.step(closure)
    expected = [p.detach().clone() for p in (*model.parameters(), extra)]
    with torch.no_grad():
        for p, w in zip((*model.parameters(), extra), weights, strict=True):
            p.copy_(w)
    opt.load_state_dict(state)
    opt.step(closure)
    assert same(expected, [p.detach() for p in (*model.parameters(), extra)])
