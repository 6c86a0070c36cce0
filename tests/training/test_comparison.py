"""Several recipes and seeds: what is trained, in which order, and what is refused before."""

from __future__ import annotations

import io
import json
import re
import signal
import weakref

import pytest
import torch
from digits_runs import CPU, SHORT, final_weights, last_checkpoint, numbers

from cases import same
from sparsam.runs.directory import RunDirectory
from sparsam.training import Interrupted, RecipeError, Trainer
from sparsam.training.comparison import compare_recipes
from sparsam.training.launch import open_run
from sparsam.training.progress import LogProgress, TerminalProgress


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """SGD and SAM, two seeds each, one run after the other."""
    output = tmp_path_factory.mktemp("alone")
    compare_recipes(["digits-sgd", "digits-sam"], 2, output, overrides=SHORT, device=CPU)
    return output


def assert_same_runs(output, others):
    paths = sorted(others.iterdir())
    assert paths
    for path in paths:
        one, other = RunDirectory(output / path.name), RunDirectory(path)
        assert numbers(one.metrics()) == numbers(other.metrics())
        assert same(final_weights(one.path), final_weights(other.path))


@pytest.mark.slow
def test_runs_side_by_side_are_those_of_runs_alone(tmp_path, alone):
    lines = io.StringIO()
    options = {"overrides": SHORT, "device": CPU, "at_once": 3, "progress": lambda: LogProgress(lines, ends=True)}
    compare_recipes(["digits-sgd", "digits-sam"], 2, tmp_path, **options)
    assert_same_runs(alone, tmp_path)
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert sorted(line["place"] for line in told if "method" in line) == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]
    summaries = [RunDirectory(path).summary() for path in tmp_path.iterdir()]
    assert {summary["step_ms"] for summary in summaries} == {None}  # of no run alone


@pytest.mark.slow
def test_runs_side_by_side_are_all_saved_when_they_are_stopped(tmp_path, alone):
    step, steps = Trainer._step, []

    def stops(self, x, y):
        steps.append(self)
        if len(steps) == 7:
            signal.raise_signal(signal.SIGTERM)
        return step(self, x, y)

    options = {"overrides": SHORT, "device": CPU, "at_once": 2}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted, match="stopped in epoch 1 after batch"):
        patch.setattr(Trainer, "_step", stops)
        compare_recipes(["digits-sgd", "digits-sam"], 2, tmp_path, **options)
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 2  # the others were not begun
    assert {last_checkpoint(path)["batch"] for path in paths} <= {3, 4}
    compare_recipes(["digits-sgd", "digits-sam"], 2, tmp_path, **options)
    assert_same_runs(alone, tmp_path)


def test_a_run_is_gone_before_the_next_is_made(tmp_path, monkeypatch):
    """Its memory would count in the next one's."""
    made, alive = [], []

    def making(*arguments, **options):
        alive.append(sum(run() is not None for run in made))
        run = open_run(*arguments, **options)
        made.append(weakref.ref(run))
        return run

    monkeypatch.setattr("sparsam.training.turns.open_run", making)
    options = {"overrides": ["train.max_steps=1"], "device": CPU}
    compare_recipes(["digits-sgd"], seeds=3, output=tmp_path, **options)
    assert alive == [0, 0, 0]


def test_an_error_names_the_recipe_and_the_seed(tmp_path, monkeypatch):
    def fails(self, x, y):
        raise RecipeError("something is wrong")

    monkeypatch.setattr(Trainer, "_step", fails)
    with pytest.raises(RecipeError, match=r"^digits-sgd, seed 0: something is wrong$"):
        compare_recipes(["digits-sgd"], seeds=2, output=tmp_path, device=CPU)


@pytest.mark.parametrize("error", [RecipeError, ZeroDivisionError])
def test_the_error_of_a_run_is_raised_after_the_others_are_saved(tmp_path, monkeypatch, error):
    def fails(self, x, y):
        if self.recipe.name == "digits-sam" and self.batch == 2:
            raise error("something is wrong")
        return torch.zeros(())

    monkeypatch.setattr(Trainer, "_step", fails)
    with pytest.raises(error, match="something is wrong"):
        compare_recipes(["digits-sgd", "digits-sam"], 1, tmp_path, overrides=SHORT, device=CPU, at_once=2)
    assert last_checkpoint(tmp_path / "digits-sgd-seed0")["batch"] in (3, 4)


def test_an_error_while_runs_are_stopped_is_raised(tmp_path, monkeypatch):
    """It comes before the word of another run that it has stopped."""

    def saves(self, path):
        if self.recipe.name == "digits-sgd":
            raise OSError("no space left")

    def stops(self, x, y):
        if self.batch == 2:
            signal.raise_signal(signal.SIGTERM)
        return torch.zeros(())

    monkeypatch.setattr(Trainer, "_step", stops)
    monkeypatch.setattr(Trainer, "save", saves)
    for names in (["digits-sgd", "digits-sam"], ["digits-sam", "digits-sgd"]):
        with pytest.raises(OSError, match="no space left"):
            compare_recipes(names, 1, tmp_path / names[0], overrides=SHORT, device=CPU, at_once=2)


def test_a_run_that_cannot_be_built_is_named_while_others_are_trained(tmp_path):
    options = {"overrides": [*SHORT, "data.root=nowhere", "train.threads=1"], "device": CPU, "at_once": 2}
    with pytest.raises(RecipeError, match=r"^cifar10-resnet18-sgd, seed 0: .*nowhere"):
        compare_recipes(["digits-sgd", "cifar10-resnet18-sgd"], 1, tmp_path, **options)
    assert last_checkpoint(tmp_path / "digits-sgd-seed0")["batch"] == 2


def write(path, text):
    path.write_text(text)
    return path


def test_what_is_refused_before_anything_is_trained(tmp_path):
    def compare(*sources, overrides=(), at_once=1):
        compare_recipes(sources, 1, tmp_path / "runs", overrides=overrides, device=CPU, at_once=at_once)

    with pytest.raises(RecipeError, match=r"^mask\.cut has no meaning for any of the recipes; leave it out$"):
        compare("digits-sgd", "digits-sam", overrides=["mask.cut=layer2"])
    with pytest.raises(RecipeError, match=r"^unknown key train\.epoch; did you mean train\.epochs\?$"):
        compare("digits-sgd", overrides=["train.epoch=2"])
    for text, error in (
        ("train.epochs = -1", r"train\.epochs must be a whole number >= 1, but is -1"),
        ("mask.sparsity = 0.5", r"mask\.sparsity has no meaning for mask\.name = dense, only for .*; leave it out"),
        ("mask = 3", r"mask must be a table of settings, but is 3"),
    ):
        wrong = write(tmp_path / "wrong.toml", f'extends = "digits-sam"\n{text}\n')
        with pytest.raises(RecipeError, match=rf"^{re.escape(str(wrong))}: {error}$"):
            compare("digits-ssam-f", wrong, overrides=["mask.sparsity=0.9"])
    with pytest.raises(RecipeError, match=r"^[^:]*wrong\.toml is not valid TOML"):
        compare("digits-sgd", write(tmp_path / "wrong.toml", "mask ="))
    with pytest.raises(RecipeError, match=r"^train\.epochs must be a whole number >= 1, but is 0$"):
        compare(write(tmp_path / "fine.toml", 'extends = "digits-sgd"\n'), overrides=["train.epochs=0"])
    with pytest.raises(RecipeError, match="two have the same"):
        compare("digits-sgd", "digits-sgd")
    late = write(tmp_path / "late.toml", 'extends = "digits-thrifty"\nmask.cut = "layr3"\n')
    with pytest.raises(RecipeError, match=r"^late: mask\.cut must be the name of a module, such as 'layer3'"):
        compare("digits-sgd", late)
    never = write(tmp_path / "never.toml", 'extends = "digits-thrifty"\nschedule.fraction = 1e-16\n')
    with pytest.raises(RecipeError, match=r"^never: schedule\.fraction must be that of at least one .* but is 1e-16$"):
        compare("digits-sgd", never)
    steep = write(tmp_path / "steep.toml", 'extends = "digits-thrifty"\nsam.ramp_epochs = 1\nschedule.fraction = 0.2\n')
    for length in ("train.epochs=4", "train.max_steps=48"):  # of both, a fifth is 10 steps
        with pytest.raises(RecipeError, match=r"^steep: sam\.ramp_epochs is 1, which is 12 steps, but .* has 10: rho"):
            compare("digits-sgd", steep, overrides=[length])
    images = write(
        tmp_path / "images.toml",
        'extends = "imagenet-resnet50-sam"\nname = "images"\nsam.ramp_epochs = 4\ndata.root = "nowhere"\n',
    )
    with pytest.raises(
        RecipeError, match=r"^images: sam\.ramp_epochs is 4, .*; choose at most 3, or train for longer$"
    ):
        compare("digits-sgd", images, overrides=["train.epochs=3"])
    four = write(tmp_path / "four.toml", 'extends = "digits-sgd"\ntrain.threads = 4\n')
    with pytest.raises(RecipeError, match=r"^runs at once must agree in train\.threads"):
        compare("digits-sgd", four, at_once=2)
    assert not (tmp_path / "runs").exists()


def test_each_run_has_the_threads_of_its_recipe(tmp_path, monkeypatch):
    """The machine's own number, 3 say, comes back after a recipe that asks for another one."""
    threads = []
    two = write(tmp_path / "two.toml", 'extends = "digits-sgd"\ntrain.threads = 2\n')
    own = write(tmp_path / "own.toml", 'extends = "digits-sgd"\ntrain.threads = "none"\n')
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(Trainer, "_step", lambda self, x, y: threads.append(torch.get_num_threads()) or torch.zeros(()))
    try:
        compare_recipes([two, own], 1, tmp_path / "runs", overrides=["train.max_steps=1"], device=CPU)
    finally:
        torch.set_num_threads(before)
    assert threads == [2, 3]


def test_a_terminal_names_the_recipe_where_two_have_the_same_method(tmp_path, capsys):
    wider = tmp_path / "wider.toml"
    wider.write_text('extends = "digits-sam"\n\n[sam]\nrho = 0.2\n')
    options = {"overrides": ["train.max_steps=1"], "device": CPU, "progress": TerminalProgress}
    compare_recipes(["digits-sgd", "digits-sam", wider], 1, tmp_path / "runs", **options)
    shown = capsys.readouterr().out
    for name in ("SGD", "digits-sam", "wider"):
        assert f"{name}, seed 0: " in shown
