"""Worker processes that decode batches ahead of their use."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from sparsam.data.decoding import Decoded, Decoder, Request
from sparsam.data.image_files import ImageFolderError


class Workers:
    """Decodes batches ahead of their use, in processes that live on between epochs.

    A DataLoader that has ended is kept for the next call. A call while it is in use gets a new one, so that iterations
    do not disturb each other.
    """

    def __init__(self, decoder: Decoder, count: int, *, pin_memory: bool) -> None:
        self.decoder, self.count, self.pin_memory = decoder, count, pin_memory
        self.loaders: dict[_Requests, DataLoader[Any]] = {}
        self.idle: list[_Requests] = []
        # Cyclic garbage collection destroys the queues of a DataLoader before its workers are asked to end. It then
        # waits 5 seconds for each of them. This finalizer drops the loaders before that.
        weakref.finalize(self, self.loaders.clear)

    def __call__(self, requests: Iterable[Request]) -> Iterator[Decoded | ImageFolderError]:
        """Yield the answer to each request, in order."""
        queue = self.idle.pop() if self.idle else self._start()
        queue.requests = requests
        try:
            yield from self.loaders[queue]
        except GeneratorExit:  # an iteration that was broken off: the loader can be used again
            self.idle.append(queue)
            raise
        except BaseException:
            self.loaders.pop(queue, None)
            raise
        self.idle.append(queue)

    def _start(self) -> _Requests:
        queue = _Requests()
        self.loaders[queue] = DataLoader(
            self.decoder,
            batch_size=None,  # a request is a whole batch
            sampler=queue,
            num_workers=self.count,
            collate_fn=_as_it_is,
            pin_memory=self.pin_memory,
            worker_init_fn=_leave_interrupts,
            generator=torch.Generator(),  # a DataLoader draws a seed, but not from torch's global generator
            persistent_workers=self.count > 0,
        )
        return queue


class _Requests:
    """The sampler of a DataLoader: it yields requests."""

    requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


def _as_it_is(answer: Any) -> Any:
    return answer


def _leave_interrupts(worker: int) -> None:
    """Ignore Ctrl-C, which reaches all processes. The main process decides, and may need more batches."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
