"""The command `sparsam`. Thin: parse, call, show."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; without the packages it needs, say so (and `doctor` works all the same)."""
    try:
        from sparsam.cli.app import run
    except ImportError as error:
        if sys.argv[1:] == ["doctor"]:
            from sparsam.cli.doctor import check_installation

            sys.exit(check_installation())
        sys.exit(f"the sparsam command needs the package {error.name}: pip install 'sparsam[train]'")
    run()
