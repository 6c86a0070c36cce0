"""`python -m sparsam` is `sparsam`."""

from sparsam.cli import main

main()
