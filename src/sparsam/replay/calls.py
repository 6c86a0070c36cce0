"""Standing between a module and its caller, for the length of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Call = Callable[..., Any]
Interceptor = Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]
"""Called as `interceptor(call, args, kwargs)` in place of `call(*args, **kwargs)`."""

_PLACE = "_compiled_call_impl"  # what nn.Module.__call__ runs, where it is set, in place of hooks and forward


@contextmanager
def intercepted(interceptors: Mapping[nn.Module, Interceptor]) -> Iterator[None]:
    """Let calls of the modules go through their interceptors inside the block.

    What an interceptor is handed as `call` is the whole call: hooks, `forward`, and a module's compiled version where
    it has one. Code that torch.compile traces sees no interceptor. After the block the modules are as they were.
    """
    before = [(module, module.__dict__.get(_PLACE)) for module in interceptors]
    try:
        for module, interceptor in interceptors.items():
            module.__dict__[_PLACE] = _between(interceptor, module.__dict__.get(_PLACE) or module._call_impl)
        yield
    finally:
        for module, value in before:
            if value is None:
                module.__dict__.pop(_PLACE, None)
            else:
                module.__dict__[_PLACE] = value


def _between(interceptor: Interceptor, call: Call) -> Call:
    def through(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return call(*args, **kwargs)
        return interceptor(call, args, kwargs)

    return through
