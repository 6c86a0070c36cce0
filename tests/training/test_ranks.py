"""One run on several processes: the numbers of one process, files of rank 0 alone, errors and interruptions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from digits_runs import CPU, METHODS, TIMES
from killed_runs import assert_same_run, saved_at, wait_for
from ranks import in_ranks
from torch import distributed as dist
from torch import nn

from sparsam.data import Augmentation, Part, ResidentLoader, load_digits
from sparsam.errors import UserValueError
from sparsam.runs.checkpoint import load_checkpoint
from sparsam.runs.directory import RunDirectory
from sparsam.training import launch, load_recipe, train, trainer
from sparsam.training.ranks import Ranks, joined, own_device

available = pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")


@pytest.mark.parametrize("size", [2, 4])
def test_parts_make_up_each_batch_and_each_test_image_is_in_one(size):
    def loader(part: Part) -> ResidentLoader:
        return ResidentLoader(load_digits(), 100, Augmentation(1, False, 0, 1.0), seed=3, device=CPU, part=part)

    parts = [loader(Part(rank, size)) for rank in range(size)]
    whole = loader(Part())
    for (x, y), *own in zip(whole.epoch(1, 9), *(part.epoch(1, 9) for part in parts), strict=True):
        assert torch.equal(x, torch.cat([part for part, _ in own]))
        assert torch.equal(y, torch.cat([labels for _, labels in own]))
    test = torch.cat([x for x, _ in whole.evaluation()])
    evaluated = [torch.cat([x for x, _ in part.evaluation(50)]) for part in parts]
    assert sum(map(len, evaluated)) == len(test) == 597
    for rank, images in enumerate(evaluated):
        assert torch.equal(images, test[rank::size])


def test_a_batch_must_be_divisible():
    message = r"^data.batch_size must be a multiple of the number of processes, 3, but is 100$"
    with pytest.raises(UserValueError, match=message):
        ResidentLoader(load_digits(), 100, Augmentation(), seed=0, device=CPU, part=Part(0, 3))


def test_without_torchrun_a_process_is_alone():
    with joined(lambda: CPU) as device:
        assert device is CPU
        assert Ranks().size == 1
        assert Ranks().first
        assert Ranks().agree(True)


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1000")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1001")
    assert own_device(CPU) is CPU
    with pytest.raises(UserValueError, match=r"^--device must be cpu or cuda under torchrun, .*, but is cuda:1$"):
        own_device(torch.device("cuda", 1))
    with pytest.raises(
        UserValueError, match=r"^--nproc-per-node must be at most the number of GPUs, \d+, but is 1001; "
    ):
        own_device(torch.device("cuda"))


# ------------------------------------------------------------------------------------------- against one process


def without_batchnorm(*arguments) -> nn.Module:
    """Build a recipe's network in float64 with GroupNorm, whose samples do not see each other."""
    model = trainer_network(*arguments)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(4, child.num_features))
    model.register_forward_pre_hook(lambda _, inputs: inputs[0].double())
    return model.double()


trainer_network = trainer.build_network


def train_method(method: str, path: str | Path) -> None:
    recipe, settings = METHODS[method]
    trainer.build_network = without_batchnorm
    try:
        train(load_recipe(recipe, ["train.epochs=2", "train.refresh_batchnorm=2", *settings]), path, device=CPU)
    finally:
        trainer.build_network = trainer_network


def train_methods(rank: int, folder: str) -> None:
    for method in METHODS:
        train_method(method, Path(folder) / method)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    folder = tmp_path_factory.mktemp("together")
    in_ranks(train_methods, str(folder))
    return folder


@available
@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in METHODS if method != "share"])  # a process has its own share
def test_two_processes_train_what_one_does(together, tmp_path, method):
    train_method(method, tmp_path / "one")
    one, two = RunDirectory(tmp_path / "one"), RunDirectory(together / method)
    assert two.read("environment.json").values["processes"] == 2
    for alone, shared in zip(one.metrics(), two.metrics(), strict=True):
        assert alone.keys() == shared.keys()
        for key in alone.keys() - TIMES:
            assert shared[key] == (alone[key] if alone[key] is None else pytest.approx(alone[key], rel=1e-6)), (
                key
            )  # sums in float32
    weights = [load_checkpoint(run.last, CPU)["model"] for run in (one, two)]
    for name, w in weights[0].items():
        torch.testing.assert_close(weights[1][name], w, rtol=1e-9, atol=1e-9)


# -------------------------------------------------------------------------------------------------- dropout


class Dropping(nn.Module):
    """A recipe's network behind dropout of its input, which notes what was dropped."""

    def __init__(self, *arguments) -> None:
        super().__init__()
        self.dropout, self.network = nn.Dropout(0.5), trainer_network(*arguments)
        self.start = [p.detach().clone() for p in self.network.parameters()]

    def forward(self, x):
        if self.training:
            dropped.append(self.dropout(torch.ones(8)) == 0)
        return self.network(self.dropout(x))


dropped: list[torch.Tensor] = []


def train_with_dropout(rank: int, folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train a run, and one that dies in step 16 and goes on; return the start, and what each pass has dropped."""
    settings = ["train.epochs=2", "train.deterministic=true", "train.checkpoint_steps=1"]
    recipe = load_recipe("digits-sam", settings)
    trainer.build_network = Dropping
    run = launch.new_run(recipe, Path(folder) / "whole", device=CPU)
    run.run()
    drawn = list(dropped)
    steps = launch.new_run(recipe, Path(folder) / "died", device=CPU).steps()
    for _ in range(16):
        next(steps)
    steps.close()
    torch.manual_seed(99)
    launch.old_run(Path(folder) / "died", device=CPU).run()
    return run.model.start, drawn


@available
@pytest.mark.slow
def test_each_rank_draws_its_own_dropout_and_resumes_bit_for_bit(tmp_path):
    (start, drawn), (other_start, other) = in_ranks(train_with_dropout, str(tmp_path))
    assert len(drawn) == len(other) == 2 * 24  # both passes of each step
    for mine, others in ((drawn, other), (other, drawn)):
        steps = [tuple(d.tolist()) for d in mine[::2]]
        assert steps == [tuple(d.tolist()) for d in mine[1::2]]
        assert len(set(steps) - {tuple(d.tolist()) for d in others}) > 12  # of 24, and of 256 that there are
    assert all(map(torch.equal, start, other_start))
    whole, died = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "died")
    assert_same_run(whole, died)
    states = load_checkpoint(whole.last, CPU)["rng"]["cpu"]
    assert len(states) == 2
    assert not torch.equal(*states)


def test_a_run_of_one_process_goes_on_where_more_are(tmp_path):
    """A checkpoint without a rank's random numbers leaves those that the rank starts with."""
    recipe = load_recipe("digits-sgd", ["train.epochs=1"])
    one = trainer.Trainer(recipe, RunDirectory(tmp_path / "one"), device=CPU)
    one.save(tmp_path / "last.pt")
    other = trainer.Trainer(recipe, RunDirectory(tmp_path / "other"), device=CPU)
    drawn = torch.rand(3)
    other.load(tmp_path / "last.pt")
    assert torch.equal(torch.rand(3), drawn)
    before = torch.get_rng_state()
    other.ranks.rank = 1
    other.load(tmp_path / "last.pt")
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------- torchrun

SHORT = ("--set", "train.epochs=3", "--set", "train.deterministic=true", "--set", "train.checkpoint_steps=5")


def torchrun(*arguments, program=("-m", "sparsam")):
    """Start two processes of the command."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*launcher, *program, "train", "--device", "cpu", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process) -> str:
    return process.communicate(timeout=200)[0]


def workers(process) -> list[int]:
    """Return the processes that torchrun has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupts, and what it printed."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    output = finish(torchrun("digits-ssam-c", *SHORT, "-o", path))
    return RunDirectory(path), output


@available
@pytest.mark.slow
def test_rank_zero_alone_speaks_and_writes(whole):
    run, output = whole
    assert run.finished
    lines = [line for line in output.splitlines() if line.startswith("{")]
    assert len(lines) == 3  # one an epoch
    assert output.count("of the test images are classified correctly") == 1
    assert sorted(p.name for p in run.path.iterdir()) == [
        "checkpoints",
        "environment.json",
        "metrics.jsonl",
        "recipe.json",
        "summary.json",
    ]


@available
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("how", ["SIGTERM to torchrun", "SIGTERM to rank 1", "SIGKILL of rank 1"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(whole, tmp_path, how):
    run = RunDirectory(tmp_path / "run")
    process = torchrun("digits-ssam-c", *SHORT, "-o", run.path)
    wait_for(lambda: saved_at(run, 1, 5))
    target = process.pid if how.endswith("torchrun") else workers(process)[1]
    os.kill(target, signal.SIGKILL if how.startswith("SIGKILL") else signal.SIGTERM)
    output = finish(process)
    assert process.returncode != 0
    assert not run.finished, output
    if how.startswith("SIGTERM"):
        assert output.count("continue with: torchrun --nproc-per-node 2 -m sparsam train --resume") == 1
    output = finish(torchrun("--resume", run.path))
    assert run.finished, output
    assert_same_run(run, whole[0])
    assert len(run.read("environment.json").values["resumed"]) == 1


FAILING = """
import os
from sparsam.cli import main
from sparsam.errors import UserRuntimeError
from sparsam.training.step import TrainingStep

step, steps = TrainingStep.__call__, iter(range(100))

def fail(self, x, y):
    if os.environ["RANK"] == "1" and next(steps) == 3:
        raise UserRuntimeError("the images of rank 1 are lost")
    return step(self, x, y)

TrainingStep.__call__ = fail
main()
"""


@available
@pytest.mark.slow
def test_an_error_on_one_rank_ends_all_with_its_message(tmp_path):
    program = tmp_path / "failing.py"
    program.write_text(FAILING)
    start = time.monotonic()
    process = torchrun("digits-sam", *SHORT, "-o", tmp_path / "run", program=(str(program),))
    output = finish(process)
    assert process.returncode != 0
    assert output.count("error: the images of rank 1 are lost") == 1
    assert "Connection closed" not in output
    assert time.monotonic() - start < 60
    assert not (tmp_path / "run" / ".lock").exists()


@available
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits-none"], "there is no recipe named 'digits-none'"),
        (
            ["digits-sam", "--set", "data.batch_size=99"],
            "data.batch_size must be a multiple of the number of processes, 2",
        ),
    ],
)
def test_an_error_on_all_ranks_is_shown_once(tmp_path, arguments, message):
    output = finish(torchrun(*arguments, "-o", tmp_path / "run"))
    assert output.count(f"error: {message}") == 1
    assert not (tmp_path / "run").exists()


def wishes(rank: int) -> list[bool]:
    ranks = Ranks()
    return [ranks.agree(step == 3 and rank == 1) for step in range(6)]


@available
@pytest.mark.slow
def test_all_learn_of_a_wish_at_the_same_call():
    one, other = in_ranks(wishes)
    assert one == other == [False, False, False, False, True, False]
