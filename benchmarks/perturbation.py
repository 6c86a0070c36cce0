"""What it costs to go from w to w + eps and back, beside the plainest loop that does so.

The loop clones each weight, adds to it, and copies the clone back. It reads the norm on the host, so on a GPU it waits.
Both are timed in turn, round after round. What counts is the ratio to the loop in the same round: the median over the
rounds, and its quartiles.

    python benchmarks/perturbation.py --output results/perturbation/cpu.json
"""

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch
from in_turn import machine, write

from sparsam.perturbation import perturb, restore
from sparsam.step_cost import Clock, StepRatio, times_in_turn

RHO = 0.05
CASES = {"all weights": (False, False), "half of them, at random": (True, False), "adaptive": (False, True)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def loop(weights, grads, masks, adaptive):
    """Perturb and restore, one weight after the other."""
    copies = [w.clone() for w in weights]
    scaled = [w.abs() * g for w, g in zip(weights, grads, strict=True)] if adaptive else grads
    scale = RHO / torch.stack([g.norm() for g in scaled]).norm().item()
    for k, (w, g) in enumerate(zip(weights, grads, strict=True)):
        eps = w * w * g if adaptive else g
        w.add_(eps if masks is None else eps * masks[k], alpha=scale)
    for w, copy in zip(weights, copies, strict=True):
        w.copy_(copy)


def library(weights, grads, masks, adaptive):
    """Perturb and restore as sparsam does."""
    selection = [True] * len(weights) if masks is None else masks
    restore(perturb(weights, grads, selection, [RHO] * len(weights), adaptive=adaptive))


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048, help="a layer has width × width weights")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    about = machine(device)  # before anything changes
    shape = (options.layers, options.width, options.width)
    weights, grads = (list(torch.randn(shape, device=device).to(DTYPES[options.dtype]).unbind()) for _ in range(2))
    masks = list((torch.rand(shape, device=device) < 0.5).unbind())
    works = {
        (name, who): partial(work, weights, grads, masks if masked else None, adaptive)
        for name, (masked, adaptive) in CASES.items()
        for who, work in (("loop", loop), ("sparsam", library))
    }
    found = times_in_turn([*works.values()], rounds=options.rounds, clock=Clock(device), warm_up=3)
    times = dict(zip(works, found, strict=True))
    rows = {
        name: {
            "ratio": StepRatio.of_times(times[name, "sparsam"], times[name, "loop"]).to_dict(),
            **{f"{who}_ms": 1000 * statistics.median(times[name, who]) for who in ("loop", "sparsam")},
        }
        for name in CASES
    }
    result = {
        **about,
        "dtype": options.dtype,
        "weights": options.layers * options.width**2,
        "cases": rows,
    }
    print(
        f"\n{result['device']}, {result['threads']} threads, torch {result['torch']}, {result['dtype']}, "
        f"{result['weights']:,} weights, {options.rounds} rounds\n"
    )
    print("| perturb and restore | loop, ms | sparsam, ms | ratio (quartiles) |\n| --- | --- | --- | --- |")
    for name, row in rows.items():
        ratio = row["ratio"]
        print(
            f"| {name} | {row['loop_ms']:.1f} | {row['sparsam_ms']:.1f} | "
            f"{ratio['median']:.2f} ({ratio['low']:.2f} – {ratio['high']:.2f}) |"
        )
    write(result, options.output)


if __name__ == "__main__":
    main()
