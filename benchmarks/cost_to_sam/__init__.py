"""What a budget buys: the gain of each way to train over the base optimizer, as a share of SAM's, against its cost.

Run it in benchmarks/. `train` continues where it was stopped, `measure` times the methods in turn, and `report` writes
results/cost-to-sam/README.md and docs/images/cost-to-sam-*.svg from the files in results/cost-to-sam/:

    python -m cost_to_sam train --data DATA --output ../results
    python -m cost_to_sam measure --data DATA --output ../results/cost-to-sam/times/cpu.json
    python -m cost_to_sam report [--check]

workloads.py has the tasks, methods.py the ways to train, training.py the loop, runs.py what is trained and where it is
written, times.py what a step takes, report/ the page and the picture.
"""
