"""What a budget buys: the gain of each way to train over the base optimizer, as a share of SAM's, against its cost.

Run it in benchmarks/. `train` continues where it was stopped, and `report` writes results/cost-to-sam/README.md and
docs/images/cost-to-sam-*.svg from the runs in results/cost-to-sam/:

    PYTHONPATH=. python -m cost_to_sam train --data DATA --output ../results
    PYTHONPATH=. python -m cost_to_sam report [--check]

workloads.py has the tasks, methods.py the ways to train, training.py the loop, runs.py what is trained and where it is
written, report/ the page and the picture.
"""
