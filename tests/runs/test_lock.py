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


TAKE_AND_RELEASE = """
import sys, time
from sparsam.runs.directory import RunDirectory
from sparsam.runs.lock import Locked
directory, taken = RunDirectory(sys.argv[1]), 0
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + 2
while time.monotonic() < end:
    try:
        directory.lock()
        taken += 1
        directory.unlock()
    except Locked:
        pass
print(taken)
"""


@pytest.mark.slow
def test_processes_that_take_and_release_a_lock_do_not_disturb_each_other(tmp_path):
    """The folder comes and goes with the lock."""
    arguments = [sys.executable, "-c", TAKE_AND_RELEASE, str(tmp_path / "run")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(arguments, **pipes) for _ in range(3)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for taken, errors in [process.communicate() for process in processes]:
        assert errors == ""
        assert int(taken) > 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["file", "nowhere", "file/run", "nowhere/run"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, place):
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    with pytest.raises(RunError, match=rf"{place} cannot be written: "):
        RunDirectory(tmp_path / place).lock()


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
