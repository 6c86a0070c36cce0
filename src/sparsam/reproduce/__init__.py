"""The paper's tables and figures: what to train for each, and how the numbers compare.

`paper.toml` lists the rows, :mod:`.experiments` reads it, :mod:`.plan` makes runs of the rows, :mod:`.engines` trains
them, and :mod:`.comparison` sets the results beside the paper's numbers.
"""
