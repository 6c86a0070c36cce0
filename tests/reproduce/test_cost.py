"""What runs would take, from a measured step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from sparsam.ascents import GradientAscent
from sparsam.models import build_model
from sparsam.reproduce.cost import CPU_IMAGES, estimate, step_seconds
from sparsam.runs.build import build_network
from sparsam.runs.recipe import load_recipe
from sparsam.runs.schema import RecipeError
from sparsam.training.planned import PlannedRun


@pytest.mark.parametrize(
    ("seconds", "shortest", "measured"),
    [
        ((0.50, 0.51, 0.52), 0.50, 3),
        ((9.0, 0.50, 0.54), 0.50, 3),
        ((6.4, 7.3, 1.4, 0.62, 8.0, 0.63), 0.62, 6),  # another job comes and goes
        ((6.4, 7.1, 1.4, 0.62), 0.62, 10),  # and then every step takes ten times as long as the one before
    ],
)
def test_steps_that_were_disturbed_do_not_count(monkeypatch, seconds, shortest, measured):
    times = [*seconds, *(10.0**i for i in range(1, 7))]
    found = iter(times)
    monkeypatch.setattr("sparsam.step_cost.Clock.time", lambda clock, work: (work(), next(found))[1])
    recipe = load_recipe("digits-sam")
    cost = step_seconds(recipe, GradientAscent(), torch.device("cpu"))
    assert cost == pytest.approx(shortest * recipe.data.batch_size / CPU_IMAGES)
    assert list(found) == times[measured:]


class ConvolutionClock:
    """Each call of a convolution takes a second."""

    def __init__(self, monkeypatch):
        self.calls = 0
        forward = nn.Conv2d.forward

        def counted(module, x):
            self.calls += 1
            return forward(module, x)

        def time(clock, work):
            before = self.calls
            work()
            return self.calls - before

        monkeypatch.setattr(nn.Conv2d, "forward", counted)
        monkeypatch.setattr("sparsam.step_cost.Clock.time", time)


def convolutions(model):
    return sum(isinstance(module, nn.Conv2d) for module in model.modules())


MODEL = build_model("resnet-small", 10, channels=1)
ALL, AFTER = convolutions(MODEL), sum(convolutions(MODEL.get_submodule(name)) for name in ("layer2", "layer3"))
LATE = ["schedule=last-steps", "schedule.fraction=0.25"]
FOLDER = ["data=imagefolder", "train.max_steps=10"]
MEAN = {  # convolutions of a step, in the mean over the 24 steps of a run
    "sgd": ("digits-sgd", [], ALL),
    "sam": ("digits-sam", [], 2 * ALL),
    "momentum": ("digits-sam", ["ascent=momentum"], ALL),
    "fisher": ("digits-ssam-f", [], 2 * ALL),
    "every-nth": ("digits-sam", ["schedule=every-nth", "schedule.n=3"], (1 + 1 / 3) * ALL),
    "late": ("digits-sam", LATE, 1.25 * ALL),
    "late, one pass before": ("digits-sam", [*LATE, "schedule.before=momentum"], 1.25 * ALL),
    "cut": ("digits-sam", ["mask=suffix", "mask.cut=layer2"], ALL + AFTER),
    "inner": ("digits-sam", ["mask=suffix", "mask.cut=layer2", "mask.inner=fisher"], ALL + AFTER),
    "thrifty": (
        "digits-thrifty",
        ["mask.cut=layer2", "schedule.fraction=0.2"],
        ALL + 5 / 24 * AFTER,
    ),  # of 24 steps, the first floor(0.8 * 24) = 19 are base steps
}


def test_a_run_counts_its_steps_as_its_schedule_and_its_cut_say(monkeypatch):
    ConvolutionClock(monkeypatch)
    monkeypatch.setattr("sparsam.reproduce.cost.CPU_IMAGES", 100)  # a whole batch
    runs = [PlannedRun(load_recipe(name, ["train.epochs=2", *more]), Path(name)) for name, more, _ in MEAN.values()]
    for sort, found in zip(MEAN, estimate(runs, torch.device("cpu")), strict=True):
        assert found.steps == 24, sort
        assert found.seconds == pytest.approx(MEAN[sort][2]), sort
        assert found.total == pytest.approx(24 * MEAN[sort][2]), sort


def test_a_sort_of_step_is_measured_once(monkeypatch):
    measured = []

    def seconds(recipe, ascent, device):
        measured.append((type(ascent).__name__, recipe.mask.cut))
        return 1.0

    monkeypatch.setattr("sparsam.reproduce.cost.step_seconds", seconds)
    settings = [[], ["schedule.fraction=0.5"], ["sam.rho=0.3"], ["mask.cut=layer2"], ["train.seed=1"]]
    runs = [PlannedRun(load_recipe("digits-thrifty", own), Path("x")) for own in settings]
    assert [found.seconds for found in estimate(runs, torch.device("cpu"))] == [1.0] * 5
    assert measured == [("NoneType", "layer3"), ("FriendlyAscent", "layer3"), ("FriendlyAscent", "layer2")]


@pytest.mark.parametrize(
    ("setting", "sorts"),  # the sorts of step that two runs have that differ in the setting; each alone has 2
    [
        ("data.image_size=64", 4),
        ("data.batch_size=64", 4),
        ("optimizer=adam", 4),
        ("train.precision=bf16", 4),
        ("train.channels_last=false", 4),
        ("train.threads=2", 4),
        ("train.compile=true", 4),
        ("train.deterministic=true", 4),
        ("sam.adaptive=true", 3),  # base steps have nothing of SAM
        ("train.cuda_graph=false", 2),  # a CPU has no CUDA graph
        ("train.label_smoothing=0.1", 2),
        ("optimizer.weight_decay=0.1", 2),
    ],
)
def test_runs_share_a_measured_step_only_where_it_takes_equally_long(monkeypatch, setting, sorts):
    measured = []
    monkeypatch.setattr("sparsam.reproduce.cost.step_seconds", lambda *step: measured.append(step) or 1.0)
    runs = [PlannedRun(load_recipe("digits-thrifty", [*FOLDER, *own]), Path("x")) for own in ([], [setting])]
    estimate(runs, torch.device("cpu"))
    assert len(measured) == sorts


def test_a_cuda_graph_makes_a_sort_of_step_on_a_gpu(monkeypatch):
    measured = []
    monkeypatch.setattr("sparsam.reproduce.cost.step_seconds", lambda *step: measured.append(step) or 1.0)
    runs = [PlannedRun(load_recipe("digits-sgd", own), Path("x")) for own in ([], ["train.cuda_graph=false"])]
    estimate(runs, torch.device("cuda"))
    assert len(measured) == 2


@pytest.mark.parametrize("size", [8, 24])
def test_images_of_a_folder_are_measured_in_the_size_they_train_in(monkeypatch, size):
    sizes = []
    build = build_network

    def watched(*arguments):
        model = build(*arguments)
        model.register_forward_pre_hook(lambda module, inputs: sizes.append(tuple(inputs[0].shape)))
        return model

    monkeypatch.setattr("sparsam.reproduce.cost.build_network", watched)
    recipe = load_recipe("digits-sgd", [*FOLDER, f"data.image_size={size}", "data.batch_size=2"])
    step_seconds(recipe, None, torch.device("cpu"))
    assert set(sizes) == {(2, 3, size, size)}


@pytest.mark.parametrize(
    ("setting", "images"), [("data.limit=99", 99), ("data.validation=1101", 99), ("data.validation=1201", 0)]
)
def test_a_batch_that_there_are_too_few_images_for_is_refused(setting, images):
    run = PlannedRun(load_recipe("digits-thrifty", [setting]), Path("x"))
    message = f"^digits-thrifty: data.batch_size must be at most the number of training images, {images}, but is 100$"
    with pytest.raises(RecipeError, match=message):
        estimate([run], torch.device("cpu"))
