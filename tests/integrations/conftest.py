"""These tests import large libraries: `make test` leaves them out before it imports them."""

from __future__ import annotations


def pytest_ignore_collect(collection_path, config):
    slow = collection_path.name in ("test_lightning.py", "test_huggingface.py", "test_accelerate.py")
    return True if slow and config.getoption("markexpr") == "not slow" else None
