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

    A loader that is done is kept for the next call. While it is in use, a call gets a new one, so that iterations do
    not disturb each other.
    """

    def __init__(self, decoder: Decoder, count: int, *, pin_memory: bool) -> None:
        self.decoder, self.count, self.pin_memory = decoder, count, pin_memory
        self.loaders: dict[_Requests, DataLoader[Any]] = {}
        self.idle: list[_Requests] = []
        # Cyclic garbage collection takes a DataLoader's queues apart before the workers are told to end, and then waits
        # 5 seconds for each of them. This reference lets go of the loaders before.
        weakref.finalize(self, self.loaders.clear)

    def __call__(self, requests: Iterable[Request]) -> Iterator[Decoded | ImageFolderError]:
        """Yield the answer to each request, in order."""
        queue = self.idle.pop() if self.idle else self._start()
        queue.requests = requests
        try:
            yield from self.loaders[queue]
        except GeneratorExit:  # an iteration that is broken off is as good as one that ended
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
            generator=torch.Generator(),  # a DataLoader draws a seed: not from the random numbers of the training
            persistent_workers=self.count > 0,
        )
        return queue


class _Requests:
    """What a DataLoader takes for its sampler."""

    requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


def _as_it_is(answer: Any) -> Any:
    return answer


def _leave_interrupts(worker: int) -> None:
    """Ignore Ctrl-C, which reaches all processes: the main one decides, and may need more batches until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
