"""A function that several processes of one group run."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing as mp


def in_ranks(function: Callable[..., Any], *arguments: Any, world_size: int = 2) -> list[Any]:
    """Call ``function(rank, *arguments)`` in each process of a group; return what each of them returned."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_call, (world_size, folder, function, arguments), nprocs=world_size)
        return [torch.load(f"{folder}/rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def _call(rank: int, world_size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    torch.save(function(rank, *arguments), f"{folder}/rank{rank}.pt")
    gc.collect()  # a DistributedDataParallel that is freed after its group can wait for itself
    dist.destroy_process_group()
