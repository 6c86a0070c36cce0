"""The trainer: its numbers, its files, and what the masks of its epochs select."""

from __future__ import annotations

import json
import math
import re
import sys
from itertools import islice

import pytest
import torch
from digits_runs import CPU, equal, final_weights, recipe
from torch.nn import functional as F

from cases import same
from sparsam import refresh_batchnorm
from sparsam.analysis.run_objective import load_objective, run_mask
from sparsam.errors import UserError
from sparsam.inventory import is_compiled
from sparsam.runs.build import build_loader, build_network
from sparsam.runs.directory import RunDirectory
from sparsam.training import RecipeError, train
from sparsam.training.launch import new_run
from sparsam.training.progress import Progress


def test_sgd_equals_a_plain_loop(tmp_path):
    """The trainer's losses and weights are those of a loop written here."""
    r = recipe("sgd")
    train(r, tmp_path / "run", device=CPU)

    torch.manual_seed(0)
    loader = build_loader(r, CPU)
    model = build_network(r, loader.classes, loader.channels, CPU)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    step, losses = 0, []
    for epoch in range(2):
        model.train()
        total = 0.0
        for x, y in loader.epoch(epoch):
            opt.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / 24)) / 2
            opt.zero_grad()
            loss = F.cross_entropy(model(x.contiguous(memory_format=torch.channels_last)), y)
            loss.backward()
            opt.step()
            total += loss.item()
            step += 1
        losses.append(total / 12)
    metrics = RunDirectory(tmp_path / "run").metrics()
    assert [m["train_loss"] for m in metrics] == pytest.approx(losses, rel=1e-6)
    assert same(final_weights(tmp_path / "run"), list(model.state_dict().values()))
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader.evaluation())
    assert metrics[-1]["test_accuracy"] == right / 597


@pytest.fixture
def compiled(monkeypatch):
    """Modules that were compiled, by a backend that needs no C compiler."""
    compile_module, modules = torch.nn.Module.compile, []

    def compile_for_tests(module, **options):
        modules.append(module)
        compile_module(module, backend="aot_eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_for_tests)
    torch._dynamo.reset()
    return modules


@pytest.mark.filterwarnings("ignore")  # of dynamo, about itself
def test_compiled_blocks_have_the_same_numbers(tmp_path, compiled):
    for name, setting in (("plain", "false"), ("compiled", "true")):
        train(recipe("sam", f"train.compile={setting}", "train.epochs=1"), tmp_path / name, device=CPU)
    assert len(compiled) == 9
    plain, other = (RunDirectory(tmp_path / name).metrics() for name in ("plain", "compiled"))
    assert plain[0]["train_loss"] == pytest.approx(other[0]["train_loss"], rel=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_all_blocks_run_compiled(compiled):
    from torch._dynamo.utils import counters

    model = build_network(recipe("sam", "model.name=resnet18", "train.compile=true"), 10, 3, CPU)
    counters.clear()
    for mode in (True, False):
        model.train(mode)(torch.zeros(2, 3, 8, 8))
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 8  # torch keeps 8 versions of a function


def test_masks_follow_the_runs_seed(tmp_path):
    masks = []
    for seed in (0, 1):
        r = recipe("ssam-d", f"train.seed={seed}", "train.max_steps=1")
        trainer = new_run(r, tmp_path / str(seed), device=CPU)
        trainer.run()
        masks.append(trainer.opt.masks())
    assert not equal(*masks)


def test_the_files_of_a_run(tmp_path):
    summary = train(recipe("ssam-d"), tmp_path / "run", device=CPU)
    files = {str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert files == {
        "recipe.json",
        "environment.json",
        "metrics.jsonl",
        "summary.json",
        "checkpoints/last.pt",
        "checkpoints/best.pt",
    }
    directory = RunDirectory(tmp_path / "run")
    assert directory.recipe() == recipe("ssam-d")
    assert directory.summary() == summary
    metrics = directory.metrics()
    assert [m["epoch"] for m in metrics] == [1, 2]
    assert summary["test_accuracy"] == metrics[-1]["test_accuracy"]  # the last epoch is the headline
    assert summary["best_accuracy"] == max(m["test_accuracy"] for m in metrics)
    assert summary["perturbed"] == pytest.approx(0.5, abs=1e-4)
    assert summary["theoretical_flops"] == pytest.approx(1.647, abs=1e-3)
    assert set(metrics[0]["mask_density"]) == {"stem.0", "stem.1", "layer1.0", "layer2.0", "layer3.0", "head.2"}
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["torch"] == torch.__version__


def test_a_new_run_does_not_write_over_an_old_one(tmp_path):
    train(recipe("sgd", "train.epochs=1"), tmp_path / "run", device=CPU)
    with pytest.raises(RecipeError, match="holds a run already; continue it with --resume"):
        train(recipe("sgd"), tmp_path / "run", device=CPU)


def test_seeds_matter_and_repeat(tmp_path):
    results = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(recipe("sam", f"train.seed={seed}"), tmp_path / name, device=CPU)
        results[name] = final_weights(tmp_path / name)
    assert same(results["a"], results["b"])
    assert not same(results["a"], results["c"])


SETTINGS = [
    ["train.precision=bf16"],
    pytest.param(["train.precision=fp16"], marks=pytest.mark.slow, id="train.precision=fp16"),  # slow on a CPU
    ["optimizer.name=adamw", "optimizer.lr=0.003"],
    ["train.channels_last=false"],
    ["mask.name=norm"],
    ["mask.name=random"],
    ["mask.name=suffix", "mask.cut=layer2", "mask.inner=random"],
    ["ascent=momentum"],
    ["schedule=every-nth", "schedule.n=5"],
    ["sam.adaptive=true", "sam.rho=1"],
    ["train.label_smoothing=0.1"],
    ["model.name=wrn-10-1"],
]


@pytest.mark.parametrize("settings", SETTINGS, ids=", ".join)
def test_every_setting_trains(tmp_path, settings):
    summary = train(recipe("sam", "train.epochs=3", *settings), tmp_path / "run", device=CPU)
    assert summary["test_accuracy"] > 0.5


REFUSED = [  # by the objects themselves, which know nothing of recipes
    ("sam", ["mask=suffix", "mask.cut=layer9"], r"^mask\.cut must be .*'layer9'"),
    ("ssam-f", ["mask.samples=5000"], r"^mask\.samples must be .*5000"),
    ("sam", ["schedule=last-steps", "schedule.fraction=1e-9"], r"^schedule\.fraction must be .* but is 1e-09$"),
    ("ssam-f", ["ascent=momentum"], r"^mask must be None with MomentumAscent"),
    ("sam", ["mask=suffix", "mask.cut=layer2", "mask.inner=suffix", "mask.inner.cut=layer3"], r"^mask\.inner must be a mask without a cut"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "settings", "message"), REFUSED, ids=[", ".join(r[1]) for r in REFUSED])
def test_what_constructors_refuse_is_shown_with_the_key(tmp_path, method, settings, message):
    with pytest.raises(UserError, match=message):
        train(recipe(method, *settings), tmp_path / "run", device=CPU)
    assert not (tmp_path / "run").exists()


def test_a_validation_split_leaves_the_test_images_alone(tmp_path):
    summary = train(recipe("sgd", "data.validation=200"), tmp_path / "run", device=CPU)
    assert summary["evaluated_on"] == "validation"
    assert RunDirectory(tmp_path / "run").metrics()[-1]["steps"] == 20  # 1,000 images are left


def test_tensorboard_without_the_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    message = re.escape("TensorBoard events need the package tensorboard: pip install 'sparsam[tensorboard]'")
    with pytest.raises(ImportError, match=message):
        train(recipe("sgd", "train.epochs=1", "train.tensorboard=true"), tmp_path / "run", device=CPU)


def test_tensorboard_events(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra [tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(recipe("ssam-d", "train.tensorboard=true"), tmp_path / "run", device=CPU)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    metrics = RunDirectory(tmp_path / "run").metrics()
    for key in ("train_loss", "test_accuracy", "perturbed"):
        assert [e.value for e in events.Scalars(key)] == pytest.approx([m[key] for m in metrics], rel=1e-6)
    assert "mask_density/layer1.0" in events.Tags()["scalars"]


def test_without_checkpoints_only_the_last_weights_are_written(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr("sparsam.training.trainer.save_checkpoint", lambda path, state: written.append(path.name))
    train(recipe("sgd", "train.checkpoint_epochs=none"), tmp_path / "run", device=CPU)
    assert written == ["last.pt"]


def share_from(cut):
    """The share of the weights of the digits' network that follow a cut."""
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in network().named_children()}
    names = list(sizes)
    return sum(sizes[name] for name in names[names.index(cut) :]) / sum(sizes.values())


def network():
    return build_network(recipe("sgd"), 10, 1, CPU)


@pytest.mark.parametrize("before", ["none", "momentum"])
def test_only_steps_of_two_passes_count_as_perturbed(tmp_path, before):
    """The first quarter of the steps, half of the first epoch, are base steps or take one pass."""
    settings = ["mask.cut=layer3", "schedule.fraction=0.75", f"schedule.before={before}", "sam.rho=0.05"]
    summary = train(recipe("ssam-c", *settings), tmp_path / "run", device=CPU)
    share = share_from("layer3")
    first, second = RunDirectory(tmp_path / "run").metrics()
    assert first["perturbed"] == pytest.approx(share / 2)
    assert first["mask_density"]["layer3.0"] == 0.5
    assert second["perturbed"] == pytest.approx(share)
    assert second["mask_density"]["layer3.0"] == 1
    assert second["mask_density"]["layer2.0"] == 0
    assert (first["rho"], second["rho"]) == (0.05, 0.05)
    assert summary["perturbed"] == pytest.approx(0.75 * share)
    assert summary["theoretical_flops"] is None  # the paper's formula is not for cuts


def test_every_nth_step_counts_as_perturbed(tmp_path):
    """Of 24 steps, 0, 5, 10, 15 and 20: three in the first epoch, two in the second."""
    summary = train(recipe("ssam-d", "schedule=every-nth", "schedule.n=5"), tmp_path / "run", device=CPU)
    epochs = RunDirectory(tmp_path / "run").metrics()
    assert [m["perturbed"] for m in epochs] == pytest.approx([0.5 * 3 / 12, 0.5 * 2 / 12], abs=1e-4)
    assert summary["perturbed"] == pytest.approx(0.5 * 5 / 24, abs=1e-4)
    assert summary["theoretical_flops"] == pytest.approx(1 + 5 / 24 * (1 - 0.706 / 2), abs=1e-3)


def test_an_epoch_of_one_pass_is_recorded_as_such(tmp_path):
    """And its time counts for what it is, with the epochs of its sort."""
    settings = ["mask.cut=layer3", "sam.rho=0.05"]
    summary = train(recipe("momentum", *settings), tmp_path / "run", device=CPU)
    first, second = RunDirectory(tmp_path / "run").metrics()
    assert (first["rho"], second["rho"]) == (None, 0.05)
    assert (first["perturbed"], set(first["mask_density"].values())) == (0, {0})
    objective = load_objective(tmp_path / "run", samples=10)
    names = [name for name, _ in objective.model.named_parameters()]
    mask = dict(zip(names, run_mask(tmp_path / "run", objective), strict=True))
    assert {name.split(".")[0] for name, m in mask.items() if m is True} == {"layer3", "head"}
    assert summary["step_ms"] == pytest.approx((first["step_ms"] + second["step_ms"]) / 2)


def test_momentum_sam_has_a_radius_and_perturbs_no_mask(tmp_path):
    summary = train(recipe("sam", "ascent=momentum", "train.epochs=1"), tmp_path / "run", device=CPU)
    (epoch,) = RunDirectory(tmp_path / "run").metrics()
    assert (epoch["rho"], epoch["perturbed"]) == (0.1, 0)
    assert summary["theoretical_flops"] == 1


def test_how_far_a_mask_moves(tmp_path):
    """Against masks that are kept here, epoch by epoch."""
    kept, masks = [], []

    class Keeping(Progress):
        def epoch_done(self, metrics):
            kept.append((metrics["mask_kept"], metrics["mask_kept_since_start"]))
            masks.append(torch.cat([m.flatten() for m in trainer.opt.masks()]))

    r = recipe("ssam-d", "train.epochs=4")
    trainer = new_run(r, tmp_path / "run", device=CPU, progress=Keeping())
    trainer.run()
    assert kept[0] == (None, None)
    for i in range(1, 4):
        expected = [int((masks[i] & masks[j]).sum()) / int(masks[i].sum()) for j in (i - 1, 0)]
        assert kept[i] == tuple(expected)
        assert 0.2 < kept[i][1] <= kept[i][0] < 1 or kept[i][0] == kept[i][1]
    sam = train(recipe("sam"), tmp_path / "sam", device=CPU)
    assert sam["epochs"] == 2
    assert RunDirectory(tmp_path / "sam").metrics()[1]["mask_kept"] is None


@pytest.mark.parametrize("method", ["sgd", "sam"])
def test_batchnorm_can_be_refreshed_at_the_end(tmp_path, method):
    """Both accuracies are recorded; weights, statistics and the headline are those of a run without it."""
    train(recipe(method), tmp_path / "plain", device=CPU)
    r = recipe(method, "train.refresh_batchnorm=3")
    summary = train(r, tmp_path / "fresh", device=CPU)
    metrics, plain = (RunDirectory(tmp_path / name).metrics() for name in ("fresh", "plain"))
    assert same(final_weights(tmp_path / "fresh"), final_weights(tmp_path / "plain"))
    assert summary["test_accuracy"] == metrics[-1]["test_accuracy"] == plain[-1]["test_accuracy"]
    assert "fresh_test_accuracy" not in metrics[0]

    loader = build_loader(r, CPU)
    model = build_network(r, loader.classes, loader.channels, CPU)
    model.load_state_dict(torch.load(tmp_path / "fresh" / "checkpoints" / "last.pt", weights_only=True)["model"])
    batches = [x.contiguous(memory_format=torch.channels_last) for x, _ in islice(loader.epoch(2), 3)]
    refresh_batchnorm(model, batches)
    model.eval()
    with torch.no_grad():
        outputs, y = (torch.cat(parts) for parts in zip(*((model(x), y) for x, y in loader.evaluation()), strict=True))
    assert metrics[-1]["fresh_test_accuracy"] == (outputs.argmax(1) == y).double().mean().item()
    assert metrics[-1]["fresh_test_loss"] == pytest.approx(F.cross_entropy(outputs, y).item(), rel=1e-5)
    assert metrics[-1]["fresh_test_loss"] != metrics[-1]["test_loss"]
    assert summary["extra"] == {"Accuracy with fresh BatchNorm, %": 100 * metrics[-1]["fresh_test_accuracy"]}


def test_a_compiled_run_is_measured_without_compiling(tmp_path):
    """Compiling takes longer than what is measured."""
    train(recipe("sgd", "train.max_steps=1"), tmp_path / "run", device=CPU)
    file = tmp_path / "run" / "recipe.json"
    file.write_text(file.read_text().replace('"compile": false', '"compile": true'))
    assert RunDirectory(tmp_path / "run").recipe().train.compile
    objective = load_objective(tmp_path / "run", samples=10)
    assert not any(is_compiled(module) for module in objective.model.modules())
