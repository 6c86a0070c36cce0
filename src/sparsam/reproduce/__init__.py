"""The paper's tables and figures: what to train for each, and how the numbers compare.

`paper.toml` lists the rows, :mod:`.experiments` reads it, :mod:`.plan` makes runs of the rows, `sparsam.training.turns`
or :mod:`.ray_engine` trains them, and :mod:`.comparison` sets the results beside the paper's numbers.
"""
