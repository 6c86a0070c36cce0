"""What the diagonal Fisher costs, and what random signs and the choice of samples do to it and to the mask.

A residual network is trained on scikit-learn's digits. After the first epoch and after the last, the exact diagonal and
its estimates by random signs are compared on the same samples, and with the exact diagonal of other samples.
With --resnet18 only the cost is measured: of ResNet-18 on 32 × 32 images of random numbers.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from in_turn import machine, write
from sklearn.datasets import load_digits
from torch import nn

from sparsam import diagonal_fisher
from sparsam.fisher import signs_chunk
from sparsam.models import build_model

SAMPLES = 128  # FisherMask's default
MANY = 4 * SAMPLES  # about as expensive by signs in chunks of 32 as SAMPLES exact ones
REFERENCE = 648  # training samples that are never drawn: half of them
SPARSITIES = (0.5, 0.9)
CHUNKS = (8, 32, 128)
UNIT = "batch gradient"


class Block(nn.Module):
    """Two convolutions with BatchNorm, and a way past them."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        """Add both ways."""
        return F.relu(self.path(x) + self.shortcut(x))


def network():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        Block(32, 32, stride=1),
        Block(32, 64, stride=2),
        Block(64, 128, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def digits(device):
    """Return 1,297 training and 500 test samples."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x = (torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1)[order].to(device)
    y = torch.tensor(data.target)[order].to(device)
    return (x[:1297], y[:1297]), (x[1297:], y[1297:])


def train(model, x, y, epochs):
    """Train with SGD; yield the epoch after each one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in torch.randperm(len(x)).to(x.device).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        schedule.step()
        yield epoch


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        return 100 * (model(x).argmax(1) == y).double().mean().item()


# ------------------------------------------------------------------------------------------------------- cost


def fisher(model, x, y, **how):
    return torch.cat([f.flatten() for f in diagonal_fisher(model, F.cross_entropy, x, y, **how)]).double()


def batch_gradient(model, x, y):
    """Take the unit of cost: the gradient of the mean loss, all samples in one batch."""
    model.eval()
    torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))


def seconds(function, device):
    """Return what a function takes; with one CPU thread the time of the processor, whatever else runs beside it."""
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def seconds_in_turn(ways, device, repeats):
    """Return the seconds of each way, `repeats` times; the ways take turns so that disturbances hit all of them."""
    times = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            taken = seconds(way, device)
            if repeat:  # the first round warms up
                times[name].append(taken)
    return times


def measure_cost(model, x, y, repeats):
    """Return what each way takes for the network on the digits."""
    few = x[:SAMPLES], y[:SAMPLES]

    def diagonal(samples=SAMPLES, **how):
        return lambda: diagonal_fisher(model, F.cross_entropy, x[:samples], y[:samples], **how)

    def signs(chunk, samples):
        return diagonal(samples, method="signs", chunk_size=chunk)

    ways = {
        UNIT: lambda: batch_gradient(model, *few),
        "exact, one by one": diagonal(),
        "exact, chunks of 32 (vmap)": diagonal(chunk_size=32),
        **{f"signs, chunks of {chunk}": signs(chunk, SAMPLES) for chunk in CHUNKS},
        f"signs, chunks of 32, {MANY} samples": signs(32, MANY),
    }
    return seconds_in_turn(ways, x.device, repeats)


def measure_resnet18(samples, device, repeats):
    """Return what a gradient and the diagonal by random signs take for ResNet-18."""
    model = build_model("resnet18", 10).to(device)
    x, y = torch.randn(samples, 3, 32, 32).to(device), torch.randint(0, 10, (samples,)).to(device)
    ways = {
        UNIT: lambda: batch_gradient(model, x, y),
        f"signs, chunks of {signs_chunk(samples)}": lambda: diagonal_fisher(
            model, F.cross_entropy, x, y, method="signs"
        ),
    }
    return seconds_in_turn(ways, device, repeats)


# -------------------------------------------------------------------------------------------------- agreement


def concentration(model, x, y, share=0.05):
    """Return how much of the diagonal's sum the samples with the largest gradients hold."""
    sums = torch.stack([fisher(model, x[i : i + 1], y[i : i + 1]).sum() for i in range(len(x))])
    return (sums.topk(round(share * len(x))).values.sum() / sums.sum()).item()


def relative_error(estimate, reference):
    return ((estimate - reference).norm() / reference.norm()).item()


def overlap(one, other, sparsity):
    """Return which share of the perturbed weights two masks of this sparsity have in common."""
    k = round((1 - sparsity) * len(one))
    return torch.isin(one.topk(k).indices, other.topk(k).indices).double().mean().item()


def compare(estimate, reference):
    return {
        "relative error": relative_error(estimate, reference),
        **{f"common weights, sparsity {s}": overlap(estimate, reference, s) for s in SPARSITIES},
    }


def measure_agreement(model, x, y, draws, seed):
    """Return `draws` comparisons for each reference and estimate."""
    generator = torch.Generator().manual_seed(seed)
    many_others = fisher(model, x[:REFERENCE], y[:REFERENCE])
    same, other, far = "the same samples", f"{SAMPLES} others", f"{REFERENCE} others"
    results = {same: {}, other: {}, far: {}}

    def note(reference, estimate, comparison):
        results[reference].setdefault(estimate, []).append(comparison)

    for _ in range(draws):
        drawn = (REFERENCE + torch.randperm(len(x) - REFERENCE, generator=generator)).to(x.device)
        here, there, many = drawn[:SAMPLES], drawn[SAMPLES : 2 * SAMPLES], drawn[:MANY]
        exact, exact_there = fisher(model, x[here], y[here]), fisher(model, x[there], y[there])
        note(other, "exact", compare(exact, exact_there))
        note(far, "exact", compare(exact, many_others))
        for chunk in CHUNKS:
            signs = fisher(model, x[here], y[here], method="signs", chunk_size=chunk, generator=generator)
            note(same, f"signs, chunks of {chunk}", compare(signs, exact))
            note(far, f"signs, chunks of {chunk}", compare(signs, many_others))
        signs = fisher(model, x[many], y[many], method="signs", chunk_size=32, generator=generator)
        note(far, f"signs, chunks of 32, {MANY} samples", compare(signs, many_others))
        shuffled = exact[torch.randperm(len(exact), generator=generator).to(x.device)]
        note(same, "chance (shuffled)", compare(shuffled, exact))
    return results


# ----------------------------------------------------------------------------------------------------- report


def print_cost(times):
    print(f"\n| way | ms, median (fastest to slowest of {len(times[UNIT])}) | batch gradients, median of the rounds |")
    print("|---|---|---|")
    for name, values in times.items():
        ratios = [own / unit for own, unit in zip(values, times[UNIT], strict=True)]
        print(f"| {name} | {spread([1e3 * v for v in values], '.1f')} | {spread(ratios, '.2f')} |")


def spread(values, digits):
    """Write a median and the smallest and the largest value."""
    return f"{statistics.median(values):{digits}} ({min(values):{digits}} to {max(values):{digits}})"


def print_agreement(results):
    print("\n| estimate | compared with exact of | relative error |", end="")
    print("".join(f" common weights, sparsity {s} |" for s in SPARSITIES))
    print("|---" * (3 + len(SPARSITIES)) + "|")
    for reference, estimates in results.items():
        for estimate, comparisons in estimates.items():
            columns = zip(*(comparison.values() for comparison in comparisons), strict=True)
            cells = [f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}" for values in columns]
            print(f"| {estimate} | {reference} | {' | '.join(cells)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cpu", help="where to compute (default: cpu)")
    parser.add_argument("--epochs", type=int, default=15, help="epochs of training (default: 15)")
    parser.add_argument("--draws", type=int, default=10, help="draws of samples to compare, at least 2 (default: 10)")
    parser.add_argument("--repeats", type=int, default=15, help="repetitions of each timing (default: 15)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches, samples and signs (default: 0)")
    parser.add_argument("--resnet18", type=int, metavar="N", help="measure only the cost, of N samples for ResNet-18")
    parser.add_argument("--json", type=Path, help="also write settings and every single value to this file")
    args = parser.parse_args()
    if args.draws < 2:
        parser.error("--draws must be at least 2, or there is no spread")

    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if args.resnet18:
        settings = {"samples": args.resnet18, **machine(args.device), "repeats": args.repeats, "seed": args.seed}
        print("; ".join(f"{name}: {value}" for name, value in settings.items()))
        cost = measure_resnet18(args.resnet18, args.device, args.repeats)
        print_cost(cost)
        write({"settings": settings, "seconds": cost}, args.json)
        return
    model = network().to(args.device)
    (x, y), test = digits(args.device)
    weights = sum(p.numel() for p in model.parameters())
    settings = {"weights": weights, "samples": SAMPLES, "training samples": len(x), **machine(args.device)}
    for name in ("epochs", "draws", "repeats", "seed"):
        settings[name] = getattr(args, name)
    print("; ".join(f"{name}: {value}" for name, value in settings.items()))

    agreement = {}
    for epoch in train(model, x, y, args.epochs):
        print(f"epoch {epoch} of {args.epochs}", file=sys.stderr)
        if epoch in (1, args.epochs):
            held = concentration(model, x[:REFERENCE], y[:REFERENCE])
            key = f"after epoch {epoch}, test accuracy {accuracy(model, *test):.1f} %"
            agreement[key] = measure_agreement(model, x, y, args.draws, args.seed)
            print(f"\nAgreement {key}; mean ± standard deviation of {args.draws} draws of {SAMPLES} samples.")
            print(f"The 5 % of the samples with the largest gradients hold {held:.0%} of the diagonal's sum.")
            print_agreement(agreement[key])

    print(f"\nCost for {SAMPLES} samples")
    cost = measure_cost(model, x, y, args.repeats)
    print_cost(cost)
    write({"settings": settings, "seconds": cost, "agreement": agreement}, args.json)


if __name__ == "__main__":
    main()
