"""The example scripts run as a user runs them, learn, and say what is true."""

import difflib
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ranks import in_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from sparsam import RandomMask

EXAMPLES = Path(__file__).parents[1] / "examples"
CHANGED_LINES = {  # between a script and its twin with sparsam, indentation and blank lines aside
    ("train_plain.py", "train_sparsam.py"): 8,
    ("train_plain.py", "thrifty.py"): 8,
    ("train_plain.py", "share.py"): 7,
    ("train_lightning.py", "train_lightning_sparsam.py"): 7,
    ("train_hf.py", "train_hf_sparsam.py"): 6,
    ("train_accelerate.py", "train_accelerate_sparsam.py"): 19,
    ("train_ddp.py", "train_ddp_sparsam.py"): 9,
    ("train_fsdp.py", "train_fsdp_sparsam.py"): 13,
}


def run(script, *arguments, code=0):
    """Return what the script prints. A warning fails it: an example must not need one."""
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / script, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # other tests run beside this one
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


# Seeds 0 to 4 give 98.6 to 99.6 % with each script; chance gives 10 %.
@pytest.mark.parametrize(
    "script", [pytest.param("train_plain.py", marks=pytest.mark.slow), "train_sparsam.py", "thrifty.py", "share.py"]
)
def test_training_script_learns_the_digits(script):
    lines = run(script).splitlines()
    if script == "thrifty.py":
        assert re.fullmatch(
            r"from \d+ on, .* of the weights, in the last .* of 525 steps: 1\.15 base steps", lines.pop(0)
        )
    accuracies = [float(re.search(r"test accuracy (\d+\.\d) %$", line)[1]) for line in lines]
    assert [line.split()[:2] for line in lines[:-1]] == [["epoch", str(n)] for n in (5, 10, 15, 20, 25)]
    assert accuracies[-1] == accuracies[-2] >= 98.0


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_sparsam.py", "thrifty.py", "share.py"])
def test_training_script_repeats_itself_for_a_seed(script):
    first, again = (run(script, "--epochs", "5", "--seed", "3") for _ in range(2))
    assert first == again


@pytest.mark.parametrize(("one", "other"), CHANGED_LINES, ids=lambda name: name)
def test_training_scripts_differ_in_a_handful_of_lines(one, other):
    plain, sparse = (
        [line.strip() for line in (EXAMPLES / name).read_text().splitlines() if line.strip()] for name in (one, other)
    )
    changes = difflib.SequenceMatcher(a=plain, b=sparse, autojunk=False).get_opcodes()
    changed = sum(max(a2 - a1, b2 - b1) for kind, a1, a2, b1, b2 in changes if kind != "equal")
    assert 0 < changed <= CHANGED_LINES[one, other]


def distributed(test):
    """Mark a test of several processes."""
    needs = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
    return pytest.mark.slow(needs(test))


def torchrun(script, *arguments):
    """Return what two processes of the script print. A warning fails them."""
    launcher = [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    command = [*launcher, str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Seeds 0 to 4 give 98.8 to 99.4 % with DDP, seed 0 gives 99.2 and 99.6 % with FSDP.
@distributed
@pytest.mark.parametrize("script", ["train_ddp.py", "train_ddp_sparsam.py", "train_fsdp.py", "train_fsdp_sparsam.py"])
def test_distributed_script_learns_the_digits(script):
    (accuracy,) = re.findall(r"^test accuracy (\d+\.\d) %$", torchrun(script), re.MULTILINE)  # of one rank
    assert float(accuracy) >= 98.0


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Return what an epoch of an FSDP script has saved, as one process reads it: weights and momenta by name."""
    import torch.distributed.checkpoint as dcp

    def saved(script, *arguments):
        folder = tmp_path_factory.mktemp("checkpoint")
        torchrun(script, "--epochs", 1, "--save", folder, *arguments)
        content = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in content.items()
            if name.startswith("model.") or name.endswith("momentum_buffer")
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is: this is one process
            dcp.load(tensors, checkpoint_id=folder, no_dist=True)
        return tensors

    return saved


@distributed
def test_the_fsdp_scripts_are_the_same_without_a_perturbation(sharded):
    plain, sparse = sharded("train_fsdp.py"), sharded("train_fsdp_sparsam.py", "--rho", 0)
    weights = [name for name in plain if name.startswith("model.")]
    assert len(plain) > len(weights) > 0
    assert all(torch.equal(plain[name], sparse[name]) for name in weights)


def train_replicas(rank, rho):
    """Train an epoch as the FSDP scripts do, in a DDP and with SAM written out; return the weights."""
    sys.path.insert(0, str(EXAMPLES))
    from train_plain import digits, network

    torch.manual_seed(0)
    train_set, _ = digits(train=1297, seed=0)
    sampler = DistributedSampler(train_set, seed=0)
    model = DistributedDataParallel(network())
    torch.manual_seed(rank)
    params = [*model.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=5e-4)
    mask = RandomMask(0.5).select(params, 0, None)
    for x, y in DataLoader(train_set, batch_size=32, sampler=sampler):
        drawn = torch.get_rng_state()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        after = torch.get_rng_state()
        w = [p.detach().clone() for p in params]
        norm = torch.cat([p.grad.flatten() for p in params]).norm()
        with torch.no_grad():
            for p, m in zip(params, mask, strict=True):
                p += rho * p.grad / norm * m
        torch.set_rng_state(drawn)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        torch.set_rng_state(after)
        with torch.no_grad():
            for p, old in zip(params, w, strict=True):
                p.copy_(old)
        optimizer.step()
    return {f"model.{name}": p.detach() for name, p in model.module.named_parameters()}


@distributed
@pytest.mark.parametrize(("script", "rho"), [("train_fsdp.py", 0.0), ("train_fsdp_sparsam.py", 0.1)])
def test_the_fsdp_scripts_train_what_replicas_do(sharded, script, rho):
    saved, (expected, _) = sharded(script), in_ranks(train_replicas, rho)
    for name, w in expected.items():
        torch.testing.assert_close(saved[name], w, rtol=1e-4, atol=1e-4)
