"""`sparsam doctor`: what is here, what is missing, how to get it. Needs nothing but the core."""

from __future__ import annotations

import platform
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

OPTIONAL = {
    "typer": ("the command line", "'sparsam[train]'"),
    "rich": ("tables and progress bars", "'sparsam[train]'"),
    "sklearn": ("the embedded digits", "'sparsam[train]'"),
    "PIL": ("image folders", "'sparsam[train]'"),
    "matplotlib": ("figures", "'sparsam[analysis]'"),
    "tensorboard": ("TensorBoard events", "'sparsam[tensorboard]'"),
    "ray": ("runs on a cluster", "'sparsam[ray]'"),
    "lightning": ("SAMModule and SAMMonitor", "'sparsam[lightning]'"),
    "transformers": ("SAMTrainer and its examples", "'sparsam[hf]'"),
    "accelerate": ("SAMTrainer and its examples", "'sparsam[hf]'"),
    "timm": ("models named timm:NAME", "timm"),
    "torchvision": ("models named torchvision:NAME", "torchvision"),
}
SLOW = {"ray", "lightning", "transformers", "accelerate"}  # to import, so they are only looked for
DISTRIBUTION = {"sklearn": "scikit-learn", "PIL": "pillow"}


def doctor() -> None:
    """Say what is installed, what is missing and how to get it."""
    sys.exit(check_installation())


def check_installation() -> int:
    """Print what is here; return 0 unless the core is broken."""
    import numpy
    import torch

    import sparsam

    print(f"python        {platform.python_version()} on {platform.platform()}")
    for module in (torch, numpy, sparsam):
        print(f"{module.__name__:13} {module.__version__}")
    _devices()
    for name, (purpose, remedy) in OPTIONAL.items():
        try:
            if name not in SLOW:
                import_module(name)
            print(f"{name:13} {version(DISTRIBUTION.get(name, name))}")
        except (ImportError, PackageNotFoundError):
            print(f"{name:13} not installed, needed only for {purpose}: pip install {remedy}")
    right = _step()
    print(f"a step        {'gives the right numbers' if right else 'gives WRONG numbers: the installation is broken'}")
    return 0 if right else 1


def _devices() -> None:
    import torch

    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        print(f"GPU           none; training runs on the CPU with {threads} thread{'' if threads == 1 else 's'}")
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        print(
            f"GPU {i}         {properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        )


def _step() -> bool:
    """Take one step with a known result: w - 0.1 (w + 0.5 w / |w|)."""
    import torch

    from sparsam import SAM

    w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    opt = SAM([w], torch.optim.SGD, rho=0.5, lr=0.1)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = w.square().sum() / 2
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    opt.step(closure)
    return torch.allclose(w.detach(), torch.tensor([2.67, 3.56]))
