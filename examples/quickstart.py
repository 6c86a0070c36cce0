"""Compare SGD, SAM and two kinds of sparse SAM on a small network.

The data are scikit-learn's 1,797 handwritten digits, made harder so that there is something to tell apart: 500 images
to train on, 20 % of them with a wrong label, 300 that settings were chosen on, 997 to test on. All four methods share
the network, the batches, the learning rate and its schedule, the weight decay and the number of epochs.
"""

import argparse
import statistics
import sys
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from train_plain import accuracy, digits, network

from sparsam import SAM, DenseMask, DynamicMask, FisherMask

METHODS = ("SGD", "SAM", "SSAM-F", "SSAM-D")
TRAIN, VALIDATION, WRONG_LABELS, BATCH = 500, 300, 0.2, 50
STEPS = TRAIN // BATCH  # in one epoch

# Chosen on the validation images with seeds that are not used here: first the learning rate (of 0.03, 0.1, 0.3, 1) and
# weight decay (of 5e-4 to 0.16) that are best for SGD, then with these one rho (of 0.025, 0.05, 0.1, 0.2) for the rest.
SETTINGS = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.08}
RHO = 0.1


class Run(NamedTuple):
    """What one training run has to show."""

    accuracy: float  # on the test images after the last epoch, in percent
    share: float  # of the weights that are perturbed, in percent
    passes: float  # forward and backward, for each step
    seconds: float  # for each step
    loss: float  # on the training images, in eval mode
    rise: float  # of that loss within rho


def load_data():
    """Return training images, some of which have a wrong label, and test images: the same at every call."""
    train_set, rest = digits(TRAIN, seed=0)
    generator = torch.Generator().manual_seed(1)
    wrong = torch.randperm(TRAIN, generator=generator)[: round(WRONG_LABELS * TRAIN)]
    x, y = train_set.tensors
    y[wrong] = (y[wrong] + torch.randint(1, 10, wrong.shape, generator=generator)) % 10
    return TensorDataset(x, y), TensorDataset(*(t[VALIDATION:] for t in rest.tensors))


def make_optimizer(method, model, train_set, epochs, seed):
    """Return SGD, or SAM around SGD with the method's mask; the sparse ones are made anew once an epoch."""
    if method == "SGD":
        return SGD(model.parameters(), **SETTINGS)
    mask = {
        "SAM": DenseMask(),
        "SSAM-F": FisherMask(0.5, model, F.cross_entropy, train_set, interval=STEPS, seed=seed),
        "SSAM-D": DynamicMask(0.5, interval=STEPS, total_steps=epochs * STEPS, seed=seed),
    }[method]
    return SAM(model.parameters(), SGD, rho=RHO, mask=mask, model=model, **SETTINGS)


def take_step(model, optimizer, x, y):
    """Take one step; return how often the optimizer asked for a gradient, and the seconds."""
    passes = 0

    def closure():
        nonlocal passes
        passes += 1
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    start = time.perf_counter()
    optimizer.step(closure)
    return passes, time.perf_counter() - start


def perturbed_share(optimizer):
    """Return the percentage of the weights that the latest step perturbed."""
    if not isinstance(optimizer, SAM):
        return 0.0
    masks = optimizer.masks()
    return 100 * sum(m.sum().item() for m in masks) / sum(m.numel() for m in masks)


def loss_and_rise(model, dataset):
    """Return the loss at w over all the data, and how much higher it is at w + rho g / ||g||.

    That is the largest rise within a distance of rho, to first order; the sum of the two is what SAM minimises. It is
    computed with plain torch, not with the library, and changes the model.
    """
    x, y = dataset.tensors
    model.eval()
    weights = list(model.parameters())
    loss = F.cross_entropy(model(x), y)
    gradient = torch.autograd.grad(loss, weights)
    norm = torch.cat([g.flatten() for g in gradient]).norm()
    with torch.no_grad():
        for w, g in zip(weights, gradient, strict=True):
            w += RHO * g / norm
        return loss.item(), (F.cross_entropy(model(x), y) - loss).item()


def train(method, train_set, test_set, epochs, seed, report):
    """Train one network; call `report(epoch)` after each epoch."""
    torch.manual_seed(seed)
    loader = DataLoader(train_set, batch_size=BATCH, shuffle=True)
    model = network()
    optimizer = make_optimizer(method, model, train_set, epochs, seed)
    schedule = CosineAnnealingLR(optimizer, T_max=epochs)
    steps = []
    for epoch in range(1, epochs + 1):
        model.train()
        steps += [take_step(model, optimizer, x, y) for x, y in loader]
        schedule.step()
        report(epoch)
    passes, seconds = (statistics.mean(values) for values in zip(*steps, strict=True))
    share, percent = perturbed_share(optimizer), accuracy(model, test_set)
    return Run(percent, share, passes, seconds, *loss_and_rise(model, train_set))


def show(text, last=False):
    """Tell how far things are: in one line that changes on a terminal, elsewhere only what is marked as last."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif last:
        print(text, file=sys.stderr, flush=True)


def spread(values, digits):
    """Return mean ± standard deviation; of a single value there is no deviation."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def print_table(runs):
    """Print one line for each method."""
    sgd = statistics.mean(run.seconds for run in runs["SGD"])
    widths = (8, 11, 13, 19, 11, 17, 17)

    def line(*cells):
        print("".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())

    line("", "weights", "gradients", "test accuracy", "time", "training loss", "rise of it")
    line("method", "perturbed", "in a step", "after last epoch", "of a step", "at the end", f"within rho {RHO}")
    print("-" * sum(widths))
    for method in METHODS:
        accuracies, shares, passes, seconds, losses, rises = zip(*runs[method], strict=True)
        line(
            method,
            f"{statistics.mean(shares):.1f} %",
            f"{statistics.mean(passes):g}",
            f"{spread(accuracies, 2)} %",
            f"{statistics.mean(seconds) / sgd:.2f} x",
            spread(losses, 3),
            spread(rises, 3),
        )


def main():
    """Train with each method and seed, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method, with seeds 0, 1, ... (default: 3)")
    parser.add_argument("--epochs", type=int, default=40, help="epochs of each run (default: 40)")
    args = parser.parse_args()
    if args.seeds < 1 or args.epochs < 1:
        parser.error("--seeds and --epochs must be at least 1")

    began = time.perf_counter()
    train_set, test_set = load_data()
    train("SSAM-F", train_set, test_set, 1, 0, report=lambda epoch: None)  # no method is to pay for torch's warming up
    runs = {method: [] for method in METHODS}
    for seed in range(args.seeds):
        for method in METHODS:  # in turn, so that a busy machine slows all of them
            name = f"run {sum(map(len, runs.values())) + 1} of {args.seeds * len(METHODS)}, {method} with seed {seed}"
            run = train(method, train_set, test_set, args.epochs, seed, lambda n, name=name: show(f"{name}: epoch {n}"))
            runs[method].append(run)
            show(f"{name}: test accuracy {run.accuracy:.2f} %", last=True)
    show("")

    weights = sum(p.numel() for p in network().parameters())
    print(
        f"\nDigits, {len(train_set)} training images, {WRONG_LABELS:.0%} of them with a wrong label; {len(test_set)} "
        f"test images.\n{weights} weights, {args.epochs} epochs of {STEPS} steps, seeds: {args.seeds}. The same "
        f"learning rate {SETTINGS['lr']}, momentum {SETTINGS['momentum']}\nand weight decay "
        f"{SETTINGS['weight_decay']} for all, chosen for SGD on other images; rho {RHO}.\n"
    )
    print_table(runs)
    print(
        "\nMean ± standard deviation over the seeds; a difference within them says nothing. What SAM minimises is the\n"
        "sum of the last two columns, the loss at the worst point within rho. Times are of this run and hold what the\n"
        f"masks cost; SSAM-F's looks at 128 images once an epoch. The whole took {time.perf_counter() - began:.0f} s."
    )


if __name__ == "__main__":
    main()
