"""Only one process at a time trains a run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from digits_runs import CPU, recipe

from sparsam.runs.directory import RunDirectory
from sparsam.runs.files import RunError
from sparsam.training.launch import new_run, old_run

HOLD = """
import sys
from sparsam.runs.directory import RunDirectory
directory = RunDirectory(sys.argv[1])
directory.lock()
print("locked", flush=True)
sys.stdin.read()
"""


def test_another_process_is_refused_until_the_first_is_gone(tmp_path):
    new_run(recipe(), tmp_path, device=CPU).directory.unlock()
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*") if file.is_file() and file.name != ".lock"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], **pipes) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(RunError, match="is being trained by another process; wait for it or stop it"):
            old_run(tmp_path, device=CPU)
        assert {
            file: file.read_bytes() for file in tmp_path.rglob("*.*") if file.is_file() and file.name != ".lock"
        } == before
        other.kill()
    old_run(tmp_path, device=CPU).run()
    assert RunDirectory(tmp_path).finished
    RunDirectory(tmp_path).lock()  # a run that is finished is free
