"""Smoke runs: `--max-steps` and `data.limit` make any recipe cheap, on real data."""

from __future__ import annotations

import json
import math

import pytest
import torch
from commands import invoke, sparsam
from digits_runs import CPU, final_weights, recipe
from real_images import DATA, needs_cifar

from cases import same
from sparsam.data import load_digits
from sparsam.runs.build import build_loader
from sparsam.runs.directory import RunDirectory
from sparsam.training import Trainer, resume, train
from sparsam.training.launch import new_run
from sparsam.training.progress import TerminalProgress


def read(path):
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return metrics, json.loads((path / "summary.json").read_text())


@pytest.mark.parametrize(
    ("name", "limit", "data"),
    [
        pytest.param("digits-ssam-c", 256, [], marks=pytest.mark.slow),
        pytest.param(
            "cifar100-resnet18-sam",
            64,
            ["--set", f"data.root={DATA}", "--set", "data.batch_size=16"],
            marks=needs_cifar("cifar100"),
        ),
    ],
)
def test_two_steps_of_a_recipe(tmp_path, name, limit, data):
    few = ["--max-steps", 2, "--set", f"data.limit={limit}"]
    sparsam("train", name, *data, *few, "-o", tmp_path / "run", "--device", "cpu", cwd=tmp_path)
    (epoch,), summary = read(tmp_path / "run")
    assert (epoch["steps"], summary["steps"], summary["epochs"]) == (2, 2, 1)
    assert epoch["lr"] == pytest.approx(0.05 / 2)  # (1 + cos(pi 1 / 2)) / 2 of 0.05
    assert math.isfinite(epoch["train_loss"])
    assert (limit * epoch["test_accuracy"]).is_integer()
    text = invoke("evaluate", tmp_path / "run", "--device", "cpu").stdout
    assert f"on {limit} test images" in text


def test_schedules_take_max_steps_as_their_total(tmp_path):
    """18 steps: an epoch of 12 and a half one. The last half of them perturbs, and masks decay to the end."""
    lrs = []

    class Trainers(Trainer):
        def _step(self, x, y):
            lrs.append(self.opt.param_groups[0]["lr"])
            return super()._step(x, y)

    r = recipe("ssam-c", "train.max_steps=18", "train.epochs=100")
    directory = RunDirectory(tmp_path / "run")
    directory.create(r, {})
    trainer = Trainers(r, directory, device=CPU)
    summary = trainer.run()
    assert lrs == pytest.approx([0.05 * (1 + math.cos(math.pi * i / 18)) / 2 for i in range(18)])
    metrics, _ = read(tmp_path / "run")
    assert [m["steps"] for m in metrics] == [12, 18]
    assert (summary["steps"], summary["epochs"]) == (18, 2)
    shares = [m["mask_density"]["head.2"] for m in metrics]
    assert shares == [3 / 12, 1.0]  # steps 9, 10 and 11; all of the second epoch
    dense = trainer.opt.masks()
    share = sum(int(m.sum()) for m in dense) / sum(m.numel() for m in dense)
    assert summary["perturbed"] == pytest.approx(share / 2)
    drops = Trainer(recipe("ssam-d", "train.max_steps=18"), RunDirectory(tmp_path / "d"), device=CPU)
    assert drops.opt.mask.total_steps == 18


def test_the_learning_rate_can_warm_up(tmp_path):
    """An epoch of 12 steps up, two down."""
    train(recipe("sgd", "train.epochs=3", "optimizer.warmup_epochs=1"), tmp_path / "run", device=CPU)
    lrs = [m["lr"] for m in read(tmp_path / "run")[0]]
    expected = [1.0, *((1 + math.cos(math.pi * step / 24)) / 2 for step in (11, 23))]
    assert lrs == pytest.approx([0.05 * share for share in expected])
    short = new_run(recipe("sgd", "optimizer.warmup_epochs=5"), tmp_path / "short", device=CPU)
    assert [short.over_time.lr(step) for step in (0, 11)] == pytest.approx([0.05 / 60, 0.05 * 12 / 60])


def test_more_steps_than_the_epochs_have_are_not_taken(tmp_path):
    summary = train(recipe("sgd", "train.epochs=1", "train.max_steps=1000"), tmp_path / "run", device=CPU)
    assert (summary["steps"], summary["epochs"]) == (12, 1)


@pytest.mark.parametrize(
    ("steps", "words"), [(5, "5 steps"), (1, "1 step"), (15, "15 steps"), (99, "the last of 2 epochs")]
)
def test_a_terminal_shows_steps_where_these_end_a_run(tmp_path, capsys, steps, words):
    run = recipe("sgd", f"train.max_steps={steps}")
    train(run, tmp_path / "run", device=CPU, progress=TerminalProgress())
    shown = " ".join(capsys.readouterr().out.split())
    assert f"% (test, {words})" in shown


def test_a_smoke_run_that_dies_is_continued_to_the_same_end(tmp_path, monkeypatch):
    settings = ["train.max_steps=15", "train.checkpoint_steps=1"]
    train(recipe("thrifty", *settings), tmp_path / "whole", device=CPU)
    step = Trainer._step

    def dies(self, x, y):
        if (self.epoch, self.batch) == (1, 2):
            raise MemoryError
        return step(self, x, y)

    monkeypatch.setattr(Trainer, "_step", dies)
    with pytest.raises(MemoryError):
        train(recipe("thrifty", *settings), tmp_path / "died", device=CPU)
    monkeypatch.undo()
    resume(tmp_path / "died", device=CPU)
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "died"))


def test_a_limit_takes_the_same_images_for_every_seed():
    everything = load_digits()
    loaders = [build_loader(recipe("sgd", "data.limit=200", f"train.seed={seed}"), CPU) for seed in (0, 1)]
    first, second = (loader.data for loader in loaders)
    assert torch.equal(first.train.x, second.train.x)
    assert torch.equal(first.test.x, second.test.x)
    assert (len(first.train), len(first.test), loaders[0].steps) == (200, 200, 2)
    known = {x.numpy().tobytes() for x in everything.train.x}
    assert all(x.numpy().tobytes() in known for x in first.train.x)
    assert len(first.train.y.unique()) == 10  # not the first of a sorted list
    larger = build_loader(recipe("sgd", "data.limit=300"), CPU).data
    assert torch.equal(larger.train.x[:200], first.train.x)
    assert len(build_loader(recipe("sgd", "data.limit=5000"), CPU).data.train) == 1200


def test_a_limit_comes_after_the_validation_split():
    data = build_loader(recipe("sgd", "data.limit=100", "data.validation=150"), CPU).data
    train_images = {x.numpy().tobytes() for x in load_digits().train.x}
    assert (len(data.train), len(data.test)) == (100, 100)
    assert all(x.numpy().tobytes() in train_images for x in data.test.x)


def test_a_limit_of_an_image_folder(shared_root):
    settings = ["data.name=imagefolder", f"data.root={shared_root}", "data.workers=0", "data.image_size=8"]
    few = [*settings, "data.batch_size=2", "data.limit=4"]
    loaders = [build_loader(recipe("sgd", *few, f"train.seed={seed}"), CPU) for seed in (0, 1)]
    names = [[sorted(part.names.tolist()) for part in (loader.data.train, loader.data.test)] for loader in loaders]
    assert names[0] == names[1]
    assert [len(part) for part in names[0]] == [4, 4]
    everything = build_loader(recipe("sgd", *settings, "data.batch_size=2"), CPU).data
    assert set(names[0][0]) < set(everything.train.names.tolist())
    assert loaders[0].steps == 2
    assert sum(len(y) for _, y in loaders[0].evaluation()) == 4
