"""The pages: every Python block runs, every link and every path leads somewhere, lines are short."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import in_ranks
from sharded import whole
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from cases import task
from sparsam import SAM
from sparsam.models.resnet import BasicBlock, ResNet
from sparsam.runs.library import packaged_recipes

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "results" / "README.md"])
WIDTH = 120
README_LINES = 130


def code(page: Path) -> list[str]:
    """Return the Python blocks of a page, and both sides of those that show a change."""
    blocks = re.findall(r"^```(python|diff)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    sides = {"python": ["*"], "diff": ["-", "+"]}
    return [_side(block, side) for language, block in blocks for side in sides[language]]


def _side(block: str, side: str) -> str:
    """Return the lines of one side of a change without their marks; "*": the block is no change."""
    if side == "*":
        return block
    return "".join(line[2:] or "\n" for line in block.splitlines(keepends=True) if line[0] in f"{side} \n")


BLOCKS = [
    pytest.param(block, id=f"{page.name}-{i}", marks=pytest.mark.slow if "dcp.save" in block else ())
    for page in PAGES
    for i, block in enumerate(code(page))
]


def test_the_page_on_training_names_every_recipe_beyond_the_paper():
    text = (ROOT / "docs" / "training.md").read_text()
    names = [name for name in packaged_recipes() if name.endswith(("-thrifty", "-ssam-c"))]
    assert len(names) >= 6
    assert [name for name in names if f"`{name}`" not in text] == ["cifar100-vit-thrifty"]  # as `-thrifty`


@pytest.mark.parametrize("block", BLOCKS)
def test_block(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    if "ddp_model" in block or "fully_shard" in block:  # a process group lives and dies with a process of its own
        in_ranks(run_distributed, block, str(tmp_path), world_size=1)
    else:
        run_block(block)


def run_distributed(rank: int, block: str, folder: str) -> None:
    """Run a block in a process group of one, which is enough to see that the names are right."""
    os.chdir(folder)
    run_block(block)


def run_block(block: str) -> None:
    t = task(torch.float32, samples=256)
    model = t.model
    if '"layer' in block:
        model = ResNet(BasicBlock, (1, 1, 1, 1), classes=3, width=4, channels=1)
    opt = SAM(model.parameters(), torch.optim.SGD, rho=0.1, model=model, lr=0.05)
    names = {
        "torch": torch,
        "SAM": SAM,
        "model": model,
        "loss_fn": F.cross_entropy,
        "dataset": t.dataset,
        "loader": DataLoader(t.dataset, batch_size=64),
        "epochs": 4,
        "opt": opt,
        "x": t.x,
        "y": t.y,
        "micro_batches": [(t.x[:100], t.y[:100]), (t.x[100:], t.y[100:])],
        "scaler": torch.amp.GradScaler("cpu"),
        "device": "cpu",
        "path": Path("checkpoint.pt"),
    }
    if "ddp_model" in block:
        names["ddp_model"] = nn.parallel.DistributedDataParallel(model)

    def closure():
        names["opt"].zero_grad()  # the block may have made its own
        loss = F.cross_entropy(model(t.x), t.y)
        loss.backward()
        return loss

    names["closure"] = closure
    before = [p.detach().clone() for p in model.parameters()]
    exec(compile(block, "<block>", "exec", dont_inherit=True), names)
    if names["opt"] is not opt and not re.search(r"\bopt\.\w*step\(", block):
        names["opt"].step(closure)  # an optimizer that is only built on the page works too
    if names["opt"] is not opt or "step(" in block:
        assert any(not torch.equal(a, b) for a, b in zip(before, whole(model.parameters()), strict=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        if target.startswith("http"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor:
            assert anchor in _anchors(file), f"{target}#{anchor}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "Makefile"], ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page):
    paths = re.findall(r"(?<![\w./-])(?:tests|src|benchmarks|examples)/[\w./-]*", page.read_text())
    assert [path for path in paths if not (ROOT / path.rstrip(".")).exists()] == []


def _anchors(page: Path) -> set[str]:
    """What headings are called in links, by GitHub's rule."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page):
    too_long = [f"{number}: {len(line)} columns" for number, line in _prose(page) if len(line) > WIDTH]
    assert not too_long, f"{page.relative_to(ROOT)} has lines of more than {WIDTH} columns"


def _prose(page: Path) -> Iterator[tuple[int, str]]:
    """Lines that are neither code nor rows of a table."""
    in_code = False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if line.startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith(("    ", "|")):
            yield number, line


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
