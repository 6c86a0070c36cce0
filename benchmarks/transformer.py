"""Training a decoder-only transformer by AdamW, SAM and thrifty SAM: tokens a second, peak memory, and how they grow.

For each size all methods are set up first. Then they take steps in turn, round after round. Blocks are compiled one by
one, and steps run eagerly, under bf16 autocast. Tokens are random. A new mask is timed as what a step takes in which
one is due, less a step with the mask that is there. Memory is the weights', the optimizer's and a step's, on a GPU.

    python benchmarks/transformer.py --output results/transformer/h200.json --plot docs/images/transformer.png
    python benchmarks/transformer.py --redraw results/transformer/h200.json --plot docs/images/transformer.png
"""

import argparse
import contextlib
import gc
import json
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from in_turn import machine, milliseconds, write
from torch import nn
from torch.nn import functional as F

from sparsam import SAM, DynamicMask, RandomMask, TopKMask, thrifty
from sparsam.report.styles import style

RHO, STEPS = 0.05, 1_000_000
SETTINGS = {"lr": 1e-4, "weight_decay": 0.1}
ADAMW, FIRST, LAST = "AdamW", "thrifty, first steps", "thrifty, last steps"
MASKS = {
    "random": lambda interval: RandomMask(0.5, interval=interval),
    "largest weights": lambda interval: TopKMask(0.5, lambda params: [p.abs() for p in params], interval=interval),
    "dynamic": lambda interval: DynamicMask(0.5, interval=interval, total_steps=STEPS),
}
LOOKS = {"thrifty": "Thrifty SAM", "random": "SSAM, random", "dynamic": "SSAM-D"}  # whose colours lines have


class Size(NamedTuple):
    """How large a transformer is."""

    width: int
    depth: int
    tokens: int = 32768  # in the vocabulary


SIZES = {"11M": Size(256, 4), "90M": Size(640, 14), "350M": Size(1024, 25), "tiny": Size(32, 2, 64)}


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each after a LayerNorm and around a skip."""

    def __init__(self, width):
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        """Return x plus what both layers add to it."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder; its first and last layers share their weights."""

    def __init__(self, size, context):
        super().__init__()
        self.embedding = nn.Embedding(size.tokens, size.width)
        self.positions = nn.Embedding(context, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.tokens, bias=False)
        self.head.weight = self.embedding.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens):
        """Return a number for each token that may come next."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def adamw(model, x):
    return torch.optim.AdamW(model.parameters(), fused=x.is_cuda, **SETTINGS)


def sam(model, x, mask=None):
    return SAM.wrap(adamw(model, x), rho=RHO, mask=mask, model=model)


def thrifty_first(model, x):
    return thrifty(model, torch.optim.AdamW, x, total_steps=STEPS, rho=RHO, fused=x.is_cuda, **SETTINGS)


def thrifty_last(model, x):
    opt = thrifty_first(model, x)
    opt.steps = opt.schedule.first
    return opt


def masked(make, interval):
    return lambda model, x: sam(model, x, make(interval))


METHODS = {ADAMW: adamw, "SAM": sam, FIRST: thrifty_first, LAST: thrifty_last}
for word, make in MASKS.items():
    METHODS |= {f"{word} mask": masked(make, STEPS), f"{word} mask, made in each step": masked(make, 1)}


class Case:
    """One method on one model, ready to take steps."""

    def __init__(self, name, size, options, device):
        on_gpu = device.type == "cuda"
        before = torch.cuda.memory_allocated(device) if on_gpu else 0
        torch.manual_seed(0)
        model = Transformer(size, options.context).to(device)
        if options.compile:
            for block in model.blocks:
                block.compile(dynamic=False)
        data = torch.randint(size.tokens, (options.batch_size, options.context + 1), device=device)
        x, y = data[:, :-1], data[:, 1:]
        opt = METHODS[name](model, x)
        autocast = torch.autocast(device.type, torch.bfloat16) if options.precision == "bf16" else None

        def closure():
            opt.zero_grad()
            with autocast or contextlib.nullcontext():
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            return loss

        self.opt, self.weights = opt, sum(p.numel() for p in model.parameters())
        self.step = lambda: opt.step(closure)
        for _ in range(options.warm_up):
            self.step()
        self.memory_mb = None
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
            self.step()
            self.memory_mb = (torch.cuda.max_memory_allocated(device) - before) / 2**20


def measure(name, options, device):
    """Return what was found for one size."""
    gc.collect()  # the size before this one
    torch.compiler.reset()  # torch keeps few versions of a function
    cases = {}
    for method in METHODS:
        cases[method] = Case(method, SIZES[name], options, device)
        print(f"{name}: {method} is ready", file=sys.stderr)
    steps = {method: case.step for method, case in cases.items()}
    times = milliseconds(steps, rounds=options.rounds, count=options.steps, device=device)
    choice = cases[LAST].opt.choice
    times["thrifty"] = [
        (1 - choice.fraction) * first + choice.fraction * last
        for first, last in zip(times[FIRST], times[LAST], strict=True)
    ]
    memory = {method: case.memory_mb for method, case in cases.items()}
    memory["thrifty"] = memory[LAST]
    return {
        "size": name,
        "weights": cases[ADAMW].weights,
        "choice": str(choice),
        "mask_ms": {
            word: statistics.median(
                due - plain
                for due, plain in zip(times[f"{word} mask, made in each step"], times[f"{word} mask"], strict=True)
            )
            for word in MASKS
        },
        "rows": [
            {
                "method": method,
                "ms": statistics.median(own),
                "tokens_a_second": 1000 * options.batch_size * options.context / statistics.median(own),
                "ratio": statistics.median(t / plain for t, plain in zip(own, times[ADAMW], strict=True)),
                "memory_mb": memory[method],
                "rounds_ms": own,
            }
            for method, own in times.items()
        ],
    }


def show(result):
    """Print the tables as Markdown."""
    print(f"\n{result['device']}, torch {result['torch']}, {result['precision']},", end=" ")
    print(f"batch {result['batch_size']} × {result['context']} tokens, {result['rounds']} rounds of {result['steps']}")
    for size in result["sizes"]:
        print(f"\n{size['size']}: {size['weights']:,} weights; thrifty: {size['choice']}\n")
        print("| method | ms a step (smallest – largest) | × AdamW | tokens a second | peak memory, MB |")
        print("| --- | --- | --- | --- | --- |")
        for row in size["rows"]:
            memory = "–" if row["memory_mb"] is None else f"{row['memory_mb']:,.0f}"
            spread = f"{row['ms']:.1f} ({min(row['rounds_ms']):.1f} – {max(row['rounds_ms']):.1f})"
            tokens = f"{row['tokens_a_second']:,.0f}"
            print(f"| {row['method']} | {spread} | {row['ratio']:.3f} | {tokens} | {memory} |")
        print("\nA new mask:", ", ".join(f"{word} {ms:.1f} ms" for word, ms in size["mask_ms"].items()))


def plot(result, path):
    """Draw what SAM adds to a step, memory and the time of a new mask against the number of weights."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    weights = [size["weights"] / 1e6 for size in result["sizes"]]
    rows = [{row["method"]: row for row in size["rows"]} for size in result["sizes"]]
    figure, axes = plt.subplots(1, 3, figsize=(13, 4))
    for method in (ADAMW, "SAM", "thrifty"):
        look = style(LOOKS.get(method, method)).line
        axes[0].plot(weights, [row[method]["ms"] for row in rows], marker="o", label=method, **look)
        if rows[0][method]["memory_mb"] is not None:
            memory = [row[method]["memory_mb"] / 1024 for row in rows]
            axes[1].plot(weights, memory, marker="o", label=method, **look)
    for word in MASKS:
        look = style(LOOKS.get(word, word)).line
        axes[2].plot(weights, [size["mask_ms"][word] for size in result["sizes"]], marker="o", label=word, **look)
    for ax, title in zip(axes, ("a step, ms", "peak memory, GiB", "a new mask, ms"), strict=True):
        ax.set(title=title, xlabel="weights, millions", xlim=(0, None), ylim=(0, None))
        ax.grid(alpha=0.3)
        if ax.lines:
            ax.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main():
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["11M", "90M", "350M"])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024, help="tokens of a text")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16" if cuda else "fp32")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="in each round")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the first round")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--redraw", type=Path, help="draw and print an earlier output, measure nothing")
    options = parser.parse_args()
    if options.redraw:
        result = json.loads(options.redraw.read_text())
    else:
        device = torch.device(options.device)
        keys = ("batch_size", "context", "precision", "compile", "rounds", "steps")
        result = {**machine(device), **{key: getattr(options, key) for key in keys}}
        result["sizes"] = []
        for name in options.sizes:
            result["sizes"].append(measure(name, options, device))
            write(result, options.output)
    show(result)
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
