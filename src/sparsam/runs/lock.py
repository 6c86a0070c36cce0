"""One process at a time trains a run."""

from __future__ import annotations

import os
from pathlib import Path

from sparsam.runs.files import RunError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def lock_file(path: Path) -> int:
    """Lock a file for this process; closing what is returned (:func:`os.close`), or the end of the process, unlocks it.

    Raises:
        RunError: Another process holds the lock.
    """
    file = os.open(path, os.O_RDWR)
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise RunError(f"{path.parent} is being trained by another process; wait for it or stop it") from error
        except OSError:  # a file system without locks
            pass
    return file
