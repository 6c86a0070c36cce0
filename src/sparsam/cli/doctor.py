"""`sparsam doctor`: what is here, what is missing, how to get it. Needs nothing but the core."""

from __future__ import annotations

import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

OPTIONAL = {
    "typer": ("the command line", "train"),
    "rich": ("tables and progress bars", "train"),
    "sklearn": ("the embedded digits", "train"),
    "PIL": ("image folders", "train"),
    "tensorboard": ("TensorBoard events", "tensorboard"),
}
DISTRIBUTION = {"sklearn": "scikit-learn", "PIL": "pillow"}


def report() -> int:
    """Print what is here; return 0 unless the core is broken."""
    print(f"python        {platform.python_version()} on {platform.platform()}")
    core = [_core("torch"), _core("numpy"), _core("sparsam")]
    if core[0]:
        _devices()
    for module, (purpose, extra) in OPTIONAL.items():
        try:
            import_module(module)
            found = version(DISTRIBUTION.get(module, module))
            print(f"{module:13} {found}")
        except (ImportError, PackageNotFoundError):
            print(f"{module:13} missing: {purpose} need it. pip install 'sparsam[{extra}]'")
    if all(core):
        _step()
        return 0
    print("The core is broken: pip install --force-reinstall sparsam")
    return 1


def _core(module: str) -> bool:
    try:
        print(f"{module:13} {import_module(module).__version__}")
    except Exception as error:  # a broken binary raises anything
        print(f"{module:13} BROKEN: {error}")
        return False
    return True


def _devices() -> None:
    import torch

    if not torch.cuda.is_available():
        print(f"GPU           none; training runs on the CPU with {torch.get_num_threads()} threads")
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        print(
            f"GPU {i}         {properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        )


def _step() -> None:
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
    right = torch.allclose(w.detach(), torch.tensor([2.67, 3.56]))
    print(f"a step        {'gives the right numbers' if right else f'is WRONG: {w.tolist()}'}")
