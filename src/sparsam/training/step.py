"""One training step: with a closure, from a CUDA graph, or through a gradient scaler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsam.cuda_graph import CapturedStep
from sparsam.distributed.groups import group_size
from sparsam.runs.build import build_loss
from sparsam.runs.recipe import Recipe
from sparsam.sam import SAM
from sparsam.sam.without_closure import current_scale, run_passes
from sparsam.share import WHOLE, Rows

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def is_captured(recipe: Recipe, device: torch.device) -> bool:
    """Return whether steps are captured in a CUDA graph.

    A gradient scaler looks at the host, so fp16 steps are not, nor are steps of several processes.
    """
    alone = group_size(None) == 1
    return recipe.train.cuda_graph and device.type == "cuda" and recipe.train.precision != "fp16" and alone


def autocast(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context that forward passes run in."""
    dtype = AUTOCAST.get(recipe.train.precision)
    return torch.autocast(device.type, dtype) if dtype else nullcontext()


class TrainingStep:
    """Takes steps as a recipe says, a batch each.

    Args:
        recipe: How to take them.
        model: The network.
        opt: The optimizer.
        device: Where the network is.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, opt: torch.optim.Optimizer, device: torch.device) -> None:
        self.recipe, self.model, self.opt, self.device = recipe, model, opt, device
        self.scaler = torch.amp.GradScaler(device.type) if recipe.train.precision == "fp16" else None
        self._loss_fn = build_loss(recipe)
        self._layout = torch.channels_last if recipe.train.channels_last else torch.contiguous_format
        self._captured = CapturedStep(opt, self._closure) if is_captured(recipe, device) else None
        self._batch: tuple[Tensor, Tensor] | None = None

    @property
    def eager_because(self) -> str | None:
        """Why the steps are not captured, if they should be."""
        return self._captured.eager_because if self._captured else None

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Take a step on a batch; return the loss, which the next step may overwrite."""
        x = self.laid_out(x)
        if self._captured is None or self._batch is None:
            self._batch = x, y
        else:  # a captured step reads where the first batch was
            self._batch[0].copy_(x)
            self._batch[1].copy_(y)
        if self.scaler is not None:
            return self._scaled_step(self.scaler)
        step: Callable[[], Any] = self._captured or (lambda: self.opt.step(self._closure))  # type: ignore[arg-type]
        return step().detach()  # type: ignore[no-any-return]

    def laid_out(self, x: Tensor) -> Tensor:
        """Return images in the memory layout that the network trains on."""
        return x.contiguous(memory_format=self._layout)

    def _closure(self, rows: Rows = WHOLE) -> Tensor:
        self.opt.zero_grad()
        loss = self._loss(rows)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def _scaled_step(self, scaler: torch.amp.GradScaler) -> Tensor:
        """Take an fp16 step: a scaler takes no closures, and skips the step after an overflow."""
        if isinstance(self.opt, SAM):
            scale = current_scale(scaler, self.device)
            loss: Tensor = run_passes(self.opt, partial(self._scaled_pass, scaler), scale)
        else:
            self.opt.zero_grad()
            loss = self._scaled_pass(scaler)
        scaler.step(self.opt)
        scaler.update()
        return loss

    def _scaled_pass(self, scaler: torch.amp.GradScaler, rows: Rows = WHOLE) -> Tensor:
        loss = self._loss(rows)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _loss(self, rows: Rows) -> Tensor:
        assert self._batch is not None
        x, y = rows(self._batch)
        with autocast(self.recipe, self.device):
            loss: Tensor = self._loss_fn(self.model(x), y)
        return loss
