"""BatchNorm's statistics, taken again: against the mean over batches in float64; and that nothing else moves."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from replay_models import differences, snapshot
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sparsam import refresh_batchnorm
from sparsam.errors import UserValueError


class Network(nn.Module):
    """Two BatchNorms, dropout, a buffer that moves whenever the model runs, and a BatchNorm that it does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(2, 3, 3, padding=1))
        self.norm = nn.BatchNorm2d(3, momentum=0.3)
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(3 * 16, 5)
        self.last = nn.BatchNorm1d(5, momentum=None)
        self.unused = nn.BatchNorm1d(7)
        self.untracked = nn.BatchNorm1d(5, track_running_stats=False)

    def forward(self, x):
        h = self.dropout(self.norm(self.conv(x)).relu())
        return self.untracked(self.last(self.linear(h.flatten(1))))


def images(batches=5, size=6):
    return [(torch.randn(size, 2, 4, 4, dtype=torch.float64) * (i + 1) + i, torch.zeros(size)) for i in range(batches)]


def network():
    model = Network().double()
    with torch.no_grad():
        for layer in (model.norm, model.last, model.unused):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
            layer.num_batches_tracked.fill_(7)
    return model


def expected(model, loader):
    """The means over the batches of each layer's batch mean and unbiased variance, computed from its inputs."""
    model, inputs = copy.deepcopy(model).train(), {"norm": [], "last": []}
    for name, seen in inputs.items():
        model.get_submodule(name).register_forward_pre_hook(lambda layer, args, seen=seen: seen.append(args[0]))
    with torch.no_grad():
        for x, _ in loader:
            model(x)
    result = {}
    for name, seen in inputs.items():
        columns = [h.transpose(0, 1).flatten(1) for h in seen]
        result[name] = (
            torch.stack([c.mean(1) for c in columns]).mean(0),
            torch.stack([c.var(1) for c in columns]).mean(0),
        )
    return result


@pytest.mark.parametrize("training", [True, False])
def test_statistics_are_the_means_over_the_batches(training):
    model, loader = network().train(training), images()
    torch.manual_seed(3)
    means = expected(model, loader)
    torch.manual_seed(3)  # dropout draws the same
    assert refresh_batchnorm(model, loader) == 5
    for name, (mean, var) in means.items():
        layer = model.get_submodule(name)
        torch.testing.assert_close(layer.running_mean, mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(layer.running_var, var, rtol=1e-12, atol=1e-12)
        assert layer.num_batches_tracked.item() == 5


def test_nothing_else_moves():
    model = network()
    model.dropout.eval()
    model.conv.weight.sum().backward()  # there is a gradient
    modes = {name: m.training for name, m in model.named_modules()}
    buffers = [(name, buffer) for name, buffer in model.named_buffers()]
    loader = DataLoader(TensorDataset(torch.randn(12, 2, 4, 4).double()), 4, shuffle=True)
    before = snapshot(model)
    refresh_batchnorm(model, loader)
    moved = {key for key in differences(before, snapshot(model)) if "running" not in key and "tracked" not in key}
    assert moved == set()
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert [name for name, buffer in model.named_buffers() if buffer is not dict(buffers)[name]] == []
    assert (model.norm.momentum, model.last.momentum) == (0.3, None)
    assert model.unused.num_batches_tracked.item() == 7


def test_a_frozen_layer_keeps_its_statistics():
    model, loader = network(), images()
    model.norm.eval()
    before = model.norm.running_mean.clone()
    refresh_batchnorm(model, loader)
    assert torch.equal(model.norm.running_mean, before)
    assert model.last.num_batches_tracked.item() == 5
    assert not model.norm.training


def test_a_model_without_batchnorm_reads_no_batch():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.InstanceNorm1d(2, track_running_stats=True))
    assert refresh_batchnorm(model, iter(lambda: pytest.fail("a batch was read"), None)) == 0


def test_an_error_changes_nothing():
    model, batch = network().eval(), images()[0]
    before = snapshot(model)
    with pytest.raises(ValueError, match="loader must have at least one batch, but is empty"):
        refresh_batchnorm(model, [])
    with pytest.raises(
        ValueError, match=r"of shape \(3, 2, 5, 5\) raised RuntimeError: .* shapes cannot be multiplied"
    ):
        refresh_batchnorm(model, [batch, torch.ones(3, 2, 5, 5, dtype=torch.float64)])
    assert differences(before, snapshot(model)) == []
    assert (model.norm.momentum, model.training, model.norm.training) == (0.3, False, False)
    with pytest.raises(TypeError, match="model must be a module, but is a list"):
        refresh_batchnorm([], [])
    with pytest.raises(
        ValueError, match=re.escape("loader must give batches, but is a tensor of shape (2, 3); pass [")
    ):
        refresh_batchnorm(model, torch.ones(2, 3))


def test_tensors_tuples_and_dicts():
    def taken(loader):
        model = nn.Sequential(nn.BatchNorm2d(2)).double()
        if isinstance(loader[0], dict):
            model.forward = lambda image: model[0](image)
        refresh_batchnorm(model, loader)
        return model[0].running_var

    loader = images()
    forms = [loader, [x for x, _ in loader], [[x] for x, _ in loader], [{"image": x} for x, _ in loader]]
    assert len({tuple(taken(form).tolist()) for form in forms}) == 1


class TakesADict(nn.Module):
    """A model whose one argument is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2).double()

    def forward(self, batch):
        return self.norm(batch["image"])


class TakesTwo(TakesADict):
    def forward(self, a, b):
        return self.norm(a + b)


X = torch.ones(6, 2, 4, 4, dtype=torch.float64)
RULE = "loader must give batches whose first entry is what the model is called with, but "
WRONG_BATCHES = [
    (
        TakesADict(),
        ({"image": X}, 0),
        "model(**inputs) with the keys 'image' raised TypeError: TakesADict.forward() got an unexpected keyword "
        "argument 'image'; a model that takes the dict itself gets it in a tuple: (dict,) as inputs, ((dict,), y) as "
        "a batch or item",
    ),
    (
        TakesTwo(),
        (X, X, 0),
        "model(inputs) with inputs of shape (6, 2, 4, 4) raised TypeError: TakesTwo.forward() missing 1 required "
        "positional argument: 'b'; several inputs are a tuple: (a, b) as inputs, ((a, b), y) as a batch or item",
    ),
    (
        nn.BatchNorm2d(2).double(),
        (X[0], 0),
        "model(inputs) with inputs of shape (2, 4, 4) raised ValueError: expected 4D input (got 3D input)",
    ),
    (nn.BatchNorm2d(2), 1, "model(inputs) with inputs of type int raised AttributeError: 'int' object has no"),
]


@pytest.mark.parametrize(("model", "batch", "message"), WRONG_BATCHES, ids=["dict", "two", "sample", "number"])
def test_batches_that_the_model_does_not_take(model, batch, message):
    with pytest.raises(UserValueError, match=re.escape(RULE + message)):
        refresh_batchnorm(model, [batch])


@pytest.mark.parametrize(("model", "inputs"), [(TakesADict(), ({"image": X},)), (TakesTwo(), (X, X))])
def test_a_dict_that_the_model_takes_itself_and_several_inputs_are_tuples(model, inputs):
    assert refresh_batchnorm(model, [(inputs, 0)]) == 1


def test_a_data_set_in_place_of_a_loader():
    """One whose samples look like batches would be taken without an error, here 4 × 4 numbers as 4 vectors."""
    model, dataset = nn.BatchNorm1d(4).double(), TensorDataset(X[0])
    message = (
        "loader must give batches, but is a TensorDataset, which gives samples; pass a DataLoader of it (with "
        "batch_size=None if each of its items is a batch)"
    )
    with pytest.raises(UserValueError, match=re.escape(message)):
        refresh_batchnorm(model, dataset)
    assert refresh_batchnorm(model, DataLoader(dataset, batch_size=None)) == 2


def test_an_error_with_a_name_of_its_own_is_not_blamed_on_the_batches():
    class Full(TakesADict):
        def forward(self, x):
            raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError, match=r"^full$"):
        refresh_batchnorm(Full(), [X])


def test_compiled_blocks_are_not_compiled_anew():
    def refuse(graph, inputs):
        raise AssertionError("nothing must be compiled")

    model = nn.Sequential(nn.BatchNorm2d(2)).double()
    model[0].compile(backend=refuse)
    assert refresh_batchnorm(model, images()) == 5
    assert model[0].num_batches_tracked.item() == 5
