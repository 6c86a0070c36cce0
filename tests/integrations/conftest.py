"""These tests import large libraries: `make test` leaves them out before it imports them."""

from __future__ import annotations


def pytest_ignore_collect(collection_path, config):
    slow = collection_path.suffix == ".py" and collection_path.name not in ("conftest.py", "test_run_passes.py")
    return True if slow and config.getoption("markexpr") == "not slow" else None
