"""SSAM-F: the weights that carry the most Fisher information."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, default_collate

from sparsam.checks import check_choice, check_module, check_whole
from sparsam.distributed.groups import average_scores
from sparsam.errors import UserTypeError, UserValueError
from sparsam.fisher import METHODS, check_loss, diagonal_fisher
from sparsam.masks.base import Scope
from sparsam.masks.scores import match
from sparsam.masks.sparsity import SparseMask
from sparsam.randomness import fork_rng, random_generator
from sparsam.selection import flatten
from sparsam.settings import Setting


class FisherMask(SparseMask):
    r"""SSAM-F: perturbs the :math:`k` weights with the largest empirical Fisher information.

    .. math::  \hat F = \frac{1}{N_F} \sum_{i=1}^{N_F} \big(\nabla_w \log p_w(y_i \mid x_i)\big)^2,
               \qquad k = \mathrm{round}((1-s)\,|w|)

    Ranks that train one model together average their :math:`\hat F`. All draw the same indices. So ranks that hold the
    same data set get what one process gets. Ranks that hold parts of it get the Fisher information of all samples
    drawn: :math:`N_F` on each rank. Where parameters are sharded, all ranks must hold the same data set.

    Args:
        sparsity: The share s of the weights that is not perturbed, in [0, 1].
        model: The network that is trained; `model(inputs)` is called (`model(*inputs)` for a tuple or a list,
            `model(**inputs)` for a dict).
        loss_fn: `loss_fn(outputs, targets)`, a negative log-likelihood, mean-reduced or not.
        dataset: A map-style data set of (input, target) pairs. A model that takes a dict, a tuple or a list as its one
            argument gets it in a tuple: pairs `((dict,), target)`.
        samples: :math:`N_F`, drawn without replacement at each update.
        interval: Make the mask anew every `interval` steps; None: once.
        seed: Where the mask's own random numbers (samples, signs) start.
        method: "signs" (one backward pass for each 32 samples, unbiased) or "exact" (one for each sample):
            see :func:`sparsam.diagonal_fisher`.
    """

    def __init__(
        self,
        sparsity: float,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        dataset: Dataset[Any],
        *,
        samples: int = 128,
        interval: int | None = None,
        seed: int = 0,
        method: str = "signs",
    ) -> None:
        check_module("model", model, optional=False)
        super().__init__(sparsity, interval, seed)
        check_loss(loss_fn)
        check_whole("samples", samples)
        check_choice("method", method, METHODS)
        for name in ("__getitem__", "__len__"):
            if not hasattr(dataset, name):
                raise UserTypeError(
                    f"dataset must be map-style, with __len__ and __getitem__, but {type(dataset).__name__} "
                    f"has no {name} (of a DataLoader, take its .dataset)"
                )
        if samples > len(dataset):  # type: ignore[arg-type]
            raise UserValueError(
                f"samples must be at most the size of the dataset, {len(dataset)}, but is {samples} (default 128)"  # type: ignore[arg-type]
            )
        self.scope, self._network = Scope(model), model
        self.loss_fn, self.dataset = loss_fn, dataset
        self.samples, self.method = int(samples), method

    def settings(self) -> dict[str, Setting]:
        """Return what a resumed run must have in common with the saved one."""
        return {**super().settings(), "samples": self.samples, "method": self.method}

    def flat_scores(self, params: Sequence[Tensor], step: int, previous: Tensor | None) -> Tensor:
        """Return the diagonal of the empirical Fisher information over newly drawn samples."""
        generator = random_generator(self.seed, step)
        chosen = torch.randperm(len(self.dataset), generator=generator)[: self.samples].tolist()  # type: ignore[arg-type]
        with fork_rng([], seed=generator.initial_seed()):  # a data set may draw augmentations
            items = [self.dataset[i] for i in chosen]
        batch = _collated(items)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise UserValueError(f"dataset must hold (input, target) pairs, but dataset[{chosen[0]}] is not one")
        inputs, targets = batch
        trainable = [p for p in self._network.parameters() if p.requires_grad]
        device = trainable[0].device if trainable else None
        inputs, targets = tree_map_only(Tensor, lambda t: t.to(device), (inputs, targets))
        fisher = diagonal_fisher(self._network, self.loss_fn, inputs, targets, method=self.method, generator=generator)
        average_scores(fisher)
        by_parameter = dict(zip(trainable, fisher, strict=True))
        return flatten(match(by_parameter, params))


def _collated(items: list[Any]) -> Any:
    try:
        return default_collate(items)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        remedy = "; pad tensors to one shape" if isinstance(error, RuntimeError) else ""
        raise UserValueError(
            f"dataset must hold tensors or numbers that are alike in every item, so that they can be stacked, but "
            f"default_collate of {len(items)} items raised {type(error).__name__}: {reason}{remedy}"
        ) from error
