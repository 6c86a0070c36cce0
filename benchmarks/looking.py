"""What looking at a trained network costs: one point of a landscape, one gradient, one Hessian product.

The network is ResNet-18 with its first weights and the images are noise, which changes no kernel. All are timed in
turn, round after round; fused points with the batches that a landscape has.

    python benchmarks/looking.py --samples 250 --output results/looking/cpu.json
"""

import argparse
import contextlib
import statistics
import sys
from pathlib import Path

import torch
from in_turn import machine, write
from torch.nn import functional as F

from sparsam.analysis.fusion import fastest
from sparsam.analysis.kernels import kernels
from sparsam.analysis.landscape import fused_batch, joined
from sparsam.analysis.objective import Objective
from sparsam.models import build_model
from sparsam.step_cost import Clock


def works(model, data, batch_size, device):
    """Return what is timed, by name."""
    objective, unfolded, reverse = (Objective(model, F.cross_entropy, data, batch_size=batch_size) for _ in range(3))
    unfolded.product.forward_mode, reverse.product.forward_mode = True, False
    vector = [torch.randn_like(p) for p in objective.params]

    def point(precision, forward=None, look=objective):
        bf16 = torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
        with torch.no_grad(), bf16 if precision == "bf16" else contextlib.nullcontext():
            if forward is not None:
                forward.refresh()
            look.loss(forward)

    def product(precision, look=objective):
        with kernels(precision):
            look.hessian_product(vector)

    table = {"point, fp32": lambda: point("fp32")}
    if device.type == "cuda":
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            fused = fastest(objective)
            if fused is None:
                raise RuntimeError("the network must be fused to be timed so, but is not; a warning above may say why")
            ready = [(fused.prepare(x), y) for x, y in objective.batches]
            larger = Objective(model, F.cross_entropy, joined(ready, fused_batch(device)))
        table |= {
            "point, bf16, not fused": lambda: point("bf16"),
            "point, bf16": lambda: point("bf16", fused, larger),
        }
    table |= {
        "gradient, fp32": objective.gradient,
        "product, fp32": lambda: product("ieee"),
        "product, fp32, not folded": lambda: product("ieee", unfolded),
        "product, fp32, reverse mode": lambda: product("ieee", reverse),
    }
    if device.type == "cuda":
        table |= {
            "product, tf32": lambda: product("tf32"),
            "product, tf32, not folded": lambda: product("tf32", unfolded),
        }
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    about = machine(device)  # before anything changes
    torch.manual_seed(0)
    model = build_model("resnet18", 100).to(device, memory_format=torch.channels_last)
    x, y = torch.randn(options.samples, 3, 32, 32), torch.randint(0, 100, (options.samples,))
    table, clock = works(model, (x, y), options.batch_size, device), Clock(device)
    rounds = {name: [] for name in table}
    for turn in range(options.rounds + 1):
        for name, work in table.items():
            seconds = clock.time(work)
            if turn:  # the first one warms up
                rounds[name].append(seconds)
        print(f"round {turn} of {options.rounds}", file=sys.stderr)
    result = {
        **about,
        "samples": options.samples,
        "batch_size": options.batch_size,
        **({"fused_batch_size": fused_batch(device)} if device.type == "cuda" else {}),
        "seconds": rounds,
    }
    print(f"\n{result['device']}, torch {result['torch']}, ResNet-18, {options.samples} images of 3×32×32\n")
    print("| work | s (smallest – largest) | ms an image |\n| --- | --- | --- |")
    for name, times in rounds.items():
        middle = statistics.median(times)
        print(
            f"| {name} | {middle:.4g} ({min(times):.4g} – {max(times):.4g}) | {1000 * middle / options.samples:.3g} |"
        )
    write(result, options.output)


if __name__ == "__main__":
    main()
