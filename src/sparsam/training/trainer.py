"""The training loop, from top to bottom.

A run is a function of its recipe: weights, order of images, augmentation, dropout and masks all start from seeds, and
what a step needs of the past is in the checkpoint. In deterministic mode a resumed run is the uninterrupted
one, bit for bit. Several processes can train a run together (:mod:`sparsam.training.ranks`).
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from copy import copy
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsam.ascents import Ascent
from sparsam.batchnorm import refresh_batchnorm
from sparsam.data import WHOLE
from sparsam.errors import need
from sparsam.passes import preserve_state
from sparsam.runs.build import build_loader, build_network
from sparsam.runs.checkpoint import load_checkpoint, save_checkpoint
from sparsam.runs.directory import RunDirectory
from sparsam.runs.recipe import Recipe
from sparsam.runs.run import step_time
from sparsam.sam import SAM
from sparsam.training.build import Context, build_optimizer
from sparsam.training.flops import theoretical_flops
from sparsam.training.interrupt import Interrupted, stopping_on_signals
from sparsam.training.mask_statistics import MaskStatistics
from sparsam.training.over_time import OverTime
from sparsam.training.progress import Progress
from sparsam.training.ranks import Ranks
from sparsam.training.step import TrainingStep, autocast, is_captured

OF_THE_DEVICE = ("lr", "rho", "fused", "capturable")  # group options that differ between a CPU and a captured step
FRESH = "Accuracy with fresh BatchNorm, %"


class Trainer:
    """Trains one recipe in one directory.

    Args:
        recipe: What to do.
        directory: Where the run is written.
        device: Where to train.
        progress: Shows how the run goes.
    """

    def __init__(
        self, recipe: Recipe, directory: RunDirectory, *, device: torch.device, progress: Progress | None = None
    ) -> None:
        self.recipe, self.directory, self.device = recipe, directory, device
        self.ranks = Ranks()
        self.progress = (progress if self.ranks.first else None) or Progress()
        prepare_torch(recipe, self.device)
        if recipe.train.tensorboard:
            need("tensorboard", "TensorBoard events", extra="tensorboard")

        self.loader = build_loader(recipe, self.device, self.ranks.part)
        self.total_steps = total_steps(recipe, self.loader.steps)
        self.epochs = math.ceil(self.total_steps / self.loader.steps)
        self.model = build_network(recipe, self.loader.classes, self.loader.channels, self.device)
        self.replica = self.ranks.replicate(self.model, self.device)  # the model, as it trains
        run = Context(self.replica, self.loader, self.loader.steps, self.total_steps, recipe.train.seed)
        self.opt = build_optimizer(recipe, run, captured=is_captured(recipe, self.device))
        self.sam = self.opt if isinstance(self.opt, SAM) else None
        self.over_time = OverTime(recipe, self.opt, epoch_steps=self.loader.steps, total_steps=self.total_steps)
        self.step = TrainingStep(recipe, self.replica, self.opt, self.device)
        self.ranks.seed_by_rank(recipe.train.seed)

        self.epoch = self.batch = 0  # the next batch to train on
        self.loss_sum = torch.zeros((), device=self.device)  # of the epoch so far
        self.seconds = 0.0  # of the epoch so far, training only
        self.elapsed = 0.0  # of all finished epochs
        self.best = {"accuracy": -1.0, "epoch": 0}
        self.peak_memory_mb: float | None = None  # of the epoch
        self.mask_statistics = MaskStatistics(self.model, [p for g in self.opt.param_groups for p in g["params"]])
        self.after_step: dict[int, list[Callable[[Trainer], None]]] = {}  # called after so many steps
        self.untimed = False  # whether its times are not its own: others had the device too, or took its first steps
        self._stop = False

    # ------------------------------------------------------------------------------------------- the run

    def run(self) -> dict[str, Any]:
        """Train from where the trainer stands to the end; return the summary."""
        with stopping_on_signals(self.stop):
            for _ in self.steps():
                pass
        return self.directory.summary() if self.ranks.first else {}

    def stop(self) -> None:
        """End the step that is being taken, save, and raise :class:`Interrupted`."""
        self._stop = True

    def steps(self) -> Iterator[None]:
        """Train from where the trainer stands to the end, one step at a time."""
        try:
            with self.progress:
                yield from self._steps()
        finally:
            self.directory.unlock()
        if self._stop:
            raise Interrupted(f"{self.directory.path} is finished; nothing more was started")

    def _steps(self) -> Iterator[None]:
        self.progress.start(self.recipe, self.loader.steps, self.total_steps, self.epoch)
        while self.epoch < self.epochs:
            yield from self._train_epoch()
            metrics = self._metrics()
            self.directory.add_metrics(metrics)
            if self.recipe.train.tensorboard:
                self.directory.add_events(metrics)
            self.progress.epoch_done(metrics)
            self._next_epoch(metrics)
            if self.ranks.agree(self._stop) and self.epoch < self.epochs:
                self._save_and_stop()
        if self.ranks.first:
            summary = self._summary()
            self.directory.write_summary(summary)
            self.progress.done(summary)

    def _train_epoch(self) -> Iterator[None]:
        self.model.train()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what is reserved from here on is what training needs, a graph's memory included
            torch.cuda.reset_peak_memory_stats(self.device)
        every = self.recipe.train.checkpoint_steps
        start = time.perf_counter() - self.seconds
        for x, y in self.loader.epoch(self.epoch, self.batch):
            if self.batch == self._epoch_steps:
                break
            self.over_time.set(self.steps_taken)
            self.loss_sum += self._step(x, y)
            self.batch += 1
            if self.batch == 1 or self.batch % 10 == 0:
                self.progress.step_done(self.batch, time.perf_counter() - start)
            if self.step.eager_because:
                self.progress.remark(f"no CUDA graph: {self.step.eager_because}")
            stop, callbacks = self.ranks.agree(self._stop), self.after_step.pop(self.steps_taken, [])
            due = every and self.batch % every == 0
            if stop or callbacks or due:
                self._synchronize()
                self.seconds = time.perf_counter() - start
                for callback in callbacks:
                    callback(self)
                if stop:
                    self._save_and_stop()
                if due:
                    self.save(self.directory.last)
                start = time.perf_counter() - self.seconds  # writing is not training
            yield
        self._synchronize()
        self.seconds = time.perf_counter() - start
        self.ranks.average(self.loss_sum)

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        """Take a step; measure the mask of the epoch's last step that has one."""
        reads_mask = self.sam is not None and self.sam.needs_second_pass
        loss = self.step(x, y)
        if self.sam is not None and reads_mask:
            coming = range(self.sam.steps, self.sam.steps + self._epoch_steps - self.batch - 1)
            if not any(map(self._takes_two_passes, coming)):
                self.mask_statistics.measure(self.sam.masks())
        return loss

    def _save_and_stop(self) -> None:
        self.save(self.directory.last)
        self.ranks.wait()  # else torchrun would end the first process, which may still be writing
        raise Interrupted(
            f"stopped in epoch {self.epoch + 1} after batch {self.batch}; "
            f"continue with: {self.ranks.command} train --resume {self.directory.path}"
        )

    # --------------------------------------------------------------------------- the length of a run, schedules

    @property
    def steps_taken(self) -> int:
        """The steps so far."""
        return self.epoch * self.loader.steps + self.batch

    @property
    def _epoch_steps(self) -> int:
        """The steps of this epoch; the last one may be cut short."""
        return min(self.loader.steps, self.total_steps - self.epoch * self.loader.steps)

    def _ascent(self, step: int) -> Ascent | None:
        return self.sam.schedule.ascent(step, self.sam.ascent) if self.sam else None

    def _takes_two_passes(self, step: int) -> bool:
        ascent = self._ascent(step)
        return ascent is not None and ascent.passes == 2

    # --------------------------------------------------------------------------------------- what is measured

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float, int]:
        """Return loss and accuracy over the evaluation images, and their number."""
        self.model.eval()
        self.ranks.share_buffers(self.model)
        loss, right, count = (torch.zeros((), device=self.device) for _ in range(3))
        for x, y in self.loader.evaluation():
            with autocast(self.recipe, self.device):
                outputs = self.model(x)
            loss += F.cross_entropy(outputs.float(), y, reduction="sum")
            right += (outputs.argmax(1) == y).sum()
            count += len(y)
        sums = torch.stack([loss, right, count])
        self.ranks.sum(sums)
        total_loss, total_right, total = sums.tolist()
        return total_loss / total, total_right / total, int(total)

    def _metrics(self) -> dict[str, Any]:
        if self.device.type == "cuda":
            self.peak_memory_mb = torch.cuda.max_memory_reserved(self.device) / 2**20  # of training, not of evaluation
        loss, accuracy, _ = self.evaluate()
        first, steps = self.epoch * self.loader.steps, self._epoch_steps
        return {
            "epoch": self.epoch + 1,
            "steps": first + steps,
            "train_loss": self.loss_sum.item() / steps,
            "test_loss": loss,
            "test_accuracy": accuracy,
            "lr": self.over_time.lr(first + steps - 1),
            "seconds": self.seconds,
            "elapsed": self.elapsed + self.seconds,
            "step_ms": 1000 * self.seconds / steps,
            "peak_memory_mb": self.peak_memory_mb,
            **self._sam_metrics(range(first, first + steps)),
            **self._fresh_metrics(),
        }

    def _fresh_metrics(self) -> dict[str, Any]:
        """Return what is measured with BatchNorm's statistics taken again. The run itself keeps its own."""
        batches = self.recipe.train.refresh_batchnorm
        if batches is None or self.epoch + 1 < self.epochs:
            return {}
        loader = copy(self.loader)
        loader.part = WHOLE  # of several processes each takes the statistics of whole batches
        with preserve_state(self.model), autocast(self.recipe, self.device):
            refresh_batchnorm(
                self.model, (self.step.laid_out(x) for x, _ in islice(loader.epoch(self.epochs), batches))
            )
            loss, accuracy, _ = self.evaluate()
        return {"fresh_test_loss": loss, "fresh_test_accuracy": accuracy}

    def _sam_metrics(self, steps: range) -> dict[str, Any]:
        """Return what concerns perturbed steps. The mask is measured once, so steps that perturb count it alike."""
        if self.sam is None:
            return dict.fromkeys(("rho", "perturbed", "mask_density", "mask_kept", "mask_kept_since_start"))
        perturbs = any(self._ascent(step) is self.sam.ascent for step in steps)
        rho = float(self.sam.param_groups[0]["rho"]) if perturbs else None
        return {"rho": rho, **self.mask_statistics.epoch(statistics.fmean(map(self._takes_two_passes, steps)))}

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
                self._write(self.directory.best, {"model": self.model.state_dict(), "epoch": self.epoch})
        due = self.epoch == self.epochs or (every and self.epoch % every == 0)
        if due or (every and improved):  # a run that goes on from here agrees with its best weights
            self.save(self.directory.last)

    def _summary(self) -> dict[str, Any]:
        epochs = self.directory.metrics()
        perturbed, two_passes = None, statistics.fmean(map(self._takes_two_passes, range(self.total_steps)))
        if self.sam is not None:
            ends = [0, *(m["steps"] for m in epochs)]
            weights = [end - start for start, end in pairwise(ends)]
            perturbed = statistics.fmean((m["perturbed"] for m in epochs), weights)
        return {
            "name": self.recipe.name,
            "method": self.recipe.method,
            "seed": self.recipe.train.seed,
            "epochs": len(epochs),
            "steps": self.total_steps,
            "test_accuracy": epochs[-1]["test_accuracy"],
            "best_accuracy": self.best["accuracy"],
            "best_epoch": self.best["epoch"],
            "evaluated_on": self.recipe.evaluated_on,
            "step_ms": None if self.untimed else step_time((m["step_ms"], m["perturbed"]) for m in epochs),
            "seconds": None if self.untimed else epochs[-1]["elapsed"],
            "peak_memory_mb": None if self.untimed else epochs[-1]["peak_memory_mb"],
            "perturbed": perturbed,
            # The paper's formula does not know that nothing before a cut is computed twice.
            "theoretical_flops": theoretical_flops(perturbed, two_passes, self.recipe.sam.share)
            if self.recipe.mask.cut is None
            else None,
            "extra": {FRESH: 100 * epochs[-1]["fresh_test_accuracy"]} if "fresh_test_accuracy" in epochs[-1] else {},
        }

    # --------------------------------------------------------------------------------------------- checkpoints

    def save(self, path: Any) -> None:
        """Write all that the rest of the run depends on."""
        self._write(path, self.state())

    def state(self) -> dict[str, Any]:
        """Return all that the rest of the run depends on; it is the same for all processes, except random numbers."""
        self.ranks.average(self.loss_sum)
        rng = {"cpu": self.ranks.gather(torch.get_rng_state())}
        if self.device.type == "cuda":
            rng["cuda"] = self.ranks.gather(torch.cuda.get_rng_state(self.device))
        return {
            "model": self.model.state_dict(),
            "optimizer": self.opt.state_dict(),
            "scaler": self.step.scaler.state_dict() if self.step.scaler else None,
            "rng": rng,
            "epoch": self.epoch,
            "batch": self.batch,
            "loss_sum": self.loss_sum,
            "seconds": self.seconds,
            "elapsed": self.elapsed,
            "best": self.best,
            "untimed": self.untimed,
            "mask_statistics": self.mask_statistics.state(),
        }

    def _write(self, path: Any, content: dict[str, Any]) -> None:
        if self.ranks.first:
            save_checkpoint(path, content)

    def load(self, path: Any) -> None:
        """Go to where a checkpoint was written."""
        saved = load_checkpoint(path, self.device)
        self.model.load_state_dict(saved["model"])
        built = [{key: group.get(key) for key in OF_THE_DEVICE} for group in self.opt.param_groups]
        if self.sam is not None and "base_steps" in saved:  # of another run, which left it (:mod:`.shared_start`)
            self.sam.base_optimizer.load_state_dict(saved["optimizer"])
            self.sam.steps = saved["base_steps"]
        else:
            self.opt.load_state_dict(saved["optimizer"])
        for group, own in zip(self.opt.param_groups, built, strict=True):
            group.update({key: _as_built(own[key], group[key]) for key in OF_THE_DEVICE if key in group})
        if self.step.scaler:
            self.step.scaler.load_state_dict(saved["scaler"])
        rng = {kind: states.cpu().reshape(-1, states.shape[-1]) for kind, states in saved["rng"].items()}
        rank = self.ranks.rank
        if rank < len(rng["cpu"]):  # it has a row for each process that there was
            torch.set_rng_state(rng["cpu"][rank].clone())  # torch crashes with a view
            if self.device.type == "cuda" and "cuda" in rng:  # not if the run comes from a CPU
                torch.cuda.set_rng_state(rng["cuda"][rank].clone(), self.device)
        self.epoch, self.batch = saved["epoch"], saved["batch"]
        self.loss_sum.copy_(saved["loss_sum"])
        self.seconds, self.elapsed, self.best = saved["seconds"], saved["elapsed"], saved["best"]
        self.untimed |= saved["untimed"]
        self.mask_statistics.load(saved["mask_statistics"])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def total_steps(recipe: Recipe, epoch_steps: int) -> int:
    """Return the number of optimizer steps of a run, whose epochs have so many each."""
    return min(recipe.train.epochs * epoch_steps, recipe.train.max_steps or math.inf)  # type: ignore[return-value]


def prepare_torch(recipe: Recipe, device: torch.device) -> None:
    """Set what holds for the whole process: the seed, threads, deterministic algorithms."""
    torch.manual_seed(recipe.train.seed)
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)
    if recipe.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for to be deterministic
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    torch.backends.cudnn.benchmark = not recipe.train.deterministic
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # streams, graphs and generators are those of the current device


def _as_built(own: Any, loaded: Any) -> Any:
    """Return a loaded number as this device wants it, in its tensor or plain; a switch stays as it is here."""
    if isinstance(own, Tensor):
        return own.fill_(float(loaded))
    return own if isinstance(own, bool) or own is None else float(loaded)
