"""Worker processes: they change nothing, disturb nothing and end with their loader."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time

import pytest
import torch
from image_folders import equal, loader

from sparsam.data.image_folder import FolderLoader


def test_workers_change_nothing(shared_root):
    alone, together = loader(shared_root), loader(shared_root, workers=2)
    for epoch in range(2):  # the second with the workers of the first
        assert equal(list(alone.epoch(epoch)), list(together.epoch(epoch)))
        assert equal(list(alone.evaluation(2)), list(together.evaluation(2)))
    assert len(together.workers.idle) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_iterations_do_not_disturb_each_other(shared_root, workers):
    loading = loader(shared_root, workers=workers)
    apart = list(loading.epoch(0)), list(loading.epoch(1)), list(loading.evaluation(2))
    together = list(zip(loading.epoch(0), loading.epoch(1), loading.evaluation(2), strict=True))
    assert all(equal(one, other) for one, other in zip(apart, zip(*together, strict=True), strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_torchs_random_numbers_are_left_alone(shared_root, workers):
    before = torch.get_rng_state()
    loading = loader(shared_root, workers=workers)
    list(loading.epoch(0))
    list(loading.evaluation())
    loading.samples()[0]
    assert torch.get_rng_state().equal(before)


def started_by(loading: FolderLoader) -> set[multiprocessing.Process]:
    """Return the workers of a loader, which has to begin an epoch for it."""
    gc.collect()  # ends the workers of other tests
    before = set(multiprocessing.active_children())
    list(loading.epoch(0))
    return set(multiprocessing.active_children()) - before


def test_workers_end_at_once_with_a_loader_in_a_cycle(shared_root):
    loading = loader(shared_root, workers=2)
    workers = started_by(loading)
    assert len(workers) == 2
    loading.itself = loading
    started = time.monotonic()
    del loading
    gc.collect()
    assert time.monotonic() - started < 4  # torch gives a worker that was not told to end 5 seconds
    assert not any(worker.is_alive() for worker in workers)


def test_workers_leave_interrupts_to_the_main_process(shared_root):
    loading = loader(shared_root, workers=1)
    [worker] = started_by(loading)
    os.kill(worker.pid, signal.SIGINT)
    assert equal(list(loading.epoch(1)), list(loader(shared_root).epoch(1)))
    assert worker.is_alive()
