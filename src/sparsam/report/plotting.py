"""How figures are made and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsam.errors import need

FORMATS = ("png", "svg")


def new_figure(width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """Return a figure and its axes. The size is in inches, options are those of matplotlib's subplots."""
    need("matplotlib", "figures", extra="analysis").use("Agg")  # draws into files, needs no screen
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained", **options)


def save_figure(figure: Any, path: Path) -> list[Path]:
    """Write a figure as PNG and SVG. Return both files."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(f"{path.name}.{suffix}") for suffix in FORMATS]
    for file in files:
        figure.savefig(file, dpi=160)
    pyplot.close(figure)
    return files
