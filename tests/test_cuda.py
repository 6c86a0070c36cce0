"""What only a GPU can show: no waiting, few kernels, graphs, several devices."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from cases import MASKS, Policy, magnitude, optimizer, same, task, weights
from sparsam import (
    SAM,
    CapturedStep,
    DynamicMask,
    EveryNth,
    FriendlyAscent,
    LastSteps,
    MomentumAscent,
    RandomMask,
    SuffixMask,
    TopKMask,
)
from sparsam.analysis.fusion import fastest
from sparsam.analysis.hessian import top_eigenvalues
from sparsam.analysis.landscape import loss_landscape
from sparsam.analysis.objective import Objective
from sparsam.models import build_model
from sparsam.runs.directory import RunDirectory

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
    pytest.mark.filterwarnings("ignore:the second pass is computed in full.*only step:UserWarning"),
]

DETERMINISTIC_SCORES = ["none", "topk", "norm", "nm"]  # the others draw random numbers, which differ by device


def cuda_task(**options):
    t = task(**options)
    return t._replace(model=t.model.cuda(), x=t.x.cuda(), y=t.y.cuda())


@contextlib.contextmanager
def no_waiting():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


POLICIES = [
    *(Policy(mask) for mask in MASKS),
    Policy(ascent="friendly"),
    Policy(ascent="momentum"),
    Policy("random", "friendly"),
    Policy("dynamic", "friendly", "every-nth"),
    Policy("suffix", "friendly", "last-steps"),
    Policy("suffix", "friendly", "last-steps-momentum"),
    *(Policy(mask, share=0.25) for mask in ("none", "random", "dynamic")),
    Policy("random", "friendly", share=0.25),
]


@pytest.mark.parametrize("case", POLICIES, ids=str)
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_step_without_a_due_update_never_waits(case, adaptive):
    t = cuda_task(dtype=torch.float32, dropout=0.3)
    opt = optimizer(t, adaptive=adaptive, **case._asdict())
    # The mask is made in the first step of two passes, and a path to a cut is proven in two: both wait.
    for _ in range(5 if case.schedule.startswith("last") else 4 if case.mask.startswith("suffix") else 1):
        opt.step(t.closure(opt))
    with no_waiting():
        opt.step(t.closure(opt))
        if opt.share < 1:
            return  # only closures have a share
        opt.zero_grad()
        t.loss().backward()
        with opt.perturbed():
            opt.zero_grad()
            t.loss().backward()
        opt.step()


@pytest.mark.parametrize("mask", ["random", "dynamic"])
def test_a_due_update_waits_in_one_place(mask):
    t = cuda_task(dtype=torch.float32)
    opt = optimizer(t, mask)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as record:
            opt.step(t.closure(opt))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(record) == 1


@pytest.mark.parametrize("mask", DETERMINISTIC_SCORES)
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_cuda_equals_cpu(mask, adaptive, share):
    cpu, gpu = task(), cuda_task()
    for t in (cpu, gpu):
        opt = optimizer(t, mask, adaptive=adaptive, share=share)
        for _ in range(5):
            opt.step(t.closure(opt))
    for a, b in zip(weights(cpu.model), weights(gpu.model), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("sparsity", [0.013, 0.5, 0.9])
def test_counts_on_the_device(sparsity):
    model = nn.Linear(1000, 999).cuda()
    total = 1000 * 999 + 999
    for mask in (
        RandomMask(sparsity, interval=1),
        DynamicMask(sparsity, interval=1, total_steps=9),
        TopKMask(sparsity, lambda ps: [torch.zeros_like(p) for p in ps]),
    ):
        opt = SAM(model.parameters(), torch.optim.SGD, mask=mask, lr=0.1)
        for _ in range(3):
            opt.step(
                lambda opt=opt: (opt.zero_grad(), model(torch.randn(4, 1000, device="cuda")).square().sum().backward())
            )
            assert sum(int(m.sum()) for m in opt.masks()) == round((1 - sparsity) * total)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("mask", [None, RandomMask(0.5)])
@pytest.mark.parametrize("ascent", [None, FriendlyAscent()])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_kernels_does_not_grow_with_the_number_of_layers(adaptive, mask, ascent, channels_last, dtype):
    def kernels(layers):
        model = nn.Sequential(*[nn.Conv2d(8, 8, 3) for _ in range(layers)]).to("cuda", dtype)
        if channels_last:
            model.to(memory_format=torch.channels_last)
        opt = SAM(model.parameters(), torch.optim.SGD, mask=mask, ascent=ascent, adaptive=adaptive, lr=0.1)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        with opt.perturbed():
            pass
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler, opt.perturbed():
            pass
        return sum(event.count for event in profiler.key_averages())

    few, many = kernels(3), kernels(24)
    assert few > 0
    assert many <= few + 10  # a foreach kernel takes some hundred tensors at once


@pytest.mark.parametrize(
    ("mask", "share"),
    [("none", 1.0), ("random-fixed", 1.0), ("norm", 1.0), ("suffix", 1.0), ("none", 0.25), ("random-fixed", 0.25)],
)
@pytest.mark.parametrize("ascent", [None, FriendlyAscent()])
def test_a_whole_step_in_a_cuda_graph_equals_eager(mask, share, ascent):
    """rho and lr are device tensors, so that schedules reach the captured step."""
    results = []
    for captured in (False, True):
        t = cuda_task(dtype=torch.float32)
        rho, lr = torch.tensor(0.1, device="cuda"), torch.tensor(0.05, device="cuda")
        opt = SAM(
            t.model.parameters(),
            torch.optim.SGD,
            rho=rho,
            mask=MASKS[mask](t),
            ascent=ascent,
            model=t.model,
            share=share,
            lr=lr,
            momentum=0.9,
            fused=True,
        )
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # masks and momentum exist before the capture
                opt.step(t.closure(opt))
        torch.cuda.current_stream().wait_stream(stream)

        def step(t=t, opt=opt):
            opt.step(t.closure(opt))

        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        for k in range(4):
            rho.fill_(0.1 / (k + 1))
            lr.fill_(0.05 / (k + 1))
            step()
        results.append(weights(t.model))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cpu_first", [False, True])
def test_weights_on_several_devices_while_the_gpu_is_busy(cpu_first):
    """A copy from the GPU that does not wait would read what an earlier step left."""
    busy = torch.randn(4096, 4096, device="cuda")
    for k in range(1, 30):
        on_cpu, on_gpu = nn.Parameter(torch.tensor([3.0 * k])), nn.Parameter(torch.tensor([4.0 * k], device="cuda"))
        opt = SAM([on_cpu, on_gpu] if cpu_first else [on_gpu, on_cpu], torch.optim.SGD, rho=0.5 * k, lr=0.1)
        on_cpu.grad, on_gpu.grad = on_cpu.detach().clone(), on_gpu.detach().clone()
        for _ in range(4):
            busy = busy @ busy / 64
        with opt.perturbed():
            torch.testing.assert_close(on_cpu.detach(), torch.tensor([3.3 * k]))
            torch.testing.assert_close(on_gpu.detach().cpu(), torch.tensor([4.4 * k]))


def test_weights_on_several_devices():
    on_cpu, on_gpu = nn.Parameter(torch.tensor([3.0])), nn.Parameter(torch.tensor([4.0], device="cuda"))
    opt = SAM([on_cpu, on_gpu], torch.optim.SGD, rho=0.5, lr=0.1)
    on_cpu.grad, on_gpu.grad = torch.tensor([3.0]), torch.tensor([4.0], device="cuda")
    with opt.perturbed():
        torch.testing.assert_close(on_cpu.detach(), torch.tensor([3.3]))
        torch.testing.assert_close(on_gpu.detach().cpu(), torch.tensor([4.4]))
    assert on_cpu.item() == 3.0
    assert on_gpu.item() == 4.0
    opt = SAM([on_cpu, on_gpu], torch.optim.SGD, mask=TopKMask(0.5, magnitude), rho=0.5, lr=0.1)
    with opt.perturbed():
        assert [m.item() for m in opt.masks()] == [False, True]


@pytest.mark.parametrize("mask", MASKS)
def test_dropout_draws_the_same_numbers_in_both_passes(mask):
    t = cuda_task(dtype=torch.float32, dropout=0.5)
    opt = optimizer(t, mask, rho=0.0)
    steps = []
    for _ in range(4):
        losses = []
        opt.step(lambda losses=losses: losses.append(t.closure(opt)().item()))
        assert len(losses) in (2, 3)  # a path to a cut is proven in its first two steps
        assert len(set(losses)) == 1
        steps.append(losses[0])
    assert len(set(steps)) == 4


def test_fp16_with_grad_scaler_overflows_and_recovers():
    t = cuda_task(dtype=torch.float32)
    opt = optimizer(t, "random")
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    skipped = 0
    for _ in range(30):
        before = [p.detach().clone() for p in t.model.parameters()]
        with torch.autocast("cuda", torch.float16):
            opt.zero_grad()
            scaler.scale(t.loss()).backward()
            with opt.perturbed():
                opt.zero_grad()
                scaler.scale(t.loss()).backward()
        scale = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
            assert same([p.detach() for p in t.model.parameters()], before)
    assert 0 < skipped < 30
    with torch.no_grad():
        assert F.cross_entropy(t.model(t.x), t.y) < 1.0


@pytest.mark.parametrize("method", ["sgd", "sam", "sam sam.share=0.25", "ssam-f", "ssam-d", "ssam-c", "thrifty"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_in_a_graph_has_the_same_numbers_as_eager(tmp_path, method, precision):
    from sparsam.training import load_recipe, train

    metrics = []
    name, *changes = method.split()
    for graph in (True, False):
        settings = [f"train.cuda_graph={str(graph).lower()}", f"train.precision={precision}", "train.epochs=3"]
        recipe = load_recipe(f"digits-{name}", [*settings, *changes])
        train(recipe, tmp_path / str(graph), device=torch.device("cuda"))
        metrics.append(RunDirectory(tmp_path / str(graph)).metrics())
    for captured, eager in zip(*metrics, strict=True):
        assert captured["train_loss"] == pytest.approx(eager["train_loss"], rel=2e-2)  # cuDNN chooses freely
        assert captured["lr"] == eager["lr"]
        assert captured["perturbed"] == eager["perturbed"]


def test_captured_runs_that_share_their_start_have_the_numbers_of_runs_alone(tmp_path):
    from sparsam.training.comparison import compare_recipes

    recipes, device = ["digits-sgd", "digits-thrifty"], torch.device("cuda")
    settings = ["train.epochs=4", "schedule.fraction=0.5", "sam.ramp_epochs=1.5"]
    for share, at_once in ((False, 1), (True, 2)):
        output = tmp_path / str(share)
        compare_recipes(recipes, 2, output, overrides=settings, device=device, at_once=at_once, share_start=share)
    for name in ("digits-thrifty-seed0", "digits-thrifty-seed1"):
        alone, shared = RunDirectory(tmp_path / "False" / name), RunDirectory(tmp_path / "True" / name)
        assert shared.read("environment.json").values["start"]["steps"] == 24  # of 48
        assert [m["rho"] for m in alone.metrics()[2:]] == pytest.approx([0.2 * 12 / 18, 0.2])
        for one, other in zip(alone.metrics(), shared.metrics(), strict=True):
            assert other["train_loss"] == pytest.approx(one["train_loss"], rel=2e-2)  # cuDNN chooses freely
            assert [other[key] for key in ("steps", "lr", "rho", "perturbed")] == [
                one[key] for key in ("steps", "lr", "rho", "perturbed")
            ]


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_model_that_draws_random_numbers_stays_eager_and_says_so(share):
    t = cuda_task(dtype=torch.float32, dropout=0.5)
    opt = optimizer(t, share=share)
    step = CapturedStep(opt, t.closure(opt))
    for _ in range(6):
        step()
    assert step.eager_because == "the model draws random numbers"
    assert opt.steps == 6


@pytest.mark.filterwarnings("ignore:this is step")  # beyond the total_steps of a schedule
@pytest.mark.parametrize(
    "case",
    [
        Policy("none"),
        Policy("random"),
        Policy("dynamic"),
        Policy("topk"),
        Policy("fisher"),
        Policy("suffix"),
        Policy("suffix-dynamic"),
        Policy(ascent="friendly"),
        Policy(ascent="momentum"),
        Policy("random", "friendly"),
        Policy("none", "friendly", "every-nth"),
        Policy("suffix", "friendly", "last-steps"),
        Policy("suffix", "friendly", "last-steps-momentum"),
        Policy("suffix-fisher", "gradient", "last-steps-friendly"),
        *(Policy(mask, share=0.25) for mask in ("none", "random", "dynamic", "fisher")),
        Policy(ascent="friendly", share=0.25),
        Policy("random", "friendly", "every-nth", share=0.25),
        Policy(schedule="last-steps", share=0.25),
    ],
    ids=str,
)
def test_captured_steps_equal_eager_ones(case):
    """Intervals end and ascents change in the midst of captured steps; all is as in eager steps."""
    results = []
    for captured in (False, True):
        t = cuda_task(dtype=torch.float32)
        opt = optimizer(t, momentum=0.5, **case._asdict())
        step = CapturedStep(opt, t.closure(opt)) if captured else (lambda t=t, opt=opt: opt.step(t.closure(opt)))
        losses = [step().item() for _ in range(17)]
        results.append((losses, weights(t.model), opt.masks(), opt.steps))
    (losses, w, masks, steps), (other_losses, other_w, other_masks, other_steps) = results
    assert losses == pytest.approx(other_losses, rel=1e-4)
    assert steps == other_steps == 17
    assert sum(int((a != b).sum()) for a, b in zip(masks, other_masks, strict=True)) <= 4  # near ties
    for a, b in zip(w, other_w, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("schedule", "left"), [(EveryNth(2), 2), (LastSteps(0.5, 20), 1), (LastSteps(0.5, 20, MomentumAscent(0.3)), 1)]
)
def test_each_ascent_is_captured_once(schedule, left):
    t = cuda_task(dtype=torch.float32)
    policy = {"mask": SuffixMask(t.model, "3"), "ascent": FriendlyAscent(), "schedule": schedule}
    opt = SAM(t.model.parameters(), torch.optim.SGD, rho=0.1, lr=0.05, momentum=0.9, **policy)
    step = CapturedStep(opt, t.closure(opt))
    captures = []
    capture, step._capture = step._capture, lambda: captures.append(1) or capture()
    for _ in range(20):
        step()
    assert len(captures) == 2
    assert len(step._graphs) == left  # the mask of the last steps has replaced what was captured before it


class Switched(nn.Module):
    """Takes an argument that is no tensor, so that each of its values is a path."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, way):
        h = torch.tanh(self.stem(x))
        return self.head(torch.tanh(self.body(h if way == 0 else h.square())))


@pytest.mark.parametrize(
    ("way", "because", "captures"),
    [
        (lambda step: 0, None, 1),
        (lambda step: int(step >= 3), None, 2),  # the fourth step, which is to be captured, takes a new path
        (lambda step: step % 2, "the model takes one path to the cut, then another", 3),
    ],
    ids=["one path", "another in the fourth step", "in turn"],
)
def test_a_new_path_is_not_proven_in_a_graph(way, because, captures):
    """Captured steps equal eager ones, and a path that is new where a step would be captured is proven eagerly."""
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        model, x, y = Switched().cuda(), torch.randn(16, 6, device="cuda"), torch.randn(16, 3, device="cuda")
        opt = SAM(model.parameters(), torch.optim.SGD, rho=0.1, mask=SuffixMask(model, "body"), lr=0.1, momentum=0.9)

        def closure(model=model, opt=opt, x=x, y=y):
            for p in model.parameters():  # zeros of one's own: gradients of a capture that was given up must not stay
                if p.grad is not None:
                    p.grad.zero_()
            loss = F.mse_loss(model(x, way(opt.steps)), y)
            loss.backward()
            return loss

        take, tried = CapturedStep(opt, closure), []
        take._capture = lambda capture=take._capture, tried=tried: tried.append(1) or capture()
        step = take if captured else (lambda opt=opt, closure=closure: opt.step(closure))
        losses = [step().item() for _ in range(20)]
        assert opt.steps == 20
        results.append((losses, weights(model)))
    assert (take.eager_because, len(tried)) == (because, captures)
    assert bool(take._graphs) == (because is None)
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_an_old_graph_among_garbage_does_not_end_a_capture():
    """A step with a graph becomes garbage while another is captured: Python's collector must wait."""
    old, freed = [], []

    def captured_step(during_capture):
        t = cuda_task(dtype=torch.float32)
        opt = optimizer(t)
        closure = t.closure(opt)

        def watched():
            if torch.cuda.is_current_stream_capturing():
                during_capture()
            return closure()

        step = CapturedStep(opt, watched)
        for _ in range(4):
            loss = step()
        assert step._graphs
        return step, loss.item()

    def drop():
        garbage = old[:]
        old.clear()
        garbage.append(garbage)  # so that only the collector frees it
        del garbage
        [[] for _ in range(1000)]  # which sets the collector off, if it is on

    step, first = captured_step(lambda: None)
    weakref.finalize(step, freed.append, True)
    old.append(step)
    del step
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        _, second = captured_step(drop)
    finally:
        gc.set_threshold(*thresholds)
    assert second == pytest.approx(first, rel=1e-5)
    gc.collect()
    assert freed


@pytest.mark.parametrize("ascent", [MomentumAscent(0.3), FriendlyAscent()])
def test_what_is_loaded_is_what_a_captured_step_goes_on_with(ascent):
    t = cuda_task(dtype=torch.float32)
    opt = SAM(t.model.parameters(), torch.optim.SGD, rho=0.1, ascent=ascent, lr=0.05, momentum=0.9)
    step = CapturedStep(opt, t.closure(opt))
    for _ in range(6):
        step()
    model, state = copy.deepcopy(t.model.state_dict()), copy.deepcopy(opt.state_dict())
    expected = [step().item() for _ in range(6)]
    t.model.load_state_dict(model)
    opt.load_state_dict(state)
    assert [step().item() for _ in range(6)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mask", ["none", "suffix"])
def test_a_gradient_that_is_not_finite_leaves_a_captured_mean(mask):
    t = cuda_task(dtype=torch.float32)
    opt = optimizer(t, mask, ascent="friendly", lr=0.0, weight_decay=0.0)
    factor = torch.ones((), device="cuda")

    def closure():
        opt.zero_grad()
        loss = t.loss() * factor
        loss.backward()
        return loss

    step = CapturedStep(opt, closure)
    for _ in range(6):
        step()
    means = [kept["mean"].clone() for kept in opt._perturber.memories[0].values()]
    factor.fill_(float("nan"))
    step()
    assert same([kept["mean"] for kept in opt._perturber.memories[0].values()], means)


def test_a_replayed_step_needs_the_memory_of_an_ordinary_one_and_of_the_suffix():
    peaks = {}
    for method in ("SGD", "SSAM-C"):
        torch.manual_seed(0)
        model = build_model("resnet18", 10).cuda()
        x, y = torch.randn(128, 3, 32, 32, device="cuda"), torch.randint(0, 10, (128,), device="cuda")
        opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if method == "SSAM-C":
            opt = SAM.wrap(opt, rho=0.05, mask=SuffixMask(model, "layer4"))

        def closure(model=model, opt=opt, x=x, y=y):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        for i in range(4):
            if i == 2:
                torch.cuda.reset_peak_memory_stats()
            opt.step(closure)
        peaks[method] = torch.cuda.max_memory_allocated()
        behind = sum(p.numel() * 4 for part in (model.layer4, model.head) for p in part.parameters())
        h = model.layer3(model.layer2(model.layer1(model.stem(x)))).detach()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        model.head(model.layer4(h)).sum().backward()
        suffix = torch.cuda.max_memory_allocated() - start
        del model, opt, closure, h
        gc.collect()
    assert peaks["SSAM-C"] <= peaks["SGD"] + suffix + behind  # the copies of the perturbed weights


def resnet_objective(samples=64):
    torch.manual_seed(0)
    model = build_model("resnet18", 10).cuda()
    x, y = torch.randn(samples, 3, 32, 32, device="cuda"), torch.randint(0, 10, (samples,), device="cuda")
    with torch.no_grad():
        model(x)  # statistics of its own
    return Objective(model, F.cross_entropy, (x, y), batch_size=samples // 2)


def test_a_landscape_in_bf16_runs_fused_without_waiting_and_is_that_of_fp32():
    objective = resnet_objective()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        fast = fastest(objective)
        assert len(fast.fused) == 20  # ResNet-18's convolutions
        objective.loss(fast)
        with no_waiting():
            fast.refresh()
            objective.loss(fast)
    options = {"dimensions": 1, "points": 9, "range": 0.5}
    plain, bf16 = (
        loss_landscape(objective.model, F.cross_entropy, objective.batches, precision=precision, **options)
        for precision in ("fp32", "bf16")
    )
    torch.testing.assert_close(torch.from_numpy(bf16.losses), torch.from_numpy(plain.losses), rtol=2e-2, atol=0)
    assert (bf16.losses != plain.losses).any()


def test_a_shortcut_that_is_broadcast_is_not_read_beyond_its_end():
    """torch would take cuDNN's plan for the first layer, whose shortcut is whole, for the second one too."""

    class Broadcast(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.shift = nn.Parameter(torch.randn(1, 8, 1, 1))

        def forward(self, x):
            h = F.relu(self.bn1(self.conv1(x)) + x)
            return F.relu(self.bn2(self.conv2(h)) + self.shift).flatten(2).mean(2)

    x, y = torch.randn(6, 8, 9, 9, device="cuda"), torch.randint(0, 8, (6,), device="cuda")
    objective = Objective(Broadcast().cuda(), F.cross_entropy, (x, y))
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        fast = fastest(objective)
        assert len(fast.fused) == 2
        torch.testing.assert_close(fast(x).float(), objective.model.eval()(x).float(), rtol=5e-2, atol=5e-2)


def test_eigenvalues_found_with_tf32_are_those_of_fp32():
    objective = resnet_objective()
    exact, fast = (top_eigenvalues(objective, 3, precision=precision) for precision in ("fp32", "tf32"))
    assert exact.converged
    assert objective.product.forward_mode
    assert objective.product.folded is not None
    torch.testing.assert_close(torch.tensor(fast.values), torch.tensor(exact.values), rtol=1e-3, atol=0)
