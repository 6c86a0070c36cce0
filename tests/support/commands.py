"""The command `sparsam` for tests: in a process of its own, as a user types it, or in this one, which is faster."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

ROOT = Path(__file__).parents[2]


def sparsam(*arguments, code=0, cwd=ROOT, width=120):
    """Run a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "sparsam", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": str(width)},
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def invoke(*arguments, code=0, cwd=ROOT, width=120):
    """Run a command in this process, where torch is imported already."""
    import rich

    from sparsam.cli import main

    out, err, returned = StringIO(), StringIO(), 0
    with (
        patch.object(sys, "argv", ["sparsam", *map(str, arguments)]),
        patch.dict(os.environ, COLUMNS=str(width)),
        chdir(cwd),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        rich.reconfigure()  # as wide as it is now
        try:
            main()
        except SystemExit as stop:
            returned = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            if isinstance(stop.code, str):
                print(stop.code, file=err)
    assert returned == code, out.getvalue() + err.getvalue()
    return SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue(), returncode=returned)
