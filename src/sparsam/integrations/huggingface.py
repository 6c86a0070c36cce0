"""SAM in the Hugging Face Trainer: :class:`SAMTrainer` instead of `transformers.Trainer`.

The Trainer runs each micro-batch when it comes, clips, and steps without a closure. SAM needs all micro-batches of a
step twice: they are kept, and the last one runs both passes. What the Trainer then clips and steps with is the gradient
at w + eps.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sparsam.errors import UserValueError, need
from sparsam.integrations.passes import find_sam
from sparsam.sam import SAM
from sparsam.sam.without_closure import current_scale, run_passes
from sparsam.share import WHOLE, Rows, fraction

transformers = need("transformers", "the classes for the Hugging Face Trainer", extra="hf")
need("accelerate", "the classes for the Hugging Face Trainer", extra="hf")


class SAMTrainer(transformers.Trainer):  # type: ignore[misc,name-defined]
    """A Trainer whose optimizer is a :class:`sparsam.SAM` around the one that the arguments ask for.

    Gradient accumulation, `max_grad_norm`, bf16, fp16, DDP and FSDP2 work as with other optimizers. So does
    ``optimizers=(opt, None)``, where `opt` is a SAM of your own; `sam` is then to be left out.

    - With accumulation over k batches, the forward passes of all k run when the k-th comes. Until then the loss is
      reported as 0, and then as the sum: the logged mean is right.
    - The reported loss is that at w. `grad_norm` is that of the gradient at w + eps.
    - With `share`, both passes see the first of the k batches, and only the first rows without accumulation.
    - A cut saves no time here: the Trainer steps without a closure, and only closures are replayed. Build a thrifty SAM
      with `whole_passes=True`, which keeps its budget.

    Args:
        *arguments: Those of the Trainer.
        sam: Arguments of :meth:`sparsam.SAM.wrap`: `rho`, `mask`, `ascent`, `schedule`, `adaptive`,
            `perturbation` and `share`. `model` is the Trainer's model.
        **options: Those of the Trainer.
    """

    def __init__(self, *arguments: Any, sam: Mapping[str, Any] | None = None, **options: Any) -> None:
        optimizer = (options.get("optimizers") or (None,))[0]
        if sam is not None and find_sam(optimizer) is not None:
            raise UserValueError(f"sam must be None beside an optimizer that is a SAM already, but is {dict(sam)!r}")
        self.sam_options = dict(sam or {})
        self._kept: list[Mapping[str, Any]] = []  # the micro-batches that wait for the last one
        super().__init__(*arguments, **options)

    def create_optimizer(self, *arguments: Any, **options: Any) -> Any:
        """Wrap the optimizer that the Trainer makes."""
        optimizer = super().create_optimizer(*arguments, **options)
        if find_sam(optimizer) is None:
            model = self.model
            if self.sam_options.get("perturbation") == "local":
                # SAM must know the DistributedDataParallel. The Trainer makes one later, unless there is one already.
                model = self.model_wrapped = self.accelerator.prepare_model(model)
            optimizer = self.optimizer = SAM.wrap(optimizer, **{"model": model, **self.sam_options})
        return optimizer

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        """Take the micro-batches of the next step. Those of a step that broke off are given up."""
        self._kept = []
        return super().get_batch_samples(*arguments, **options)

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Keep the micro-batch; the last one runs both passes over all. Return the loss at w."""
        self._kept.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        sam = find_sam(self.optimizer)
        assert sam is not None
        kept, self._kept = self._kept, []
        step = super().training_step

        def backward(rows: Rows = WHOLE) -> Tensor:
            items: Any = num_items_in_batch
            batches, losses = rows.micro_batches(kept), []
            if rows is not WHOLE and len(kept) == 1 and items is not None:
                items = items * fraction(rows)  # with the weights of share and rest, each label counts 1 / items
            for i, batch in enumerate(batches):
                last = i == len(batches) - 1
                with nullcontext() if last else self.accelerator.no_sync(model):
                    losses.append(step(model, batch, items))
            return torch.stack(losses).sum()

        scale = current_scale(self.accelerator.scaler, self.args.device)
        loss: Tensor = run_passes(sam, backward, scale)
        return loss
