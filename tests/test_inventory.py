"""The inventory of a model, against torch's own walk."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparsam.inventory import Inventory, modules_of


def network() -> nn.Sequential:
    shared = nn.Linear(3, 3)
    return nn.Sequential(
        shared, nn.BatchNorm1d(3), nn.Sequential(nn.ReLU(), shared), nn.Dropout(), nn.Linear(3, 2, False)
    )


def assert_true(inventory: Inventory, model: nn.Module) -> None:
    """Compare an inventory with what torch says of the model."""
    assert inventory.modules == modules_of(model) == list(model.modules())
    assert set(inventory.parameters) == set(model.parameters())
    buffers = [b for module in inventory.with_buffers for b in module.buffers(recurse=False)]
    assert list(map(id, buffers)) == list(map(id, model.buffers()))


def test_a_second_look_finds_nothing_new():
    model = network()
    inventory = Inventory(model)
    for _ in range(2):
        inventory.look()
        assert_true(inventory, model)
    assert inventory.changes == 1


def test_every_change_of_a_model_is_found():
    model = network()
    inventory = Inventory(model)
    inventory.look()

    def attach() -> None:
        model[3].extra = nn.Linear(2, 2)

    def replace() -> None:
        model[4] = nn.BatchNorm1d(3)

    def remove() -> None:
        del model[3]

    def swap() -> None:
        model[0], model[1] = model[1], model[0]

    def empty() -> None:
        model[2]._modules.clear()

    for changes, change in enumerate((attach, replace, remove, swap, empty), start=2):
        change()
        inventory.look()
        assert_true(inventory, model)
        assert inventory.changes == changes, change.__name__


def test_parameters_and_buffers_are_those_of_the_latest_look():
    model = network()
    inventory = Inventory(model)
    inventory.look()
    model[4].weight = nn.Parameter(torch.ones(2, 3))
    model[3].register_buffer("count", torch.zeros(()))
    model[4].register_parameter("bias", None)
    inventory.look()
    assert_true(inventory, model)
    assert any(p is model[4].weight for p in inventory.parameters)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own imports
def test_a_compiled_module_is_listed():
    model = network()
    inventory = Inventory(model)
    inventory.look()
    assert inventory.compiled == []
    model[2].compile()
    inventory.look()
    assert inventory.compiled == [model[2]]


def test_a_copy_is_of_the_copied_model():
    model = network()
    inventory = Inventory(model)
    inventory.look()
    twin, copied = copy.deepcopy((inventory, model))
    assert_true(twin, copied)
    twin.look()
    assert twin.changes == 1


def test_there_may_be_no_model():
    inventory = Inventory(None)
    inventory.look()
    assert inventory.modules == inventory.parameters == inventory.with_buffers == []
