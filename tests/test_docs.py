"""Every Python block in README and docs runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from cases import task
from sparsam import SAM, Cut
from sparsam.models import build_model

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{i}")
    for page in PAGES
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block(block, tmp_path, monkeypatch):
    t = task(torch.float32, samples=256)
    monkeypatch.chdir(tmp_path)  # some write files
    # No test depends on a clock.
    monkeypatch.setattr("sparsam.behind.cut_costs", lambda *_, **__: {Cut("3", 0.9, 0.2): 1.2})
    if "ddp_model" in block:  # one process is enough to see that the names are right
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    opt = SAM(t.model.parameters(), torch.optim.SGD, rho=0.1, model=t.model, lr=0.05)
    names = {
        "torch": torch,
        "SAM": SAM,
        "model": t.model,
        "loss_fn": F.cross_entropy,
        "dataset": t.dataset,
        "loader": DataLoader(t.dataset, batch_size=64),
        "epochs": 2,
        "opt": opt,
        "x": t.x,
        "y": t.y,
        "micro_batches": [(t.x[:100], t.y[:100]), (t.x[100:], t.y[100:])],
        "closure": t.closure(opt),
        "scaler": torch.amp.GradScaler("cpu"),
        "device": "cpu",
        "path": tmp_path / "checkpoint.pt",
    }
    if "layer2" in block:
        names["model"] = build_model("resnet-small", 10)
    if "ddp_model" in block:
        names["ddp_model"] = torch.nn.parallel.DistributedDataParallel(t.model)
    before = [p.detach().clone() for p in t.model.parameters()]
    try:
        exec(block, names)
    finally:
        if "ddp_model" in block:
            torch.distributed.destroy_process_group()
    if ".step(" in block or "_step(" in block:
        assert any(not torch.equal(a, b) for a, b in zip(before, t.model.parameters(), strict=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
