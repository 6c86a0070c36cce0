r"""BatchNorm's running statistics, taken again.

During training the statistics are an exponential mean over past batches, so they belong to weights of several steps
ago. After the last step they can be taken again at the present weights, as a plain mean over N batches:

.. math::  \mu = \frac1N \sum_{i=1}^{N} \mu_i, \qquad \sigma^2 = \frac1N \sum_{i=1}^{N} \sigma_i^2

with each batch's mean and unbiased variance at that layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, IterableDataset

from sparsam.checks import check_module
from sparsam.errors import UserValueError
from sparsam.passes import STATISTICS, model_arguments, naming_inputs, preserve_state
from sparsam.replay.modules import unwrap


@torch.no_grad()
def refresh_batchnorm(model: nn.Module, loader: Iterable[Any]) -> int:
    """Take BatchNorm's running statistics again, at the present weights; return over how many batches.

    The model runs in train mode, without gradients. Afterwards `running_mean`, `running_var` and `num_batches_tracked`
    are those of the batches. Nothing else moves: modes, momenta, other buffers, torch's random numbers. If the model is
    in train mode, layers in eval mode are taken for frozen and keep their statistics. In distributed training each rank
    takes the statistics of its own batches.

    Args:
        model: The network. Without BatchNorm there is nothing to do, and no batch is read.
        loader: Batches as in training, augmented alike: tensors, tuples or lists whose first entry is the model's
            input (`x, y`), or dicts of its arguments. An input that is a tuple or a list holds several arguments:
            `(a, b), y`. A model that takes a dict, a tuple or a list as its one argument gets it in a tuple:
            `(dict,), y`. Tensors are moved to the model's device.

    >>> layer = nn.BatchNorm1d(1)
    >>> refresh_batchnorm(layer, [torch.tensor([[0.0], [2.0]]), torch.tensor([[3.0], [7.0]])])
    2
    >>> layer.running_mean, layer.running_var  # the means of 1 and 5, and of 2 and 8
    (tensor([3.]), tensor([5.]))
    """
    check_module("model", model, optional=False)
    if isinstance(loader, Tensor):
        raise UserValueError(f"loader must give batches, but is a tensor of shape {tuple(loader.shape)}; pass [tensor]")
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise UserValueError(
            f"loader must give batches, but is a {type(loader).__name__}, which gives samples; pass a DataLoader of it "
            f"(with batch_size=None if each of its items is a batch)"
        )
    network = unwrap(model)
    modules = list(network.modules())
    modes = [module.training for module in modules]
    layers = [m for m in modules if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if network.training:
        layers = [layer for layer in layers if layer.training]
    if not layers:
        return 0
    momenta = [layer.momentum for layer in layers]
    batches = 0
    # Statistics are copies inside: after an error, the old ones are there. Compiled code would be compiled anew.
    with preserve_state(network), torch.compiler.set_stance("force_eager"):
        try:
            if not network.training:
                network.train()
            for layer in layers:
                layer.momentum = None  # the plain mean
                layer.reset_running_stats()
            for batch in loader:
                _forward(network, batch)
                batches += 1
            taken = [dict(layer._buffers) for layer in layers]
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
            for module, training in zip(modules, modes, strict=True):
                module.training = training
    if not batches:
        raise UserValueError("loader must have at least one batch, but is empty (a generator can be read only once)")
    for layer, statistics in zip(layers, taken, strict=True):
        if int(statistics["num_batches_tracked"]):  # type: ignore[arg-type]  # not if the model did not run it
            for name in STATISTICS:
                layer.get_buffer(name).copy_(statistics[name])  # type: ignore[arg-type]
    return batches


def _forward(model: nn.Module, batch: Any) -> None:
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    device = next(t.device for t in model.buffers())
    args, kwargs = tree_map_only(Tensor, lambda t: t.to(device), model_arguments(inputs))
    with naming_inputs("loader must give batches whose first entry is what the model is called with", inputs):
        model(*args, **kwargs)
