"""What SAM on a share of the batch costs in time, beside its counted cost of 1 + n/N passes.

For each case all methods are set up first. Then they take steps in turn, round after round. What counts is the ratio to
the base optimizer's step in the same round: the median over the rounds, and its quartiles. A case is a network, a batch
and a way to run: eager, with compiled blocks, or as one CUDA graph. Compiled blocks are compiled for each number of
rows: those of the batch, of the share and of the rest. On a GPU networks compute under bf16 autocast, on a CPU in fp32.

A step with a share runs three passes, and a GPU may be badly filled by the small ones. The rows "one forward" try to
save a pass: the forward pass at w is that of the whole batch, with a loss for the share and one for the rest. Both
losses need a gradient of their own, so there are two backward passes, and each goes through the whole batch. Counting a
backward pass as two forward passes, a step costs 5/3 + n/N. Its gradient is that of `opt.step(closure)`, except that
BatchNorm normalises share and rest by the statistics of the whole batch.

The output is written after each case. The same command again measures what is missing or has failed. No case is begun
that would probably not end within --minutes.

    python benchmarks/shares.py --output results/shares/h200.json
    python benchmarks/shares.py --device cpu --threads 1 --output results/shares/cpu.json
    python benchmarks/shares.py --redraw results/shares/h200.json
"""

import argparse
import contextlib
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from in_turn import machine, milliseconds, summary, write
from torch import nn
from torch.nn import functional as F
from transformer import SIZES, Transformer
from transformer import Block as DecoderBlock

from sparsam import SAM, CapturedStep
from sparsam.models import build_model
from sparsam.models.resnet import BasicBlock, Bottleneck
from sparsam.models.vit import Block as ViTBlock
from sparsam.models.vit import ViT
from sparsam.share import WHOLE, mix, split, weights
from sparsam.step_cost import Clock

BASE, SAM_ROW = "base step", "SAM"
EAGER, COMPILED, GRAPH = "eager", "compiled", "graph"
RHO, CLASSES, CONTEXT = 0.05, 100, 512
WARM_UP = {"cpu": 2, "cuda": 6}  # a captured step runs eagerly three times, and is captured in the fourth
MINUTES = {"cpu": 30.0, "cuda": 4.0}


class Method(NamedTuple):
    """How a step is taken.

    Args:
        share: The share of the batch that both passes see. None: the base optimizer's step.
        one_forward: Whether share and rest have one forward pass at w.
    """

    share: float | None
    one_forward: bool = False

    def counted(self, batch):
        """Return the counted cost, in passes over the batch."""
        if self.share is None:
            return 1.0
        share, _ = split(self.share)
        part = len(share(torch.empty(batch))) / batch
        return part + (5 / 3 if self.one_forward else 1)


METHODS = {
    BASE: Method(None),
    SAM_ROW: Method(1.0),
    "share 1/16": Method(1 / 16),
    "share 1/8": Method(1 / 8),
    "share 1/4": Method(1 / 4),
    "share 1/2": Method(1 / 2),
    "share 1/8, one forward": Method(1 / 8, one_forward=True),
    "share 1/4, one forward": Method(1 / 4, one_forward=True),
}
FEW = (BASE, SAM_ROW, "share 1/8", "share 1/4")  # each number of rows takes long to compile


def images(size):
    """Return a function that makes a batch of images and their classes."""

    def batch(count):
        x = torch.randn(count, 3, size, size).contiguous(memory_format=torch.channels_last)
        return x, torch.randint(0, CLASSES, (count,))

    return batch


def texts(tokens, context):
    """Return a function that makes a batch of texts and the tokens that come next."""

    def batch(count):
        data = torch.randint(tokens, (count, context + 1))
        return data[:, :-1], data[:, 1:]

    return batch


def sgd(params, **options):
    """Build the base optimizer of the ResNets."""
    options.pop("capturable")  # SGD can always be captured
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=1e-3, **options)


def adamw(params, **options):
    """Build the base optimizer of the transformers."""
    return torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, **options)


class Network(NamedTuple):
    """A network, its data and its base optimizer."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    base: Callable[..., torch.optim.Optimizer] = sgd


def vit_s():
    """Build ViT-S/16."""
    return ViT(CLASSES, image_size=224, patch_size=16, width=384, depth=12, heads=6)


NETWORKS = {
    "resnet-small": Network(lambda: build_model("resnet-small", CLASSES), images(32)),
    "vit-small": Network(lambda: build_model("vit-small", CLASSES), images(32), adamw),
    "resnet18": Network(lambda: build_model("resnet18", CLASSES), images(32)),
    "resnet50": Network(lambda: build_model("resnet50", CLASSES, stem="imagenet"), images(224)),
    "vit-s": Network(vit_s, images(224), adamw),
    "decoder-350M": Network(lambda: Transformer(SIZES["350M"], CONTEXT), texts(SIZES["350M"].tokens, CONTEXT), adamw),
    "tiny": Network(lambda: Transformer(SIZES["tiny"], 8), texts(SIZES["tiny"].tokens, 8), adamw),
}
BLOCKS = (BasicBlock, Bottleneck, ViTBlock, DecoderBlock)  # what is compiled


class Case(NamedTuple):
    """A network, a batch and a way to run, with the seconds that measuring takes, roughly."""

    network: str
    batch: int
    way: str
    seconds: float
    methods: tuple[str, ...] = tuple(METHODS)

    def __str__(self):
        return f"{self.network}-{self.batch}-{self.way}"


ON_GPU = [  # the most important first
    Case("resnet18", 128, GRAPH, 20),
    Case("resnet18", 512, GRAPH, 15),
    Case("resnet18", 2048, GRAPH, 20),
    Case("resnet50", 64, EAGER, 20),
    Case("vit-s", 128, GRAPH, 15),
    Case("decoder-350M", 16, EAGER, 20),
    Case("resnet50", 64, GRAPH, 15),
    Case("resnet18", 128, EAGER, 10),
    Case("resnet18", 512, EAGER, 10),
    Case("resnet18", 2048, EAGER, 10),
    Case("vit-s", 128, EAGER, 10),
    Case("vit-s", 128, COMPILED, 40, FEW),
    Case("decoder-350M", 16, COMPILED, 40, FEW),
    Case("resnet18", 512, COMPILED, 60, FEW[:3]),
]
ON_CPU = [
    Case("resnet-small", 100, EAGER, 60),
    Case("vit-small", 100, EAGER, 60),
    Case("resnet18", 128, EAGER, 900),
]
TINY = [Case("tiny", 4, EAGER, 1), Case("tiny", 4, GRAPH, 1), Case("tiny", 4, COMPILED, 20, FEW)]
CASES = {str(case): case for case in (*ON_GPU, *ON_CPU, *TINY)}


def step_with_one_forward(opt, model, loss_of, x, y, share, autocast=contextlib.nullcontext):
    """Take a step on a share of the batch, with one forward pass at w for all rows; return the loss of the whole batch.

    Args:
        opt: A SAM that is built without a share.
        model: The network.
        loss_of: Returns the mean loss of outputs and targets.
        x, y: The batch.
        share: The share of the batch that is perturbed by.
        autocast: Makes what forward passes run in.
    """
    params = [p for group in opt.param_groups for p in group["params"]]
    share, rest = split(share)
    opt.zero_grad()
    with autocast():
        outputs = model(x)
        of_share, of_rest = (loss_of(rows(outputs), rows(y)) for rows in (share, rest))
    # Both gradients at w come before the perturbation, which changes weights that the backward pass reads.
    of_rest.backward(retain_graph=True)
    gradient_of_rest = [p.grad for p in params]
    for p in params:
        p.grad = None  # zero_grad() would begin another step
    of_share.backward()
    with opt.perturbed():
        opt.zero_grad()
        with autocast():
            loss = loss_of(model(share(x)), share(y))
        loss.backward()
    by_share, by_rest = weights(share)
    mix(params, gradient_of_rest, by_rest, by_share)
    opt.step()
    return by_share * of_share.detach() + by_rest * of_rest.detach()


class OneForward:
    """Lets CapturedStep capture a function that takes a whole step: its closure."""

    def __init__(self, opt):
        self.param_groups = opt.param_groups

    def step(self, closure):
        """Take a step."""
        return closure()


def loss_of(outputs, targets):
    """Return the mean cross-entropy of images or of tokens."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def stepper(method, case, device):
    """Set a method up; return a function that takes a step."""
    torch.manual_seed(0)
    network, on_gpu = NETWORKS[case.network], device.type == "cuda"
    with device:
        model = network.build().to(memory_format=torch.channels_last)
        x, y = network.batch(case.batch)
    if case.way == COMPILED:
        for block in model.modules():
            if isinstance(block, BLOCKS):
                block.compile(dynamic=False)
    opt = network.base(model.parameters(), fused=on_gpu, capturable=case.way == GRAPH)
    if method.share is not None:
        share = 1.0 if method.one_forward else method.share
        opt = SAM.wrap(opt, rho=RHO, model=model, share=share)

    def autocast():
        return torch.autocast(device.type, torch.bfloat16) if on_gpu else contextlib.nullcontext()

    def closure(rows=WHOLE):
        opt.zero_grad()
        with autocast():
            loss = loss_of(model(rows(x)), rows(y))
        loss.backward()
        return loss

    def step():
        return step_with_one_forward(opt, model, loss_of, x, y, method.share, autocast)

    if case.way == GRAPH:
        return CapturedStep(OneForward(opt), step) if method.one_forward else CapturedStep(opt, closure)
    return step if method.one_forward else lambda: opt.step(closure)


def measure(case, options, device):
    """Return what was found for a case."""
    gc.collect()  # the models of the case before this one
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if case.way == COMPILED:
        from torch._dynamo import config

        torch.compiler.reset()
        config.recompile_limit = 64  # a version for each number of rows
        config.fail_on_recompile_limit_hit = True  # rather than run eagerly
    steps = {}
    for name in case.methods:
        steps[name] = step = stepper(METHODS[name], case, device)
        for _ in range(WARM_UP[device.type]):
            step()
        if because := getattr(step, "eager_because", None):
            raise RuntimeError(f"{name} is not captured: {because}")
        print(f"{case}: {name} is ready", file=sys.stderr, flush=True)
    count = max(1, min(50, round(options.turn / Clock(device).time(steps[BASE]))))
    times = milliseconds(steps, rounds=options.rounds, count=count, device=device)
    rows = [
        {"method": name, "counted": METHODS[name].counted(case.batch), **summary(own, times[BASE])}
        for name, own in times.items()
    ]
    return {"rounds": options.rounds, "steps": count, "rows": rows}


def measured(case, options, device):
    """Return the result of a case; of one that fails, the error."""
    head = {
        "case": str(case),
        "network": case.network,
        "batch": case.batch,
        "way": case.way,
        "precision": "bf16" if device.type == "cuda" else "fp32",
        "git": machine(device)["git"],
    }
    start = time.monotonic()
    try:
        found = measure(case, options, device)
    except Exception as error:
        print(f"{case} failed:", file=sys.stderr)
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"[:2000], "rows": []}
    return {**head, "seconds": round(time.monotonic() - start, 1), **found}


def show(result):
    """Print the tables as Markdown."""
    print(f"{result['device']}, torch {result['torch']}, {result['threads']} threads")
    for case in result["cases"]:
        print(f"\n{case['network']}, batch {case['batch']}, {case['way']}, {case['precision']},", end=" ")
        if "error" in case:
            print(f"failed: {case['error'].splitlines()[0]}")
            continue
        print(f"{case['rounds']} rounds of {case['steps']} steps, commit {case['git']}\n")
        print("| method | counted cost | measured cost (quartiles) | ms a step (smallest – largest) |")
        print("| --- | --- | --- | --- |")
        for row in case["rows"]:
            ratio = f"{row['ratio']:.3f} ({row['low']:.3f} – {row['high']:.3f})"
            spread = f"{row['ms']:.2f} ({min(row['rounds_ms']):.2f} – {max(row['rounds_ms']):.2f})"
            print(f"| {row['method']} | {row['counted']:.3f} | {ratio} | {spread} |")


def load(path, hardware):
    """Return an earlier output to go on with, without cases that failed; a new one if there is none."""
    if path is None or not path.exists():
        return {**hardware, "cases": []}
    result = json.loads(path.read_text())
    for key in ("device", "processor", "threads", "torch"):
        if result[key] != hardware[key]:
            sys.exit(f"{path} was measured with {key} {result[key]}, here it is {hardware[key]}: give another --output")
    result["cases"] = [case for case in result["cases"] if "error" not in case]
    return result


def main():
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turn", type=float, default=0.04, help="seconds of base steps in a round, roughly")
    parser.add_argument("--minutes", type=float, help="default: 4 on a GPU, 30 on a CPU")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--redraw", type=Path, help="print an earlier output, measure nothing")
    options = parser.parse_args()
    if options.redraw:
        show(json.loads(options.redraw.read_text()))
        return
    start, device = time.monotonic(), torch.device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = True
    limit = 60 * (MINUTES[device.type] if options.minutes is None else options.minutes)
    wanted = options.cases or map(str, ON_GPU if device.type == "cuda" else ON_CPU)
    result = load(options.output, machine(device))
    there = {case["case"] for case in result["cases"]}
    for case in (CASES[name] for name in wanted if name not in there):
        if time.monotonic() - start + case.seconds > limit:
            print(f"{case} is left out: it takes about {case.seconds} seconds (--minutes)", file=sys.stderr)
            continue
        result["cases"].append(measured(case, options, device))
        write(result, options.output)
    show(result)


if __name__ == "__main__":
    main()
