"""SAM in Lightning's automatic optimization: derive from :class:`SAMModule` instead of LightningModule.

Lightning runs each micro-batch when it comes and steps after the last one. SAM needs all of them twice: the
micro-batches of a step are kept, and run together where Lightning takes the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch

from sparsam.batchnorm import refresh_batchnorm
from sparsam.errors import UserRuntimeError, need
from sparsam.integrations.passes import find_sam
from sparsam.sam import SAM
from sparsam.sam.without_closure import current_scale, run_passes
from sparsam.share import WHOLE, Rows

lightning = need("lightning.pytorch", "the classes for Lightning", extra="lightning")
call_hook = need("lightning.pytorch.trainer.call", "the classes for Lightning", extra="lightning")._call_strategy_hook


class SAMModule(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """A LightningModule whose `configure_optimizers` may return a :class:`sparsam.SAM`.

    `accumulate_grad_batches`, `gradient_clip_val`, `precision="bf16-mixed"`, `precision="16-mixed"`,
    `strategy="ddp"` and `ModelParallelStrategy` work as with other optimizers. An existing module becomes one by
    ``class SAMNet(SAMModule, Net): pass``. With another optimizer nothing changes.

    - With accumulation over k batches, `training_step` is called for all k of them when the k-th comes, first at w,
      then at w + eps. Until then Lightning is told that the loss is 0. The k batches stay in memory.
    - `self.log` records the first pass only. For metrics of your own, `self.in_second_pass` tells the passes apart.
    - With `share`, both passes see the first of the k batches, and only the first rows without accumulation. A
      third pass takes the rest, at w.
    - With "16-mixed" a cut saves no time: a GradScaler takes no closure, and only closures are replayed. Build
      a thrifty SAM with `whole_passes=True`, which keeps its budget.
    """

    in_second_pass = False  # whether training_step runs at w + eps, for the second time
    _kept: tuple[tuple[Any, ...], ...] = ()  # the arguments of each training_step that waits for the step
    _stepping = False
    _rows = WHOLE  # which rows of its batch the next training_step of a step takes
    _batch_size: int | None = None  # how many it took; None: all

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls.training_step, "waits_for_step"):
            cls.training_step = _waiting(cls.training_step)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Run the kept batches and the last one in one closure."""
        sam = find_sam(optimizer)
        if sam is None or optimizer_closure is None or not self.automatic_optimization:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            return
        kept, self._kept = self._kept, ()
        calls = 0

        def backward(rows: Rows = WHOLE) -> Any:
            nonlocal calls
            calls += 1
            batches: list[Callable[[], Any]] = [partial(self._backward, arguments, sam) for arguments in kept]
            batches.append(optimizer_closure)
            *first, last = rows.micro_batches(batches) if kept else batches
            with self._passing(WHOLE if kept else rows, second=calls > 1 and rows.start == 0):
                for run in first:
                    with self._without_sync():
                        run()
                return last()

        def closure() -> Any:
            sam.zero_grad()
            return backward()

        precision = self.trainer.precision_plugin
        scaler = getattr(precision, "scaler", None)
        if scaler is not None:  # Lightning calls the closure once, then unscales, clips and steps without it
            scale = current_scale(scaler, self.device)
            super().optimizer_step(epoch, batch_idx, optimizer, lambda: run_passes(sam, backward, scale))
        elif sam.share < 1:  # it would clip the gradients of share and rest, not their sum
            run_passes(sam, backward)
            precision._after_closure(self, sam)
            sam.step()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Leave the gradients to the step, which clears them before each pass: Lightning does so after the forward."""
        if find_sam(optimizer) is None or not self.automatic_optimization:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)
        elif not self._stepping:  # the first batch of several: older ones are of a run that broke off
            self._kept = self._kept[-1:]

    def log(self, *arguments: Any, **options: Any) -> None:
        """Log, unless in the second pass."""
        if self.in_second_pass:
            return
        if options.get("batch_size") is None and self._batch_size is not None:
            options["batch_size"] = self._batch_size  # Lightning would take that of the whole batch
        super().log(*arguments, **options)

    @contextmanager
    def _passing(self, rows: Rows, *, second: bool) -> Iterator[None]:
        self._stepping, self.in_second_pass, self._rows = True, second, rows
        try:
            yield
        finally:
            self._stepping = self.in_second_pass = False
            self._rows, self._batch_size = WHOLE, None

    def _take_rows(self, batch: Any, *others: Any) -> tuple[Any, ...]:
        """Return the arguments of a training_step, with its rows of the batch."""
        if hasattr(batch, "__next__"):
            raise UserRuntimeError(
                "share must be 1 with training_step(dataloader_iter), because both passes need rows of one batch; "
                "take training_step(batch)"
            )
        rows, self._rows = self._rows, WHOLE  # a training_step that it calls takes them as they are
        part = rows(batch)
        self._batch_size = rows.count
        return part, *others

    def _without_sync(self) -> AbstractContextManager[None]:
        """Leave the sum over processes to the last micro-batch, as Lightning does."""
        strategy = self.trainer.strategy
        block: AbstractContextManager[None] = getattr(strategy, "block_backward_sync", nullcontext)()
        return block

    def _backward(self, arguments: tuple[Any, ...], sam: SAM) -> Any:
        output = call_hook(self.trainer, "training_step", *arguments)  # self.log asks which hook runs
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is not None:
            loss = loss / self.trainer.accumulate_grad_batches
            call_hook(self.trainer, "backward", loss, sam)
            loss = loss.detach()
        return loss


def _waiting(training_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a training_step: outside of a step, where Lightning accumulates, it only keeps its batch."""

    @wraps(training_step)
    def wrapper(self: SAMModule, *arguments: Any, **options: Any) -> Any:
        if self._rows is not WHOLE:
            arguments = self._take_rows(*arguments)
        fits = self._trainer is not None and self.trainer.training  # not in validation, nor outside of fit
        if (
            not fits
            or self._stepping
            or not self.automatic_optimization
            or find_sam(self.trainer.optimizers[0]) is None
        ):
            return training_step(self, *arguments, **options)
        if any(hasattr(argument, "__next__") for argument in arguments):
            raise UserRuntimeError(
                "accumulate_grad_batches must be 1 with training_step(dataloader_iter), because SAM needs each batch "
                f"twice, but is {self.trainer.accumulate_grad_batches}"
            )
        self._kept = (*self._kept, arguments)
        return torch.zeros((), device=self.device, requires_grad=True)

    wrapper.waits_for_step = True  # type: ignore[attr-defined]
    return wrapper


class SAMMonitor(lightning.Callback):  # type: ignore[misc,name-defined]
    """Logs what is perturbed, every `log_every_n_steps` steps.

    - `sparsam/share`: the share of all weights that the latest step has perturbed; 0 in a base step.
    - `sparsam/rho`: the radius; with several parameter groups `sparsam/rho/0`, `sparsam/rho/1`, ...
    - `sparsam/aware_steps`: how many steps were sharpness-aware, with two passes, until now.

    Args:
        refresh_batchnorm: When training ends, take BatchNorm's running statistics again, at the final weights and over
            the training data. Checkpoints that were saved before have the old ones.
    """

    def __init__(self, *, refresh_batchnorm: bool = False) -> None:
        super().__init__()
        self.refresh_batchnorm = refresh_batchnorm
        self.aware_steps = 0
        self._before: tuple[int, bool] = 0, False

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Note whether the coming step is sharpness-aware."""
        sam = _the_sam(trainer)
        self._before = sam.steps, sam.needs_second_pass

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log, if a step was taken."""
        sam = _the_sam(trainer)
        steps, aware = self._before
        if sam.steps == steps:
            return
        self.aware_steps += aware
        if sam.steps % trainer.log_every_n_steps == 0:  # Lightning writes no other values down
            masks = sam.masks()
            share = torch.stack([m.sum() for m in masks]).sum() / sum(m.numel() for m in masks)
            rhos = [group["rho"] for group in sam.param_groups]
            names = ["sparsam/rho"] if len(rhos) == 1 else [f"sparsam/rho/{i}" for i in range(len(rhos))]
            values = {"sparsam/share": share, "sparsam/aware_steps": float(self.aware_steps)}
            module.log_dict(
                {**values, **dict(zip(names, rhos, strict=True))}, on_step=True, on_epoch=False, batch_size=1
            )

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Refresh BatchNorm, if asked for."""
        if self.refresh_batchnorm:
            refresh_batchnorm(module, trainer.train_dataloader)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on from."""
        return {"aware_steps": self.aware_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self.aware_steps = state_dict["aware_steps"]


def _the_sam(trainer: Any) -> SAM:
    sam = find_sam(trainer.optimizers[0]) if trainer.optimizers else None
    if sam is None:
        raise UserRuntimeError(f"SAMMonitor needs an optimizer that is a sparsam.SAM, but got {trainer.optimizers!r}")
    return sam
