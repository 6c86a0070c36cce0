"""The training loop, from top to bottom.

A run is a function of its recipe: weights, order of images, augmentation, dropout and masks all start from seeds, and
what a step needs of the past is in the checkpoint. In deterministic mode a resumed run is the uninterrupted
one, bit for bit.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsam.cuda_graph import CapturedStep
from sparsam.errors import need
from sparsam.masks import BudgetMask, StepKind
from sparsam.runs.build import build_loader, build_loss, build_network
from sparsam.runs.checkpoint import load_checkpoint, save_checkpoint
from sparsam.runs.directory import RunDirectory
from sparsam.runs.recipe import Recipe
from sparsam.runs.step_time import step_time
from sparsam.sam import SAM
from sparsam.training.build import build_optimizer
from sparsam.training.environment import describe_environment
from sparsam.training.flops import theoretical_flops
from sparsam.training.mask_history import MaskHistory
from sparsam.training.progress import Progress

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
OF_THE_DEVICE = ("lr", "rho", "fused", "capturable")  # group options that differ between a CPU and a captured step


class Interrupted(Exception):
    """The run was asked to stop, and has saved where it was."""


class Trainer:
    """Trains one recipe in one directory.

    Args:
        recipe: What to do.
        directory: Where the run is written.
        device: Where to train.
        progress: Who is told.
    """

    def __init__(
        self, recipe: Recipe, directory: RunDirectory, *, device: torch.device, progress: Progress | None = None
    ) -> None:
        self.recipe, self.directory, self.device = recipe, directory, device
        self.progress = progress or Progress()
        _prepare_torch(recipe, self.device)
        if recipe.train.tensorboard:
            need("tensorboard", "TensorBoard events", extra="tensorboard")

        self.loader = build_loader(recipe, self.device)
        self.model = build_network(recipe, self.loader.classes, self.loader.channels, self.device)
        captured = recipe.train.cuda_graph and self.device.type == "cuda" and recipe.train.precision != "fp16"
        self.opt = build_optimizer(recipe, self.model, self.loader, captured=captured)
        self.loss_fn = build_loss(recipe)
        self.scaler = torch.amp.GradScaler(self.device.type) if recipe.train.precision == "fp16" else None
        self._captured = CapturedStep(self.opt, self._closure) if captured else None

        self.x: Tensor | None = None  # the batch that is trained on
        self.y: Tensor | None = None
        self.epoch = self.batch = 0  # the next batch to train on
        self.loss_sum = torch.zeros((), device=self.device)  # of the epoch so far
        self.seconds = 0.0  # of the epoch so far, training only
        self.elapsed = 0.0  # of all finished epochs
        self.best = {"accuracy": -1.0, "epoch": 0}
        self.peak_memory_mb: float | None = None  # of the epoch
        self.mask_history = MaskHistory()
        self.shared = False  # whether other runs are trained on the device at the same time
        self._stop = False

    # ------------------------------------------------------------------------------------------- the run

    def run(self) -> dict[str, Any]:
        """Train from where the trainer stands to the end; return the summary."""
        with stopping_on_signals(self.stop):
            for _ in self.steps():
                pass
        return self.directory.summary()

    @property
    def budget_mask(self) -> BudgetMask | None:
        """The mask, if it is one with a budget."""
        mask = self.opt.mask if isinstance(self.opt, SAM) else None
        return mask if isinstance(mask, BudgetMask) else None

    def measured(self) -> dict[str, Any]:
        """Return what a BudgetMask has measured, or was given."""
        mask = self.budget_mask
        return {"cut": mask.cut if mask else None, "late_share": mask.late_share if mask else None}

    def use_measured(self, found: dict[str, Any]) -> None:
        """Let a BudgetMask take what another seed has measured, so that seeds do not differ in it."""
        mask = self.budget_mask
        if mask and mask.unmeasured and found:
            mask.cut, mask.late_share = found.get("cut"), found.get("late_share")

    def _tell_measured(self, mask: BudgetMask) -> None:
        """Say what was chosen."""
        text = f"perturbed is what lies behind the cut before {mask.cut!r}" if mask.cut else "everything is perturbed"
        if mask.late_share is not None:
            text += f" in the last {100 * mask.late_share:.3g} % of the steps"
        if mask.cost:
            text += f", where a step was measured to cost {mask.cost:.2f} base steps"
        if mask.late_share is not None and mask.late_share < 1:
            text += "; the others take one pass"
            text += f", moved along the momentum by {mask.momentum_rho:g}" if mask.momentum_rho else ""
        self.progress.remark(text)

    def stop(self) -> None:
        """End the step that is being taken, save, and raise :class:`Interrupted`."""
        self._stop = True

    def steps(self) -> Iterator[None]:
        """Train from where the trainer stands to the end, one step at a time."""
        with self.progress:
            self.progress.start(self.recipe, self.loader.steps, self.epoch)
            while self.epoch < self.recipe.train.epochs:
                yield from self._train_epoch()
                metrics = self._metrics()
                self.directory.add_metrics(metrics)
                if self.recipe.train.tensorboard:
                    self.directory.add_events(metrics)
                self.progress.epoch_done(metrics)
                self._next_epoch(metrics)
                if self._stop and self.epoch < self.recipe.train.epochs:
                    self._save_and_stop()
            summary = self._summary()
            self.directory.write_summary(summary)
            self.progress.done(summary)
        if self._stop:
            raise Interrupted(f"{self.directory.path} is finished; nothing more was started")

    def _train_epoch(self) -> Iterator[None]:
        self.model.train()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what is reserved from here on is what training needs, a graph's memory included
            torch.cuda.reset_peak_memory_stats(self.device)
        every = self.recipe.train.checkpoint_steps
        start = time.perf_counter() - self.seconds
        for x, y in self._batches():
            self.x, self.y = x, y
            self._set_lr()
            self.loss_sum += self._step()
            self.batch += 1
            if self.batch == 1 or self.batch % 10 == 0:
                self.progress.step_done(self.batch, time.perf_counter() - start)
            if self._captured and self._captured.eager_because:
                self.progress.remark(f"no CUDA graph: {self._captured.eager_because}")
            if self.budget_mask and not self.budget_mask.unmeasured:
                self._tell_measured(self.budget_mask)
            if self._stop or (every and self.batch % every == 0):
                self._synchronise()
                self.seconds = time.perf_counter() - start
                if self._stop:
                    self._save_and_stop()
                self.save(self.directory.last)
                start = time.perf_counter() - self.seconds  # writing is not training
            yield
        self._synchronise()
        self.seconds = time.perf_counter() - start

    def _save_and_stop(self) -> None:
        self.save(self.directory.last)
        raise Interrupted(
            f"stopped in epoch {self.epoch + 1} after batch {self.batch}; "
            f"continue with: sparsam train --resume {self.directory.path}"
        )

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        layout = torch.channels_last if self.recipe.train.channels_last else torch.contiguous_format
        for x, y in self.loader.epoch(self.epoch, self.batch):
            x = x.contiguous(memory_format=layout)
            if self._captured is None or self.x is None or self.y is None:
                yield x, y
            else:  # a captured step reads where the first batch was
                yield self.x.copy_(x), self.y.copy_(y)

    def _step(self) -> Tensor:
        if self.scaler is not None:
            return self._scaled_step(self.scaler)
        step: Callable[[], Any] = self._captured or (lambda: self.opt.step(self._closure))  # type: ignore[arg-type]
        return step().detach()  # type: ignore[no-any-return]

    def _closure(self) -> Tensor:
        self.opt.zero_grad()
        loss = self._loss()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def _scaled_step(self, scaler: torch.amp.GradScaler) -> Tensor:
        """Take an fp16 step: a scaler takes no closures, and skips the step after an overflow."""
        self.opt.zero_grad()
        loss = self._loss()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if isinstance(self.opt, SAM):
            with self.opt.perturbed():
                self.opt.zero_grad()
                scaler.scale(self._loss()).backward()  # type: ignore[no-untyped-call]
        scaler.step(self.opt)
        scaler.update()
        return loss.detach()

    def _loss(self) -> Tensor:
        with self._autocast():
            loss: Tensor = self.loss_fn(self.model(self.x), self.y)
        return loss

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = AUTOCAST.get(self.recipe.train.precision)
        return torch.autocast(self.device.type, dtype) if dtype else contextlib.nullcontext()

    def _lr(self, batch: int) -> float:
        """Return the learning rate of a batch of this epoch: a cosine from the first step of the run to 0."""
        total, done = self.recipe.train.epochs * self.loader.steps, self.epoch * self.loader.steps + batch
        return self.recipe.optimizer.lr * (1 + math.cos(math.pi * done / total)) / 2

    def _set_lr(self) -> None:
        for group in self.opt.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self._lr(self.batch))
            else:
                group["lr"] = self._lr(self.batch)

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float, int]:
        """Return loss and accuracy over the evaluation images, and their number."""
        self.model.eval()
        loss, right, count = (torch.zeros((), device=self.device) for _ in range(3))
        for x, y in self.loader.evaluation():
            with self._autocast():
                outputs = self.model(x)
            loss += F.cross_entropy(outputs.float(), y, reduction="sum")
            right += (outputs.argmax(1) == y).sum()
            count += len(y)
        total_loss, total_right, total = torch.stack([loss, right, count]).tolist()
        return total_loss / total, total_right / total, int(total)

    # -------------------------------------------------------------------------------- metrics and saving

    def _metrics(self) -> dict[str, Any]:
        if self.device.type == "cuda":
            self.peak_memory_mb = torch.cuda.max_memory_reserved(self.device) / 2**20  # of training, not of evaluation
        loss, accuracy, _ = self.evaluate()
        sam = self.opt if isinstance(self.opt, SAM) else None
        kinds = [sam.mask.kind(self.epoch * self.loader.steps + i) for i in range(self.loader.steps)] if sam else []
        shares = mask_density(sam, self.model, kinds) if sam else None
        params = [p for group in self.opt.param_groups for p in group["params"]]
        return {
            "epoch": self.epoch + 1,
            "steps": (self.epoch + 1) * self.loader.steps,
            "train_loss": self.loss_sum.item() / self.loader.steps,
            "test_loss": loss,
            "test_accuracy": accuracy,
            "lr": self._lr(self.loader.steps - 1),
            "rho": _usual_radius(kinds, sam),
            "seconds": self.seconds,
            "elapsed": self.elapsed + self.seconds,
            "step_ms": 1000 * self.seconds / self.loader.steps,
            "peak_memory_mb": self.peak_memory_mb,
            "perturbed": None if shares is None else shares.pop(""),
            "mask_density": shares,
            **self.mask_history.add(sam.selection if sam else None, params),
        }

    def _next_epoch(self, metrics: dict[str, Any]) -> None:
        self.elapsed = metrics["elapsed"]
        self.epoch += 1
        self.batch, self.seconds = 0, 0.0
        self.loss_sum.zero_()
        improved = metrics["test_accuracy"] > self.best["accuracy"]
        every = self.recipe.train.checkpoint_epochs
        if improved:
            self.best = {"accuracy": metrics["test_accuracy"], "epoch": self.epoch}
            if every:
                save_checkpoint(self.directory.best, {"model": self.model.state_dict(), "epoch": self.epoch})
        due = self.epoch == self.recipe.train.epochs or (every and self.epoch % every == 0)
        if due or (every and improved):  # a run that goes on from here agrees with its best weights
            self.save(self.directory.last)

    def _summary(self) -> dict[str, Any]:
        epochs = self.directory.metrics()
        shares = [m["perturbed"] for m in epochs if m["perturbed"] is not None]
        perturbed = statistics.fmean(shares) if shares else None
        mask = self.opt.mask if isinstance(self.opt, SAM) else None
        steps = epochs[-1]["steps"]
        two_passes = 1 - (sum(mask.kind(step).one_pass for step in range(steps)) / steps if mask else 0.0)
        return {
            "name": self.recipe.name,
            "method": self.recipe.method,
            "seed": self.recipe.train.seed,
            "epochs": len(epochs),
            "test_accuracy": epochs[-1]["test_accuracy"],
            "best_accuracy": self.best["accuracy"],
            "best_epoch": self.best["epoch"],
            "evaluated_on": self.recipe.evaluated_on,
            "step_ms": None if self.shared else step_time((m["step_ms"], m["perturbed"]) for m in epochs),
            "seconds": None if self.shared else epochs[-1]["elapsed"],
            "peak_memory_mb": None if self.shared else epochs[-1]["peak_memory_mb"],
            "perturbed": perturbed,
            **self.measured(),
            "theoretical_flops": theoretical_flops(perturbed, two_passes),
            "extra": {},
        }

    def save(self, path: Any) -> None:
        """Write everything that the rest of the run depends on."""
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        save_checkpoint(
            path,
            {
                "model": self.model.state_dict(),
                "optimizer": self.opt.state_dict(),
                "scaler": self.scaler.state_dict() if self.scaler else None,
                "rng": rng,
                "epoch": self.epoch,
                "batch": self.batch,
                "loss_sum": self.loss_sum,
                "seconds": self.seconds,
                "elapsed": self.elapsed,
                "best": self.best,
                "mask_history": self.mask_history.state(),
            },
        )

    def load(self, path: Any) -> None:
        """Go to where a checkpoint was written."""
        saved = load_checkpoint(path, self.device)
        self.model.load_state_dict(saved["model"])
        built = [{key: group.get(key) for key in OF_THE_DEVICE} for group in self.opt.param_groups]
        self.opt.load_state_dict(saved["optimizer"])
        for group, own in zip(self.opt.param_groups, built, strict=True):
            group.update({key: _same_kind(own[key], group[key]) for key in OF_THE_DEVICE if key in group})
        if self.scaler:
            self.scaler.load_state_dict(saved["scaler"])
        torch.set_rng_state(saved["rng"]["cpu"].cpu())
        if self.device.type == "cuda" and "cuda" in saved["rng"]:  # not if the run comes from a CPU
            torch.cuda.set_rng_state(saved["rng"]["cuda"].cpu(), self.device)
        self.epoch, self.batch = saved["epoch"], saved["batch"]
        self.loss_sum.copy_(saved["loss_sum"])
        self.seconds, self.elapsed, self.best = saved["seconds"], saved["elapsed"], saved["best"]
        self.mask_history.load(saved["mask_history"])

    # -------------------------------------------------------------------------------------------- helpers

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM call `stop`; a second Ctrl-C stops at once."""

    def handler(number: int, frame: Any) -> None:
        stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def train(
    recipe: Recipe, path: Any, *, device: torch.device | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Train a recipe in a new directory."""
    return new_run(recipe, path, device=device, progress=progress).run()


def resume(path: Any, *, device: torch.device | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Continue a run from its latest checkpoint; from its start if it has none."""
    directory = RunDirectory(path)
    return directory.summary() if directory.finished else old_run(path, device=device, progress=progress).run()


def new_run(
    recipe: Recipe, path: Any, *, device: torch.device | None = None, progress: Progress | None = None
) -> Trainer:
    """Make a new directory for a recipe, and its trainer."""
    directory = RunDirectory(path)
    directory.check_new()
    device = device or default_device()
    trainer = Trainer(recipe, directory, device=device, progress=progress)
    directory.create(recipe, describe_environment(device))  # after all that can go wrong
    return trainer


def old_run(path: Any, *, device: torch.device | None = None, progress: Progress | None = None) -> Trainer:
    """Return a trainer that stands where an unfinished run was saved last."""
    directory = RunDirectory(path)
    trainer = Trainer(directory.recipe(), directory, device=device or default_device(), progress=progress)
    if directory.last.exists():
        trainer.load(directory.last)
    directory.keep_epochs(trainer.epoch)
    return trainer


def default_device() -> torch.device:
    """Return a GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def mask_density(opt: SAM, model: torch.nn.Module, kinds: Sequence[StepKind]) -> dict[str, float]:
    """Return the share of the weights of each block of the model that a mean step perturbs, and under "" of all.

    Args:
        opt: With the mask.
        model: With the blocks.
        kinds: Of the steps.
    """
    full = sum(kind.everything for kind in kinds) / len(kinds)
    masked = 1 - full - sum(kind.one_pass for kind in kinds) / len(kinds)
    chosen: dict[str, Any] = {}
    total: dict[str, int] = {}
    names = {p: ".".join(name.split(".")[:2]) for name, p in model.named_parameters()}
    params = [p for group in opt.param_groups for p in group["params"]]
    for p, m in zip(params, opt.selection or [False] * len(params), strict=True):
        for block in ("", names[p]):
            total[block] = total.get(block, 0) + p.numel()
            chosen[block] = chosen.get(block, 0) + (m.sum() if isinstance(m, Tensor) else m * p.numel())
    return {block: masked * float(chosen[block]) / total[block] + full for block in total}


def _usual_radius(kinds: Sequence[StepKind], opt: SAM | None) -> float | None:
    """Return rho of an epoch's steps, as most of those have it that perturb by a gradient; None if none does."""
    rhos = Counter(kind.rho for kind in kinds if not kind.one_pass)
    if opt is None or not rhos:
        return None
    ((rho, _),) = rhos.most_common(1)
    return float(opt.param_groups[0]["rho"]) if rho is None else rho


def _same_kind(own: Any, loaded: Any) -> Any:
    """Return a loaded number as this device wants it, in its tensor or plain; a switch stays as it is here."""
    if isinstance(own, Tensor):
        return own.fill_(float(loaded))
    return own if isinstance(own, bool) or own is None else float(loaded)


def _prepare_torch(recipe: Recipe, device: torch.device) -> None:
    torch.manual_seed(recipe.train.seed)
    if recipe.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for to be deterministic
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    torch.backends.cudnn.benchmark = not recipe.train.deterministic
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # streams, graphs and generators are those of the current device
