"""One run on several processes, as torchrun starts them.

Each process (rank) trains a replica on its part of every batch, in a DistributedDataParallel. Rank 0 alone writes files
and shows progress. All stop after the same step. The first one that fails shows its error, and all end.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsam.data.loaders import Part
from sparsam.distributed.groups import average, group_size
from sparsam.errors import UserValueError
from sparsam.randomness import random_generator
from sparsam.runs.directory import RunDirectory
from sparsam.runs.recipe import Recipe

WAIT = timedelta(minutes=10)  # for the other processes to start
FAILED = "sparsam/failed"  # how many processes have failed


class Ranks:
    """The processes that train a run together; one if torch.distributed is not in use."""

    def __init__(self) -> None:
        self.size = group_size(None)
        self.rank = dist.get_rank() if self.size > 1 else 0
        self._asked: tuple[dist.Work, Tensor] | None = None

    @property
    def first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    @property
    def command(self) -> str:
        """How these processes are started."""
        return "sparsam" if self.size == 1 else f"torchrun --nproc-per-node {self.size} -m sparsam"

    @property
    def part(self) -> Part:
        """What this process gets of a batch."""
        return Part(self.rank, self.size)

    def replicate(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return what trains a model: a DistributedDataParallel if there are other processes."""
        if self.size == 1:
            return model
        return DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device])

    def seed_by_rank(self, seed: int) -> None:
        """Let dropout draw other random numbers in each process from here on; the first goes on as if it were alone."""
        if not self.first:
            torch.manual_seed(random_generator(seed, self.rank).initial_seed())

    def gather(self, value: Tensor) -> Tensor:
        """Return the tensors of all processes as the rows of one; they have the same shape and are on the CPU."""
        if self.size == 1:
            return value[None]
        rows = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(rows, value)
        return torch.stack(rows)

    def average(self, value: Tensor) -> None:
        """Let a tensor be its mean over the processes."""
        average([value], None)

    def sum(self, value: Tensor) -> None:
        """Let a tensor be its sum over the processes."""
        if self.size > 1:
            dist.all_reduce(value)

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes the buffers of the first: each has moved BatchNorm's by its own batches."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def wait(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()

    def agree(self, wish: bool) -> bool:
        """Tell whether any process had a wish when it called this the last time: the same answer for all.

        The question goes out now, and is answered at the next call: nobody waits for it.
        """
        if self.size == 1:
            return wish
        granted = False
        if self._asked is not None:
            work, wishes = self._asked
            work.wait()
            granted = bool(wishes.item())
        wishes = torch.tensor([wish], dtype=torch.uint8)
        self._asked = dist.all_reduce(wishes, dist.ReduceOp.MAX, async_op=True), wishes
        return granted


class ReadOnlyDirectory(RunDirectory):
    """A run's directory for processes that write nothing to it."""

    def create(self, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Leave it to the first process."""

    def clear(self) -> None:
        """Leave it to the first process."""

    def note_resumed(self, steps: int, environment: dict[str, Any]) -> None:
        """Leave it to the first process."""

    def check_new(self) -> None:
        """Leave it to the first process."""

    def lock(self) -> None:
        """Leave it to the first process."""

    def keep_epochs(self, count: int) -> None:
        """Leave it to the first process."""

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Leave it to the first process."""

    def add_events(self, metrics: dict[str, Any]) -> None:
        """Leave it to the first process."""


def run_directory(path: str | Path) -> RunDirectory:
    """Return a run's directory, which only the first process writes."""
    return RunDirectory(path) if Ranks().first else ReadOnlyDirectory(path)


def launched_processes() -> int:
    """Return how many processes torchrun has started; 1 without it."""
    launched = dist.is_available() and dist.is_torchelastic_launched()
    return int(os.environ["WORLD_SIZE"]) if launched else 1


@contextmanager
def joined(find_device: Callable[[], torch.device]) -> Iterator[torch.device]:
    """Join the other processes that torchrun has started; yield this one's device. Without torchrun, do nothing.

    After an error all processes end. The first that failed raises it, the others exit silently.

    Args:
        find_device: Returns a CPU, or a GPU without a number: each process takes that of its number on its machine.
    """
    if launched_processes() == 1:
        yield find_device()
        return
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=WAIT)))  # type: ignore[attr-defined]
    try:
        device = own_device(find_device())
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        with warnings.catch_warnings():
            if rank > 0:
                warnings.simplefilter("ignore")
            yield device
        gc.collect()  # a DistributedDataParallel that is freed after its group can wait for itself
        dist.barrier()  # all end together: rank 0 may still be writing
        dist.destroy_process_group()
    except BaseException:
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives a start
        if store.add(f"{FAILED}/{start}", 1) > 1:  # another has failed before, and this one because of it or alike
            raise SystemExit(1) from None
        raise


def own_device(device: torch.device) -> torch.device:
    """Return the GPU of a process that torchrun has started, or the CPU."""
    if device.type == "cpu":
        return device
    own, here = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if device.index is not None:
        raise UserValueError(
            f"--device must be cpu or cuda under torchrun, which gives each process a GPU, but is {device}"
        )
    if own >= here:
        raise UserValueError(
            f"--nproc-per-node must be at most the number of GPUs, {here}, but is {os.environ['LOCAL_WORLD_SIZE']}; "
            f"--device cpu trains on the CPU"
        )
    device = torch.device("cuda", own)
    torch.cuda.set_device(device)
    return device
