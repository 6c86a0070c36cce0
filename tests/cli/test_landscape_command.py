"""`sparsam landscape` on trained runs."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace

import pytest
import torch
from commands import invoke
from torch.nn import functional as F

from cases import task
from sparsam.analysis.landscape import Landscape, loss_landscape
from sparsam.cli import landscape as command
from sparsam.data import load_digits
from sparsam.models import build_model
from sparsam.training.trainer import Interrupted


@pytest.mark.slow
def test_the_command_end_to_end(runs, tmp_path):
    options = ["--points", 4, "--samples", 5000, "--device", "cpu", "-o", tmp_path]
    text = invoke("landscape", runs / "sgd", runs / "sam", *options).stdout
    for name in ("landscape-contour.png", "landscape-contour.svg", "landscape-surface.png", "landscape-surface.svg"):
        assert (tmp_path / name).stat().st_size > 20_000
    assert (tmp_path / "landscape.html").stat().st_size > 20_000
    assert "landscape.html" in text.replace("\n", "")
    data = load_digits().train
    for name, method in (("sgd", "SGD"), ("sam", "SAM")):
        found = Landscape.load(runs / name / "analysis" / "landscape.npz")
        model = build_model("resnet-small", 10, channels=1).double().eval()
        model.load_state_dict(torch.load(runs / name / "checkpoints" / "last.pt", weights_only=True)["model"])
        with torch.no_grad():
            expected = F.cross_entropy(model(images(data)), data.y).item()
        assert found.centre == pytest.approx(expected, rel=1e-4)
        assert found.settings["samples"] == len(data.y)
        assert found.about == {
            "label": method,
            "seed": 0,
            "run": name,
            "setup": "resnet-small on digits",
            "weights": "last",
            "epochs": 1,
            "samples_asked": 5000,
        }
        assert re.search(rf"{name} +{found.centre:.4g} +{found.median:.4g} +{found.losses.max():.4g} +0 +16", text)

    # Again with the same settings: nothing is computed; with others: refused.
    file = runs / "sgd" / "analysis" / "landscape.npz"
    before = Landscape.load(file)
    marked = before.losses + 1
    replace(before, losses=marked).save(file)
    invoke("landscape", runs / "sgd", *options)
    assert Landscape.load(file).losses.tobytes() == marked.tobytes()
    before.save(file)
    done = invoke("landscape", runs / "sgd", *options, "--seed", 7, code=1)
    assert "seed 0, now 7. Delete it to start anew, or use --overwrite" in " ".join(done.stderr.split())
    invoke("landscape", runs / "sgd", *options, "--overwrite", "--precision", "fp8", code=1)
    assert Landscape.load(file).settings["seed"] == 0
    invoke("landscape", runs / "sgd", *options, "--seed", 7, "--overwrite")
    assert Landscape.load(file).settings["seed"] == 7
    before.save(file)


def images(data):
    """The digits as the trainer feeds them, in float64."""
    from sparsam.data import Augmentation, ResidentLoader

    loader = ResidentLoader(load_digits(), 100, Augmentation(0, False, 0, 1.0), seed=0, device=torch.device("cpu"))
    return torch.stack([loader.samples()[i][0] for i in range(len(data.y))]).double()


def test_the_command_draws_again_without_a_model(runs, tmp_path):
    place = tmp_path / "moved"
    for name in ("sgd", "sam"):
        t = task()
        loss_landscape(t.model, F.cross_entropy, (t.x, t.y), points=3, file=place / name / "analysis" / "landscape.npz")
    invoke("landscape", place / "sgd", place / "sam", "--redraw", "-o", tmp_path / "out")
    assert (tmp_path / "out" / "landscape-surface.svg").stat().st_size > 10_000
    loss_landscape(t.model, F.cross_entropy, (t.x, t.y), points=4, file=place / "c" / "analysis" / "landscape.npz")
    done = invoke("landscape", place / "sgd", place / "c", "--redraw", "-o", tmp_path / "out", code=1)
    assert "to be compared, but points is 3 for" in done.stderr
    done = invoke("landscape", place / "d", "--redraw", code=1)
    assert "compute it with: sparsam landscape" in done.stderr


def test_the_command_along_principal_directions(runs, tmp_path):
    options = ["--points", 3, "--samples", 50, "--device", "cpu", "-o", tmp_path, "--directions", "pca"]
    other = ["--checkpoint", runs / "sam" / "checkpoints" / "last.pt"]
    invoke("landscape", runs / "sgd", "--dimensions", 1, *options, *other)
    found = Landscape.load(runs / "sgd" / "analysis" / "landscape-line.npz")
    assert found.path.tolist() == [[1.0]]
    assert found.settings["samples"] == 50
    assert {f.name for f in tmp_path.iterdir()} == {f"landscape-line.{suffix}" for suffix in ("png", "svg", "html")}
    done = invoke("landscape", runs / "sgd", *options, *other, code=1)
    assert "2 principal ones, but the 1 given differ in 1" in done.stderr


def test_the_command_refuses_before_it_computes(runs, tmp_path):
    for arguments, message in [
        ([tmp_path], "has no runs in it, and is not one itself"),
        ([tmp_path / "none"], "is not a run directory"),
        (
            [runs / "sgd", "--checkpoint", "x.pt"],
            "--checkpoint must be given for --directions pca, and only then, but --directions is random",
        ),
        ([runs / "sam", "--directions", "pca", "--checkpoint", "x.pt"], "there is no checkpoint at x.pt"),
        ([runs / "sam", "--precision", "fp8"], "precision must be one of"),
    ]:
        assert message in invoke("landscape", *arguments, "--device", "cpu", code=1).stderr


def test_ctrl_c_keeps_the_points_and_the_same_command_goes_on(runs, monkeypatch):
    load, calls = command.load_objective, []
    options = {"samples": 20, "best": False, "directions": "random", "checkpoints": [], "device": torch.device("cpu")}
    settings = {"dimensions": 1, "points": 6, "range": 1.0, "seed": 0, "precision": "fp32"}

    def interrupted(run, **options):
        objective = load(run, **options)

        def loss_fn(outputs, targets):
            calls.append(0)
            if len(calls) == 1 + 3:
                os.kill(os.getpid(), signal.SIGINT)
            return F.cross_entropy(outputs, targets)

        objective.loss_fn = loss_fn
        return objective

    monkeypatch.setattr(command, "load_objective", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(
        Interrupted, match="sam: stopped after 3 of 6 points, which are saved; the same command continues"
    ):
        command.measure(runs / "sam", **options, **settings)
    assert signal.getsignal(signal.SIGINT) is handler
    found = command.measure(runs / "sam", **options, **settings)
    assert found.complete
    assert len(calls) == 1 + 3 + 1 + 3
    objective = load(runs / "sam", samples=20, device=torch.device("cpu"))
    whole = loss_landscape(objective.model, objective.loss_fn, objective.batches, dimensions=1, points=6)
    assert (found.losses == whole.losses).all()


def test_progress_without_a_terminal(capsys):
    clock = iter([0.0, 30.0, 30.0, 35.0, 60.0])
    lines = command.ProgressLines("run", interval=10, clock=lambda: next(clock))
    for finished in (10, 13, 14, 16):  # ten of an earlier command
        lines.update(finished, 25)
    assert capsys.readouterr().err == "run: 13/25 points, 2:00 left\nrun: 16/25 points, 1:30 left\n"
