"""The blocks of docs/integrations.md run, each with the real library."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from plain_loops import as_launched, smooth_network
from ranks import in_ranks
from sharded import whole
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from cases import task
from sparsam import SAM

L = pytest.importorskip("lightning", reason="lightning is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of Lightning, about loggers and workers
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
BLOCKS = re.findall(r"^```python notest\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


class Labelled(nn.Module):
    """Takes and returns what models of transformers do."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x, labels):
        outputs = self.network(x)
        return {"loss": F.cross_entropy(outputs, labels), "logits": outputs}


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def test_there_is_a_block_for_each():
    words = ("SAMModule", "SAMTrainer", "step(closure)", "run_passes(opt", "fully_shard(self.model", "fsdp_version=2")
    assert [word in block for word, block in zip(words, BLOCKS, strict=True)] == [True] * 6


@pytest.mark.parametrize("block", BLOCKS[:4], ids=["lightning", "hf", "accelerate", "accelerate without a closure"])
def test_block(block, on_cpu):
    t = task(torch.float32, samples=32)
    network, dataset = t.model, t.dataset
    if "TrainingArguments" in block:
        network, dataset = Labelled(t.model), [{"x": x, "labels": y} for x, y in t.dataset]
    names = {
        "torch": torch,
        "SAM": SAM,
        "model": network,
        "loss_fn": F.cross_entropy,
        "dataset": dataset,
        "loader": DataLoader(t.dataset, batch_size=4),
        "epochs": 1,
        "opt": SAM(t.model.parameters(), torch.optim.SGD, rho=0.1, model=t.model, lr=0.05),
    }
    before = [p.detach().clone() for p in t.model.parameters()]
    exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    assert any(not torch.equal(a, b) for a, b in zip(before, t.model.parameters(), strict=True))


def run_sharded(rank: int, block: str) -> tuple[list[str], bool]:
    """Return of which type the parameters are afterwards, and whether they have moved."""
    as_launched(rank)
    model, t = smooth_network().float(), task(torch.float32, samples=32)
    names = {
        "torch": torch,
        "SAM": SAM,
        "model": model,
        "loss_fn": F.cross_entropy,
        "loader": DataLoader(t.dataset, batch_size=4),
        "epochs": 1,
        "processes": 2,
    }
    exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    after = list(model.parameters())
    moved = any(not torch.equal(a, b) for a, b in zip(whole(after), smooth_network().float().parameters(), strict=True))
    return [type(p).__name__ for p in after], moved


def test_blocks_of_shards(on_cpu):
    for kinds, moved in in_ranks(run_sharded, BLOCKS[4]):
        assert moved
        assert set(kinds) == {"DTensor"}
    for kinds, moved in in_ranks(run_sharded, BLOCKS[5]):
        assert not moved  # it only prepares, and Accelerate does not shard on a CPU
        assert set(kinds) == {"Parameter"}
