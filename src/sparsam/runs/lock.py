"""One process at a time writes a run."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from sparsam.runs.files import RunError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
TRIES = 100  # to make a folder that other processes delete


class Locked(RunError):
    """Another process trains a run."""

    def __init__(self, run: str) -> None:
        super().__init__(f"{run} is being trained by another process; wait for it or stop it")


class Lock:
    """A file that this process has locked; the lock ends with the process, and its children do not have it.

    Args:
        folder: Where the file is. It is created.

    Raises:
        Locked: Another process holds the lock.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        tries = 0
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                tries += 1
                if tries < TRIES and isinstance(error, (FileNotFoundError, FileExistsError)):
                    continue  # another process has released its lock just now, and deleted the folder
                raise RunError(f"{folder} cannot be written: {error}") from error
            try:
                if fcntl is not None:
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                os.close(self._file)
                raise Locked(str(folder)) from error
            except OSError:  # a file system without locks
                return
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file), self._path.stat()):
                    return
            os.close(self._file)  # its former holder has deleted it

    def release(self) -> None:
        """Delete the file and give the lock up; the folder stays only if there is something in it."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)
        with suppress(OSError):
            self._path.parent.rmdir()
