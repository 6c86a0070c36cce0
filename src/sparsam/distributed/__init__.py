"""Processes that train one model together."""

from sparsam.distributed.replicas import Replicas

__all__ = ["Replicas"]
