"""A clock for what a device does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """Takes the time without waiting, where the device can: on CUDA between events, elsewhere by the host's clock.

    Args:
        device: Whose time.
        device_time: On CUDA, let the host run ahead, so that only the device's work counts, as in a captured graph.
    """

    def __init__(self, device: torch.device, device_time: bool = False) -> None:
        self.device, self.device_time = device, device_time

    def prepare(self) -> None:
        """Get ready to measure what comes next."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if self.device_time:
                # In these cycles, some 50 ms, the host launches what is measured.
                torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]

    def now(self) -> Any:
        """Take the time."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            return event
        if self.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds between two times; on CUDA wait for the second."""
        if self.device.type == "cuda":
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000
        return float(end - start)

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds that some work takes."""
        self.prepare()
        start = self.now()
        work()
        return self.between(start, self.now())
