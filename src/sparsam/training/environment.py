"""What a run ran on."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sparsam import __version__
from sparsam.distributed.groups import group_size
from sparsam.errors import warn
from sparsam.runs.directory import RunDirectory

PACKAGE = Path(__file__).parents[1]


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return versions, hardware and the git commit of sparsam."""
    return {
        "sparsam": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device_name(device),
        "processor": processor(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "processes": group_size(None),
        "git": git_commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def measured_with(device: torch.device) -> dict[str, str | None]:
    """Return what a time is measured with. Take it before anything is written: that may change a file of a commit."""
    return {"device": device_name(device), "torch": str(torch.__version__), "git": git_commit()}


def warn_if_moved(directory: RunDirectory, device: torch.device) -> None:
    """Warn if a run goes on with another number of processes, or on another kind of device, than it began with."""
    if not (directory.path / "environment.json").is_file():
        return
    begun, here = directory.read("environment.json").values, describe_environment(device)
    moved = [
        f"{key}: {begun[key]} at its start, {here[key]} now"
        for key in ("processes", "device")
        if key in begun and begun[key] != here[key]
    ]
    if moved:
        warn(f"{directory.path} will not end with the numbers of an uninterrupted run: {'; '.join(moved)}")


def device_name(device: torch.device) -> str:
    """Return what a device is called: the GPU's name, or its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def default_device() -> torch.device:
    """Return a GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def processor() -> str:
    """Return the name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_commit() -> str | None:
    """Return the commit of the checkout that sparsam runs from, with a + if there are changes; None if it is installed.

    Files that git does not know count as changes if they are part of the package.
    """
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")  # else it is installed, inside some checkout
        commit = _git("rev-parse", "--short=12", "HEAD")
        changes = _git("status", "--porcelain", "--untracked-files=no") or _git("status", "--porcelain", ".")
        return commit + ("+" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=PACKAGE, check=True, capture_output=True, text=True).stdout.strip()
