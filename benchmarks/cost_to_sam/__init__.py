"""What a budget buys: the gain of each way to train over the base optimizer, as a share of SAM's, against its cost.

Run it from the root of the repository; the same command goes on where it was stopped:

    python -m benchmarks.cost_to_sam train --data DATA
    python -m benchmarks.cost_to_sam report

workloads.py has the tasks, methods.py the ways to train, training.py the loop, runs.py what is trained and where it is
written, report.py the table and the picture.
"""
