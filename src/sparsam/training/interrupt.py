"""Stopping a run between two steps."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(Exception):
    """The run was asked to stop, and has saved where it was."""


@contextmanager
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
