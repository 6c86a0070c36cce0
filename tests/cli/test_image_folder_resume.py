"""The ImageNet recipe on real JPEGs, killed in mid-epoch and continued: weights, metrics, and which files are read."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from itertools import chain

import pytest
from digits_runs import last_checkpoint
from image_folders import REAL, real_images
from killed_runs import assert_same_run, finish, saved_at, start, wait_for

from sparsam.runs.directory import RunDirectory

BATCH, STEPS, EPOCHS = 32, 10, 2
SETTINGS = [
    "model.name=resnet-small",
    "model.stem=cifar",
    f"data.root={REAL}",
    "data.image_size=32",
    "data.resize=36",
    f"data.batch_size={BATCH}",
    f"data.limit={STEPS * BATCH + 7}",  # 7 images are left out, others in each epoch
    f"train.epochs={EPOCHS}",
    "train.checkpoint_steps=2",
    "train.deterministic=true",
]

# Python runs a module of this name when it starts. Workers inherit the hook, which sees every file that is opened.
NOTE_READS = """
import os, sys
log = os.open(os.environ["READS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def note(event, arguments):
    if event == "open" and "/train/" in (path := str(arguments[0])):
        os.write(log, f"{os.getpid()} {path}\\n".encode())
sys.addaudithook(note)
"""


class Reads:
    """The training images that a command reads, noted by Python itself."""

    def __init__(self, folder):
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(NOTE_READS)
        self.log = folder / "reads.txt"
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {"PYTHONPATH": os.pathsep.join(paths), "READS": str(self.log)}

    def batches(self):
        """Return a list for each process that read images: whole batches, in the order in which it read them."""
        reads = defaultdict(list)
        for line in self.log.read_text().splitlines():
            process, _, path = line.partition(" ")
            reads[process].append(path)
        return [
            [tuple(paths[i : i + BATCH]) for i in range(0, len(paths) - BATCH + 1, BATCH)] for paths in reads.values()
        ]


def start_run(path, workers, reads):
    settings = [part for s in (*SETTINGS, f"data.workers={workers}") for part in ("--set", s)]
    return start("imagenet-resnet50-sam", "--output", path, *settings, **reads.environment)


@real_images
@pytest.mark.slow
def test_kill_9_in_mid_epoch_and_resume_is_bit_exact(tmp_path):
    whole, killed = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "killed")
    all_reads, first_reads, other_reads = (Reads(tmp_path / name) for name in ("all", "first", "others"))

    finish(start_run(whole.path, 0, all_reads))
    [batches] = all_reads.batches()  # without workers one process reads all of them, in order
    assert len(batches) == EPOCHS * STEPS
    for epoch in range(EPOCHS):
        read = [path for batch in batches[epoch * STEPS : (epoch + 1) * STEPS] for path in batch]
        assert len(set(read)) == STEPS * BATCH  # none twice
    assert len({path for batch in batches for path in batch}) == STEPS * BATCH + 7

    process = start_run(killed.path, 2, first_reads)
    wait_for(lambda: saved_at(killed, epoch=1, batch=2))
    process.kill()
    finish(process, code=-signal.SIGKILL)  # the workers end too, though nobody tells them
    saved = last_checkpoint(killed.path)
    assert saved["epoch"] == 1
    assert 2 <= saved["batch"] < STEPS
    step = STEPS + saved["batch"]
    for worker in first_reads.batches():
        assert is_ascending([batches.index(batch) for batch in worker])

    finish(start("--resume", killed.path, **other_reads.environment))
    workers = [[batches.index(batch) for batch in worker] for worker in other_reads.batches()]
    assert len(workers) == 2
    assert all(map(is_ascending, workers))
    assert sorted(chain(*workers)) == list(range(step, EPOCHS * STEPS))  # all that was left to read, each once
    assert_same_run(whole, killed)


def is_ascending(numbers):
    return numbers == sorted(set(numbers))
