"""Runs as tasks of a Ray cluster, which finds the places, and starts a task again when its worker dies.

All workers must see the output folder and the data under the same paths. A run's folder holds its checkpoints, so a
task that is started again continues the run.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparsam.errors import UserValueError, need
from sparsam.reproduce.progress import RunsProgress
from sparsam.runs.directory import RunDirectory
from sparsam.training.planned import PlannedRun
from sparsam.training.turns import train_runs

POLL = 1.0  # seconds between two looks at the runs


def train_with_ray(
    planned: Sequence[PlannedRun],
    *,
    device: str | None = None,
    at_once: int = 1,
    address: str | None = None,
    retries: int = 3,
    progress: Callable[[Sequence[PlannedRun]], RunsProgress] = RunsProgress,
) -> list[str]:
    """Train those runs that are not finished, each as a task of its own. Return which failed, and why.

    Args:
        planned: What to train, and where.
        device: "cuda": each task asks for a fraction 1 / `at_once` of a GPU. "cpu": each asks for a core. None: GPUs if
            the cluster has any.
        at_once: How many tasks share a GPU.
        address: Of an existing cluster; None: start one on this machine.
        retries: How often a run is started again after its worker died.
        progress: Shows how far the runs are.
    """
    ray = need("ray", "tasks on a cluster", extra="ray")
    waiting = [run for run in planned if not RunDirectory(run.path).finished]
    if not waiting:
        return []
    own = not ray.is_initialized()
    if own:
        options = {"include_dashboard": False} if address is None else {}
        check_address(address)
        ray.init(address=address or "local", log_to_driver=False, logging_level="error", **options)
    try:
        kind = device or ("cuda" if ray.cluster_resources().get("GPU") else "cpu")
        if kind == "cpu" and at_once > 1:
            raise UserValueError(f"--at-once is for runs that share a GPU, but is {at_once} on CPUs; leave it out")
        needs = {"num_cpus": 1} if kind == "cpu" else {"num_gpus": 1 / at_once, "num_cpus": 0}
        task = ray.remote(max_retries=retries, **needs)(_train)
        running = {task.remote(run._replace(path=run.path.resolve()), kind, at_once > 1): run for run in waiting}
        return _wait(ray, running, progress(waiting))
    finally:
        if own:
            ray.shutdown()


def check_address(address: str | None) -> None:
    """Refuse an address where nothing answers: Ray would try for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise UserValueError(
                f"--address must be that of a Ray cluster, but {address} does not answer ({error}); "
                f"`ray start --head` prints its address"
            ) from error


def _train(run: PlannedRun, device: str, shared: bool) -> None:
    """Train one run, in a worker."""
    if device == "cpu":
        torch.set_num_threads(1)
    train_runs([run], device=torch.device(device), shared=shared)


def _wait(ray: Any, running: dict[Any, PlannedRun], progress: RunsProgress) -> list[str]:
    """Wait for all tasks; return what failed and why."""
    failed = []
    with progress:
        while running:
            done, _ = ray.wait(list(running), timeout=POLL)
            for reference in done:
                run = running.pop(reference)
                try:
                    ray.get(reference)
                except Exception as error:
                    failed.append(f"{run.recipe.name}, seed {run.recipe.train.seed}: {_reason(error)}")
            progress.look()
    return failed


def _reason(error: Exception) -> str:
    """Return the message of what went wrong in a worker, without the traceback there."""
    cause = getattr(error, "cause", None) or error
    return (str(cause).strip() or repr(cause)).splitlines()[-1]
