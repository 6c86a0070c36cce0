"""The loop that a trainer must equal, and what a launcher tells each of its processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from sparsam import SAM

BASE = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


def train(
    model: nn.Module,
    opt: SAM,
    dataset: Dataset | DataLoader,
    *,
    batch: int = 4,
    k: int = 1,
    epochs: int = 2,
    clip: Callable[[Any], object] | None = None,
    clip_first: bool = True,
    whole_windows: bool = True,
    autocast: torch.dtype | None = None,
) -> list[float]:
    """Train with accumulation over k batches; return the loss of each step.

    With `whole_windows` the last step of an epoch divides by k too, where there are fewer batches. With `clip_first`
    the gradient at w is clipped too.
    """
    losses = []
    loader = dataset if isinstance(dataset, DataLoader) else DataLoader(dataset, batch_size=batch)

    def closure() -> float:
        nonlocal calls
        calls += 1
        opt.zero_grad()
        total = 0.0
        for x, y in window:
            with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
                loss = F.cross_entropy(model(x), y) / (k if whole_windows else len(window))
            loss.backward()
            total += loss.item()
        if clip is not None and (clip_first or calls >= 1 + opt.needs_second_pass):
            clip(model.parameters())
        return total

    for _ in range(epochs):
        batches = list(loader)
        for start in range(0, len(batches), k):
            window, calls = batches[start : start + k], 0
            losses.append(opt.step(closure))
    return losses


def train_on_share(
    model: nn.Module,
    opt: SAM,
    dataset: Dataset,
    share: float,
    *,
    batch: int = 4,
    k: int = 1,
    epochs: int = 2,
    clip: Callable[[Any], object] | None = None,
    whole_windows: bool = True,
    scaler: torch.amp.GradScaler | None = None,
) -> list[float]:
    """Train on a share of the batch by hand, as docs/shares.md does; `opt` has none. Return the loss of each step.

    The arguments are those of :func:`train`; with a scaler it trains in fp16.
    """

    def backward(parts: list[Any], factor: float = 1.0) -> float:
        total = 0.0
        for weight, x, y in parts:
            with nullcontext() if scaler is None else torch.autocast("cpu", torch.float16):
                loss = weight * F.cross_entropy(model(x), y)
            (factor * loss if scaler is None else scaler.scale(factor * loss)).backward()
            total += loss.item()
        return total

    losses = []
    for _ in range(epochs):
        batches = list(DataLoader(dataset, batch_size=batch))
        for start in range(0, len(batches), k):
            window = batches[start : start + k]
            divisor = k if whole_windows else len(window)
            whole = parts = [(1 / divisor, x, y) for x, y in window]
            n = max(1, round(share * len(window)))
            part = n / len(window)
            if len(window) == 1:
                [(weight, x, y)] = whole
                rows = max(1, round(share * len(x)))
                part = rows / len(x)
                parts = [(weight * part, x[:rows], y[:rows]), (weight * (1 - part), x[rows:], y[rows:])]
            opt.zero_grad()
            if opt.needs_second_pass:
                loss = backward(parts[:n], 1 / part)
                with opt.perturbed(scale=None if scaler is None else scaler.get_scale()):
                    opt.zero_grad()
                    backward(parts[:n])
                losses.append(loss + backward(parts[n:]))
            else:
                with opt.perturbed():
                    losses.append(backward(whole))
            if scaler is not None:
                scaler.unscale_(opt)
            if clip is not None:
                clip(model.parameters())
            if scaler is None:
                opt.step()
            else:
                scaler.step(opt)
                scaler.update()
    return losses


def train_scaled(model: nn.Module, opt: SAM, dataset: Dataset, *, k: int, overflows: tuple[int, ...] = ()) -> float:
    """Train in fp16 with a GradScaler, clipping and accumulation, as docs/loops.md does; return the last scale.

    The loss is infinite in the steps of `overflows`, which are counted whether they are taken or not.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    attempt = 0

    def backward() -> None:
        for x, y in window:
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(x), y) * (torch.inf if attempt in overflows else 1)
            scaler.scale(loss / k).backward()

    for _ in range(2):
        batches = list(DataLoader(dataset, batch_size=4))
        for start in range(0, len(batches), k):
            window = batches[start : start + k]
            opt.zero_grad()
            backward()
            with opt.perturbed(scale=scaler.get_scale()):
                opt.zero_grad()
                backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(opt)
            scaler.update()
            attempt += 1
    return scaler.get_scale()


def scale_on_cpu(accelerator: Any) -> torch.amp.GradScaler:
    """Let Accelerate train in fp16 with a GradScaler on the CPU, as it does on a GPU; call before `prepare`."""
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return accelerator.scaler


def shard_on_cpu(accelerator: Any, plugin: Any) -> Any:
    """Let Accelerate shard on the CPU, as it does on GPUs, where it does not ignore the plugin; call before `prepare`."""
    from accelerate.state import DistributedType, PartialState

    accelerator.state.fsdp_plugin = plugin
    for state in accelerator.state, PartialState():  # the latter is copied into the former again and again
        state.distributed_type = DistributedType.FSDP
        state.device = torch.device("cpu")  # not cpu:1, which there is not
    return accelerator


def train_local(
    model: nn.Module, shares: list[Dataset], *, rho: float, k: int, batch: int, epochs: int = 2, limit: float
) -> None:
    """Perturb each replica by the gradient of its own share of the data; step by the mean of the clipped gradients."""
    params, base = list(model.parameters()), torch.optim.SGD(model.parameters(), **BASE)

    def gradient(window: list[Any]) -> list[torch.Tensor]:
        loss = sum(F.cross_entropy(model(x), y) for x, y in window) / len(window)
        return list(torch.autograd.grad(loss, params))

    for _ in range(epochs):
        batches = [list(DataLoader(share, batch_size=batch)) for share in shares]
        for start in range(0, len(batches[0]), k):
            w, seconds = [p.detach().clone() for p in params], []
            for own in batches:
                g = gradient(own[start : start + k])
                norm = sum(t.square().sum() for t in g).sqrt()
                with torch.no_grad():
                    for p, t in zip(params, g, strict=True):
                        p += rho * t / norm
                seconds.append(gradient(own[start : start + k]))
                with torch.no_grad():
                    for p, before in zip(params, w, strict=True):
                        p.copy_(before)
            for p, *of_replicas in zip(params, *seconds, strict=True):
                p.grad = sum(of_replicas) / len(of_replicas)
            nn.utils.clip_grad_norm_(params, limit)
            base.step()


def smooth_network() -> nn.Module:
    """Return a network without BatchNorm: the mean gradient of equal parts is that of the joined batch."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.GroupNorm(2, 6), nn.Tanh(), nn.Linear(6, 3))
    return network.double()


def as_launched(rank: int, world_size: int = 2) -> None:
    """Set what torchrun sets for each of its processes; the process group exists already."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size}
    numbers |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in numbers.items()}, MASTER_ADDR="127.0.0.1")
