"""The trainer: its numbers, its files, and runs that are stopped and taken up again."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from cases import same
from sparsam.analysis.run_objective import load_objective, run_mask
from sparsam.runs.build import build_loader, build_network
from sparsam.runs.checkpoint import load_checkpoint
from sparsam.runs.directory import RunDirectory
from sparsam.runs.files import RunError
from sparsam.runs.recipe import RecipeError
from sparsam.training import Trainer, load_recipe, resume, train
from sparsam.training.comparison import compare_recipes
from sparsam.training.progress import Progress
from sparsam.training.trainer import Interrupted, new_run

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
METHODS = ["sgd", "sam", "ssam-f", "ssam-d", "ssam-c"]
NAMED = {  # a cut that is measured depends on a clock
    "ssam-c": ["mask.cut=layer3", "mask.late=true", "mask.late_share=0.75", "mask.momentum_rho=0.5"]
}
EVENLY = ["mask.late=false", "mask.late_share=0", "mask.momentum_rho=0"]
TIMES = {"seconds", "elapsed", "step_ms"}


def recipe(method="sam", *settings):
    return load_recipe(
        ROOT / f"recipes/digits-{method}.toml",
        ["train.epochs=2", "train.deterministic=true", *NAMED.get(method, []), *settings],
    )


def numbers(metrics):
    """All but the times."""
    return [{key: value for key, value in m.items() if key not in TIMES} for m in metrics]


def final_weights(path):
    return list(load_checkpoint(Path(path) / "checkpoints" / "last.pt", CPU)["model"].values())


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


def equal(one, other):
    """Tell whether two nested states are the same, bit for bit."""
    if isinstance(one, torch.Tensor):
        return same([one], [other])
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("method", METHODS)
def test_dying_in_an_evaluation_and_resuming_is_bit_exact(tmp_path, method, monkeypatch):
    """The checkpoint then stands after the last batch of the epoch, and the metrics of the epoch are yet to come."""
    settings = ["train.checkpoint_steps=12", "train.epochs=3"]
    train(recipe(method, *settings), tmp_path / "whole", device=CPU)
    evaluate, calls = Trainer.evaluate, []

    def dies(self):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return evaluate(self)

    monkeypatch.setattr(Trainer, "evaluate", dies)
    with pytest.raises(MemoryError):
        train(recipe(method, *settings), tmp_path / "died", device=CPU)
    monkeypatch.undo()
    saved = load_checkpoint(tmp_path / "died" / "checkpoints" / "last.pt", CPU)
    assert (saved["epoch"], saved["batch"]) == (1, 12)
    with (tmp_path / "died" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "half a li')
    resume(tmp_path / "died", device=CPU)
    runs = [RunDirectory(tmp_path / name) for name in ("whole", "died")]
    assert numbers(runs[0].metrics()) == numbers(runs[1].metrics())
    states = [load_checkpoint(run.last, CPU) for run in runs]
    for key in ("model", "optimizer", "rng", "best"):
        assert equal(states[0][key], states[1][key]), key


def test_a_run_can_move_to_a_device_that_keeps_numbers_in_tensors(tmp_path):
    """As on CUDA, where a captured step reads lr and rho from tensors: loading must leave them there."""
    train(recipe("sam"), tmp_path / "run", device=CPU)
    trainer = Trainer(recipe("sam"), RunDirectory(tmp_path / "run"), device=CPU)
    group = trainer.opt.param_groups[0]
    group["lr"], group["rho"], group["fused"] = torch.tensor(9.0), torch.tensor(9.0), True
    lr, rho = group["lr"], group["rho"]
    trainer.load(tmp_path / "run" / "checkpoints" / "last.pt")
    group = trainer.opt.param_groups[0]
    assert group["lr"] is lr
    assert group["rho"] is rho
    assert rho.item() == pytest.approx(0.1)
    assert 0 < lr.item() < 0.05
    assert group["fused"] is True


@pytest.mark.filterwarnings("ignore")  # of dynamo, about itself
def test_compiled_blocks_have_the_same_numbers(tmp_path, monkeypatch):
    import torch.nn as nn

    compile_module = nn.Module.compile
    compiled = []
    monkeypatch.setattr(
        nn.Module, "compile", lambda self: (compiled.append(self), compile_module(self, backend="aot_eager"))
    )
    for name, setting in (("plain", "false"), ("compiled", "true")):
        train(recipe("sam", f"train.compile={setting}", "train.epochs=1"), tmp_path / name, device=CPU)
    assert len(compiled) == 9
    plain, other = (RunDirectory(tmp_path / name).metrics() for name in ("plain", "compiled"))
    assert plain[0]["train_loss"] == pytest.approx(other[0]["train_loss"], rel=1e-4)


def test_masks_follow_the_runs_seed(tmp_path):
    masks = []
    for seed in (0, 1):
        train(recipe("ssam-d", f"train.seed={seed}", "train.epochs=1"), tmp_path / str(seed), device=CPU)
        saved = load_checkpoint(tmp_path / str(seed) / "checkpoints" / "last.pt", CPU)
        masks.append([m for m in saved["optimizer"]["sparsam"]["selection"] if isinstance(m, torch.Tensor)])
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


FIXED = ("train.epochs=3", "train.deterministic=true")


def start(method, path, *settings, resume_run=False):
    arguments = (
        ["--resume", str(path)]
        if resume_run
        else [f"{ROOT}/recipes/digits-{method}.toml", "--output", str(path)]
        + [part for s in (*FIXED, *NAMED.get(method, []), *settings) for part in ("--set", s)]
    )
    return subprocess.Popen(
        [sys.executable, "-m", "sparsam", "train", "--device", "cpu", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process, code=0):
    output = process.communicate(timeout=300)[0]
    assert process.returncode == code, output
    return output


def wait_for_checkpoint(path, batch):
    """Wait until a checkpoint in the midst of the second epoch is there."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        last = path / "checkpoints" / "last.pt"
        if last.exists():
            saved = load_checkpoint(last, CPU)
            if saved["epoch"] == 1 and saved["batch"] >= batch:
                return
        time.sleep(0.005)
    raise TimeoutError("no checkpoint in the midst of the second epoch")


@pytest.mark.parametrize("method", METHODS)
def test_kill_9_in_mid_epoch_and_resume_is_bit_exact(tmp_path, method):
    whole = start(method, tmp_path / "whole", "train.checkpoint_steps=1")
    finish(whole)
    killed = start(method, tmp_path / "killed", "train.checkpoint_steps=1")
    wait_for_checkpoint(tmp_path / "killed", 3)
    killed.kill()
    finish(killed, code=-signal.SIGKILL)
    saved = load_checkpoint(tmp_path / "killed" / "checkpoints" / "last.pt", CPU)
    assert (saved["epoch"], saved["batch"]) >= (1, 3)
    assert not (tmp_path / "killed" / "summary.json").exists()

    resumed = start(method, tmp_path / "killed", resume_run=True)
    finish(resumed)
    runs = [RunDirectory(tmp_path / name) for name in ("whole", "killed")]
    assert numbers(runs[0].metrics()) == numbers(runs[1].metrics())
    assert same(final_weights(runs[0].path), final_weights(runs[1].path))
    optimizers = [load_checkpoint(run.last, CPU)["optimizer"] for run in runs]
    assert equal(*optimizers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_exit_cleanly(tmp_path, number):
    stopped = start("ssam-d", tmp_path / "stopped", "train.epochs=20")
    deadline = time.monotonic() + 120
    while not (tmp_path / "stopped" / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    stopped.send_signal(number)
    output = finish(stopped, code=1)
    assert "stopped in epoch" in output
    assert "--resume" in output
    assert "Traceback" not in output
    saved = load_checkpoint(tmp_path / "stopped" / "checkpoints" / "last.pt", CPU)
    assert saved["epoch"] >= 1
    resumed = start("ssam-d", tmp_path / "stopped", resume_run=True)
    finish(resumed)
    assert [m["epoch"] for m in RunDirectory(tmp_path / "stopped").metrics()] == list(range(1, 21))


def test_resuming_a_finished_run_returns_its_summary(tmp_path):
    summary = train(recipe("sgd", "train.epochs=1"), tmp_path / "run", device=CPU)
    assert resume(tmp_path / "run", device=CPU) == summary


def test_resume_without_a_checkpoint_starts_again(tmp_path):
    r = recipe("sgd", "train.epochs=1")
    RunDirectory(tmp_path / "run").create(r, {})
    resume(tmp_path / "run", device=CPU)
    train(r, tmp_path / "other", device=CPU)
    assert same(final_weights(tmp_path / "run"), final_weights(tmp_path / "other"))


def test_checkpoints_are_atomic_and_need_no_pickle(tmp_path, monkeypatch):
    train(recipe("sgd", "train.epochs=1"), tmp_path / "run", device=CPU)
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    before = last.read_bytes()
    monkeypatch.setattr(torch, "save", lambda content, file: (file.write(b"half"), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        from sparsam.runs.checkpoint import save_checkpoint

        save_checkpoint(last, {})
    assert last.read_bytes() == before
    sentinel = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {sentinel}",)

    monkeypatch.undo()
    torch.save({"model": Evil()}, last)
    with pytest.raises(RunError, match=r"last\.pt cannot be read"):
        load_checkpoint(last, CPU)
    assert not sentinel.exists()
    last.write_bytes(before[:1000])
    with pytest.raises(RunError, match=r"last\.pt cannot be read"):
        load_checkpoint(last, CPU)
    with pytest.raises(RunError, match="there is no checkpoint at"):
        load_checkpoint(tmp_path / "none.pt", CPU)


@pytest.mark.parametrize("settings", [["train.precision=bf16"], ["train.precision=fp16"], ["optimizer.name=adamw", "optimizer.lr=0.003"],
                                      ["train.channels_last=false"], ["mask.kind=norm"], ["mask.kind=random"], ["sam.adaptive=true", "sam.rho=1"],
                                      ["train.label_smoothing=0.1"], ["model.name=wrn-10-1"]])  # fmt: skip
def test_every_setting_trains(tmp_path, settings):
    summary = train(recipe("sam", "train.epochs=6", *settings), tmp_path / "run", device=CPU)
    assert summary["test_accuracy"] > 0.5


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


def test_runs_side_by_side_are_those_of_runs_alone(tmp_path):
    recipes = [ROOT / "recipes/digits-sgd.toml", ROOT / "recipes/digits-sam.toml"]
    for at_once in (1, 3):
        overrides = ["train.epochs=2", "train.deterministic=true"]
        compare_recipes(recipes, 2, tmp_path / str(at_once), overrides=overrides, device=CPU, at_once=at_once)
    for path in sorted((tmp_path / "1").iterdir()):
        alone, beside = RunDirectory(path), RunDirectory(tmp_path / "3" / path.name)
        assert numbers(alone.metrics()) == numbers(beside.metrics())
        assert same(final_weights(alone.path), final_weights(beside.path))


def test_runs_side_by_side_are_all_saved_when_they_are_stopped(tmp_path):
    recipes, overrides = [ROOT / "recipes/digits-sgd.toml"], ["train.epochs=2", "train.deterministic=true"]
    step, steps = Trainer._step, []

    def stops(self):
        steps.append(self)
        if len(steps) == 7:
            signal.raise_signal(signal.SIGTERM)
        return step(self)

    options = {"overrides": overrides, "device": CPU, "at_once": 2}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted, match="stopped in epoch 1 after batch"):
        patch.setattr(Trainer, "_step", stops)
        compare_recipes(recipes, 3, tmp_path / "stopped", **options)
    paths = sorted((tmp_path / "stopped").iterdir())
    assert len(paths) == 2  # the third was not begun
    assert {load_checkpoint(path / "checkpoints" / "last.pt", CPU)["batch"] for path in paths} <= {3, 4}
    compare_recipes(recipes, 3, tmp_path / "stopped", **options)
    compare_recipes(recipes, 3, tmp_path / "whole", **options)
    for path in sorted((tmp_path / "whole").iterdir()):
        assert same(final_weights(path), final_weights(tmp_path / "stopped" / path.name))


def test_without_checkpoints_only_the_last_weights_are_written(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr("sparsam.training.trainer.save_checkpoint", lambda path, state: written.append(path.name))
    train(recipe("sgd", "train.checkpoint_epochs=0"), tmp_path / "run", device=CPU)
    assert written == ["last.pt"]


def test_a_measured_cut_is_told_and_kept(tmp_path):
    """The budget is so large that the earliest cut fits, whatever the clock says."""
    told = []

    class Telling(Progress):
        def remark(self, text):
            told.append(text)

    r = recipe("ssam-c", "mask.cut=", *EVENLY, "mask.budget=1000", "train.epochs=1")
    summary = train(r, tmp_path / "run", device=CPU, progress=Telling())
    assert summary["cut"] == "stem"
    assert summary["perturbed"] == 1.0
    (remark,) = set(told)
    assert re.match(
        r"perturbed is what lies behind the cut before 'stem', where a step was measured to cost \d", remark
    )
    saved = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt", CPU)
    assert saved["optimizer"]["sparsam"]["behind"]["cut"] == "stem"


@pytest.mark.parametrize("at_once", [1, 2])
def test_seeds_share_what_the_first_has_measured(tmp_path, monkeypatch, at_once):
    asked, told = [], []
    monkeypatch.setattr("sparsam.behind.late_costs", lambda *_, **__: asked.append(1) or (1.1, 1.6))
    monkeypatch.setattr("sparsam.training.trainer.Progress.remark", lambda self, text: told.append(text))
    shutil.copy(ROOT / "recipes/digits-sgd.toml", tmp_path)
    (tmp_path / "r.toml").write_text('extends = "digits-sgd.toml"\n[sam]\nenabled = true\n[mask]\nkind = "budget"\n')
    settings = ["mask.budget=1.3", "mask.late=true", "mask.momentum_rho=1", "train.epochs=1"]
    options = {"overrides": settings, "device": CPU, "at_once": at_once}
    for run in compare_recipes([tmp_path / "r.toml"], seeds=2, output=tmp_path, **options):
        summary = RunDirectory(run).summary()
        assert (summary["cut"], summary["late_share"]) == (None, 0.4)  # 0.2 / 0.5
        assert summary["perturbed"] == pytest.approx(4 / 12)  # of 12 steps
        assert summary["theoretical_flops"] == pytest.approx(1 + 4 / 12)
    assert len(asked) == 1
    assert set(told) == {
        "everything is perturbed in the last 40 % of the steps, where a step was measured to cost 1.60 base steps; the "
        "others take one pass, moved along the momentum by 1",
        "everything is perturbed in the last 40 % of the steps; the others take one pass, moved along the momentum by 1",
    }


def test_a_run_is_gone_before_the_next_is_made(tmp_path, monkeypatch):
    """Its memory would count in the next one's."""
    made, alive = [], []

    def making(*arguments, **options):
        alive.append(sum(run() is not None for run in made))
        run = new_run(*arguments, **options)
        made.append(weakref.ref(run))
        return run

    monkeypatch.setattr("sparsam.training.comparison.new_run", making)
    options = {"overrides": ["train.epochs=1"], "device": CPU}
    compare_recipes([ROOT / "recipes/digits-sgd.toml"], seeds=3, output=tmp_path, **options)
    assert alive == [0, 0, 0]


def test_a_budget_that_is_too_small_is_told_with_its_recipe(tmp_path, monkeypatch):
    monkeypatch.setattr("sparsam.behind.late_costs", lambda *_, **__: (1.1, 1.6))
    shutil.copy(ROOT / "recipes/digits-sgd.toml", tmp_path)
    (tmp_path / "r.toml").write_text('extends = "digits-sgd.toml"\n[sam]\nenabled = true\n[mask]\nkind = "budget"\n')
    settings = ["mask.budget=1.05", "mask.late=true", "mask.momentum_rho=1", "train.epochs=1"]
    with pytest.raises(RecipeError, match=r"^r, seed 0: budget must be at least 1.142, .* cost 1.1, but is 1.05$"):
        compare_recipes([tmp_path / "r.toml"], seeds=1, output=tmp_path, overrides=settings, device=CPU)


def test_the_share_of_perturbed_weights_counts_steps_of_one_pass(tmp_path):
    """The first quarter of the steps: the first half of the first epoch."""
    summary = train(recipe("ssam-c"), tmp_path / "run", device=CPU)
    model = build_network(recipe("ssam-c"), 10, 1, CPU)
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    behind = (sizes["layer3"] + sizes["head"]) / sum(sizes.values())
    first, second = RunDirectory(tmp_path / "run").metrics()
    assert first["perturbed"] == pytest.approx(behind / 2)
    assert first["mask_density"]["layer3.0"] == 0.5
    assert second["perturbed"] == pytest.approx(behind)
    assert second["mask_density"]["layer3.0"] == 1
    assert second["mask_density"]["layer2.0"] == 0
    assert (first["rho"], second["rho"]) == (0.05, 0.05)
    assert summary["perturbed"] == pytest.approx(0.75 * behind)
    assert summary["theoretical_flops"] == pytest.approx(0.25 + 0.75 * (2 - 0.706 * (1 - behind)))


def test_the_share_of_perturbed_weights_counts_full_steps(tmp_path):
    """Every fourth, of twelve in an epoch."""
    settings = [*EVENLY, "mask.full=0.25", "mask.full_rho=0.3"]
    summary = train(recipe("ssam-c", *settings), tmp_path / "run", device=CPU)
    model = build_network(recipe("ssam-c"), 10, 1, CPU)
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    behind = (sizes["layer3"] + sizes["head"]) / sum(sizes.values())
    assert summary["perturbed"] == pytest.approx(0.75 * behind + 0.25)
    assert [m["rho"] for m in RunDirectory(tmp_path / "run").metrics()] == [0.05, 0.05]


def test_an_epoch_of_one_pass_says_so(tmp_path):
    """And its time counts for what it is, with the epochs of its kind."""
    summary = train(recipe("ssam-c", "mask.late_share=0.5"), tmp_path / "run", device=CPU)
    first, second = RunDirectory(tmp_path / "run").metrics()
    assert (first["rho"], second["rho"]) == (None, 0.05)
    assert (first["perturbed"], set(first["mask_density"].values())) == (0, {0})
    objective = load_objective(tmp_path / "run", samples=10)
    names = [name for name, _ in objective.model.named_parameters()]
    mask = dict(zip(names, run_mask(tmp_path / "run", objective), strict=True))
    assert {name.split(".")[0] for name, m in mask.items() if m is True} == {"layer3", "head"}
    assert summary["step_ms"] == pytest.approx((first["step_ms"] + second["step_ms"]) / 2)


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
