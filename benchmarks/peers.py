"""What a step of sparsam costs beside other libraries' SAM, in steps of plain SGD: time and peak memory.

All are set up first, on ResNet-18 with images of CIFAR's size. Then each takes steps in turn, round after round. What
counts is the ratio to SGD in the same round: the median over the rounds, and its quartiles. Steps run eagerly, as in a
plain loop. On a GPU two rows step from a CUDA graph. Memory is what a model, its optimizer and a step need at their
peak, on a GPU. Two loops by hand do the least that a step needs, without any check: they show what a library adds.

With `--width 2 --size 8 --batch-size 2 --threads 1` the network has the layers of ResNet-18 and next to no arithmetic:
what is left on a CPU is the host's work for a step, which an eager step on a GPU waits for too.

pytorch_optimizer takes part if it is installed (`pip install pytorch-optimizer`). Other codes are named by their
folders: a checkout of github.com/davda54/sam, and one of github.com/Mi-Peng/Sparse-Sharpness-Aware-Minimization.

    python benchmarks/peers.py --davda54 FOLDER --authors FOLDER --output results/peers/h200.json
"""

import argparse
import contextlib
import importlib
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from in_turn import machine, milliseconds, summary, write
from torch.nn import functional as F

from sparsam import SAM, CapturedStep, RandomMask, SuffixMask, thrifty
from sparsam.models.resnet import BasicBlock, ResNet

RHO = 0.05
SETTINGS = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-3}
STEPS = 1_000_000  # of thrifty's training: more than are taken here
CHOICE = {"cut": "layer3", "fraction": 0.304}  # thrifty's own for ResNet-18 at 1.15 (docs/thrifty.md), for any width
SGD, THRIFTY = "SGD", "sparsam, thrifty at 1.15"


def own(build):
    """Return how a step of sparsam is set up; `build` makes the optimizer from a model and a batch."""

    def setup(model, loss_of, batch):
        opt = build(model, batch)

        def closure():
            opt.zero_grad()
            loss = loss_of(model, *batch)
            loss.backward()
            return loss

        return opt, partial(opt.step, closure)

    return setup


def captured(build):
    """Return how a step from a CUDA graph is set up."""

    def setup(model, loss_of, batch):
        opt, step = own(build)(model, loss_of, batch)
        return opt, CapturedStep(opt, step.args[0])

    return setup


def two_steps(build):
    """Return how a step of another library is set up, which all of them show in their README."""

    def setup(model, loss_of, batch):
        opt = build(model)

        def step():
            loss_of(model, *batch).backward()
            opt.first_step(zero_grad=True)
            loss_of(model, *batch).backward()
            opt.second_step(zero_grad=True)

        return opt, step

    return setup


@torch.no_grad()
def ascend(params):
    """Go to w + eps; return w."""
    weights, grads = [p.clone() for p in params], [p.grad for p in params]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_add_(params, torch._foreach_mul(grads, RHO / (norm + 1e-12)))
    return weights


@torch.no_grad()
def go_back(params, weights):
    """Go to w."""
    torch._foreach_copy_(params, weights)


def sam_by_hand(model, loss_of, batch):
    """Set up the plainest loop of SAM, which lets statistics move twice."""
    opt, params = sgd(model), list(model.parameters())

    def step():
        opt.zero_grad()
        loss_of(model, *batch).backward()
        weights = ascend(params)
        opt.zero_grad()
        loss_of(model, *batch).backward()
        go_back(params, weights)
        opt.step()

    return opt, step


def cut_by_hand(model, loss_of, batch):
    """Set up a loop that is written for this network: the second pass starts at layer4."""
    opt, (x, y) = sgd(model), batch
    parts = list(model)
    at = parts.index(model.layer4)
    prefix, suffix = torch.nn.Sequential(*parts[:at]), torch.nn.Sequential(*parts[at:])
    params = list(suffix.parameters())

    def step():
        opt.zero_grad()
        with loss_of.precision():
            h = prefix(x)
        loss_of(suffix, h.detach(), y).backward()
        weights = ascend(params)
        for p in params:
            p.grad = None
        loss_of(suffix, h, y).backward()
        go_back(params, weights)
        opt.step()

    return opt, step


def sgd(model, batch=None):
    return torch.optim.SGD(model.parameters(), **SETTINGS)


def sam(model, batch, **options):
    return SAM(model.parameters(), torch.optim.SGD, rho=RHO, model=model, **options, **SETTINGS)


def thrifty_first(model, batch):
    return thrifty(model, torch.optim.SGD, batch[0], total_steps=STEPS, rho=RHO, **CHOICE, **SETTINGS)


def thrifty_last(model, batch):
    opt = thrifty_first(model, batch)
    opt.steps = opt.schedule.first
    return opt


def methods(options, device):
    """Return what is compared: a name, and how its step is set up."""
    table = {
        SGD: own(sgd),
        "sparsam, SAM": own(sam),
        "sparsam, half of the weights": own(lambda model, batch: sam(model, batch, mask=RandomMask(0.5))),
        "sparsam, from layer4 on": own(lambda model, batch: sam(model, batch, mask=SuffixMask(model, "layer4"))),
        f"{THRIFTY}, first steps": own(thrifty_first),
        f"{THRIFTY}, last steps": own(thrifty_last),
        "by hand, SAM": sam_by_hand,
        "by hand, from layer4 on": cut_by_hand,
    }
    if device.type == "cuda":
        table |= {"SGD, in a CUDA graph": captured(sgd), "sparsam, SAM, in a CUDA graph": captured(sam)}
    if (module := imported("pytorch_optimizer")) is not None:
        table[f"pytorch_optimizer {version('pytorch_optimizer')}, SAM"] = two_steps(
            lambda model: module.SAM(model.parameters(), torch.optim.SGD, rho=RHO, **SETTINGS)
        )
    if options.davda54:
        other = imported("sam", options.davda54)
        table["davda54/sam"] = two_steps(
            lambda model: other.SAM(model.parameters(), torch.optim.SGD, rho=RHO, **SETTINGS)
        )
    if options.authors:
        authors = imported("solver.sam", options.authors)
        table["the authors' code, SAM"] = two_steps(lambda model: authors.SAM(model.parameters(), sgd(model), rho=RHO))
    return table


def imported(name, folder=None):
    """Import a module, of a folder; None if it is not installed."""
    if folder is not None:
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if folder is not None or error.name != name:
            raise
        print(f"{name} is not installed, so it is left out", file=sys.stderr)
        return None


class Loss:
    """The loss of a batch, as a function of a model, in a precision."""

    def __init__(self, device, precision):
        bf16 = precision == "bf16"
        self.precision = partial(torch.autocast, device.type, torch.bfloat16) if bf16 else contextlib.nullcontext

    def __call__(self, model, x, y):
        """Return it."""
        with self.precision():
            return F.cross_entropy(model(x), y)


class Case:
    """One method, ready to take steps."""

    def __init__(self, name, setup, options, device):
        self.name = name
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        torch.manual_seed(0)
        model = ResNet(BasicBlock, (2, 2, 2, 2), 100, width=options.width)
        model.to(device, memory_format=torch.channels_last)
        x = torch.randn(options.batch_size, 3, options.size, options.size, device=device)
        batch = x.contiguous(memory_format=torch.channels_last), torch.arange(options.batch_size, device=device) % 100
        self.opt, self.step = setup(model, Loss(device, options.precision), batch)
        for _ in range(options.warm_up):
            self.step()
        self.memory_mb = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.step()
            self.memory_mb = (torch.cuda.max_memory_allocated(device) - before) / 2**20


def measure(options, device):
    """Return a row for each method."""
    cases = []
    for name, setup in methods(options, device).items():
        cases.append(Case(name, setup, options, device))
        print(f"{name} is ready", file=sys.stderr)
    steps = {case.name: case.step for case in cases}
    times = milliseconds(steps, rounds=options.rounds, count=options.steps, device=device)
    memory = {case.name: case.memory_mb for case in cases}
    fraction = next(case.opt.choice.fraction for case in cases if case.name.startswith(THRIFTY))
    first, last = times[f"{THRIFTY}, first steps"], times[f"{THRIFTY}, last steps"]
    mean = f"{THRIFTY}, mean"
    times[mean] = [(1 - fraction) * a + fraction * b for a, b in zip(first, last, strict=True)]
    memory[mean] = memory[f"{THRIFTY}, last steps"]
    return [{"method": name, "memory_mb": memory[name], **summary(own, times[SGD])} for name, own in times.items()]


def show(result):
    """Print the table as Markdown."""
    print(
        f"\n{result['device']}, torch {result['torch']}, batch {result['batch_size']}, {result['precision']},", end=" "
    )
    print(f"{result['rounds']} rounds of {result['steps']} steps\n")
    print("| method | ms a step | × SGD (quartiles) | peak memory, MB |\n| --- | --- | --- | --- |")
    for row in result["rows"]:
        memory = "–" if row["memory_mb"] is None else f"{row['memory_mb']:.0f}"
        ratio = f"{row['ratio']:.3f} ({row['low']:.3f} – {row['high']:.3f})"
        print(f"| {row['method']} | {row['ms']:.2f} | {ratio} | {memory} |")


def main():
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--davda54", type=Path, metavar="FOLDER", help="with sam.py")
    parser.add_argument("--authors", type=Path, metavar="FOLDER", help="with solver/sam.py")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--size", type=int, default=32, help="of an image, in pixels")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage; ResNet-18 has 64")
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's own")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16" if cuda else "fp32")
    parser.add_argument("--rounds", type=int, default=60 if cuda else 9)
    parser.add_argument(
        "--steps", type=int, default=3 if cuda else 1, help="in each round: few, so that turns are short"
    )
    parser.add_argument("--warm-up", type=int, default=12, help="steps before the first round")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = True
    result = {
        **machine(device),
        **{key: getattr(options, key) for key in ("batch_size", "size", "width", "precision", "rounds", "steps")},
        "rows": measure(options, device),
    }
    write(result, options.output)
    show(result)


if __name__ == "__main__":
    main()
