"""What a step costs when nothing before a cut is computed twice: SSAM-C beside SGD, SAM and unstructured sparse SAM.

All methods of a network are set up first. Then each takes steps in turn, round after round. What counts is the ratio to
SGD in the same round: the median over the rounds, and its quartiles. On a GPU a step is one CUDA graph. The JSON holds
every round; `--plot` draws time against the perturbed share.

    python benchmarks/ssam_c.py --output results/ssam-c/step-times.json --plot docs/images/ssam-c-time.png
    python benchmarks/ssam_c.py --redraw results/ssam-c/step-times.json --plot docs/images/ssam-c-time.png
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path

import torch
from in_turn import machine, milliseconds, summary, write
from torch.nn import functional as F

from sparsam import SAM, CapturedStep, FriendlyAscent, MomentumAscent, RandomMask, SuffixMask
from sparsam.models import build_model
from sparsam.report.styles import METHODS as STYLES
from sparsam.training.flops import theoretical_flops

CUTS = {  # module names, and what people call what follows them
    "resnet18": {
        "layer2": "stages 2-4",
        "layer3": "stages 3+4",
        "layer3.1": "half of stage 3, stage 4",
        "layer4": "stage 4",
        "layer4.1": "last block",
        "head": "head",
    },
    "wrn-28-10": {
        "layer2": "groups 2+3",
        "layer3": "group 3",
        "layer3.1": "last 3 blocks",
        "layer3.2": "last 2 blocks",
        "layer3.3": "last block",
    },
}
FRIENDLY = {"resnet18": ("layer2", "layer3", "layer4"), "wrn-28-10": ("layer2", "layer3")}
MOMENTUM = "one pass, along the momentum"


def methods(network):
    """Return what is compared: the name, and what SAM is built with for a model; None: no SAM at all."""
    table = {"SGD": None, "SAM": lambda model: {}, "unstructured, 50 %": lambda model: {"mask": RandomMask(0.5)}}
    for cut, words in CUTS[network].items():
        table[f"SSAM-C, {words}"] = lambda model, cut=cut: {"mask": SuffixMask(model, cut)}
    for cut in FRIENDLY[network]:
        name = f"friendly SSAM-C, {CUTS[network][cut]}"
        table[name] = lambda model, cut=cut: {"mask": SuffixMask(model, cut), "ascent": FriendlyAscent()}
    table[MOMENTUM] = lambda model: {"ascent": MomentumAscent()}
    return table


class Case:
    """One method on one network, ready to take steps."""

    def __init__(self, name, network, options, device, build):
        torch.manual_seed(0)
        self.name = name
        self.model = build_model(network, 100).to(device, memory_format=torch.channels_last)
        x = torch.randn(options.batch_size, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
        y = torch.randint(0, 100, (options.batch_size,), device=device)
        fused = device.type == "cuda"
        opt = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-3, fused=fused)
        if build is not None:
            opt = SAM.wrap(opt, rho=0.05, model=self.model, **build(self.model))
        self.opt = opt
        bf16 = options.precision == "bf16"

        def closure():
            opt.zero_grad()
            with torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
                loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            return loss

        self.step = CapturedStep(opt, closure) if device.type == "cuda" else lambda: opt.step(closure)

    def perturbed(self):
        """Return the share of the weights that a step of two passes perturbs."""
        if not isinstance(self.opt, SAM) or not self.opt.needs_second_pass:
            return 0.0
        masks = self.opt.masks()
        return sum(int(m.sum()) for m in masks) / sum(m.numel() for m in masks)


def measure(network, options, device):
    """Return a row for each method."""
    cases = [Case(name, network, options, device, build) for name, build in methods(network).items()]
    for case in cases:
        for _ in range(options.warm_up):
            case.step()
        print(f"{network}: {case.name} is ready", file=sys.stderr)
    steps = {case.name: case.step for case in cases}
    times = milliseconds(steps, rounds=options.rounds, count=options.steps, device=device)
    return [
        {
            "network": network,
            "method": case.name,
            "perturbed": case.perturbed(),
            **summary(times[case.name], times["SGD"]),
        }
        for case in cases
    ]


def show(result):
    """Print the tables as Markdown."""
    for network in dict.fromkeys(row["network"] for row in result["rows"]):
        print(f"\n{network}, {result['device']}, torch {result['torch']}, batch {result['batch_size']},", end=" ")
        print(f"{result['precision']}, {result['rounds']} rounds of {result['steps']} steps\n")
        print(
            "| method | weights perturbed | ms a step (smallest – largest) | × SGD (quartiles) | the paper's theory |"
        )
        print("| --- | --- | --- | --- | --- |")
        for row in result["rows"]:
            if row["network"] == network:
                spread = f"{row['ms']:.2f} ({min(row['rounds_ms']):.2f} – {max(row['rounds_ms']):.2f})"
                theory = theoretical_flops(row["perturbed"] or None)
                share = f"{100 * row['perturbed']:.1f} %"
                ratio = f"{row['ratio']:.3f}" + (f" ({row['low']:.3f} – {row['high']:.3f})" if "low" in row else "")
                print(f"| {row['method']} | {share} | {spread} | {ratio} | {theory:.2f} |")


def plot(result, path):
    """Draw time against the perturbed share, beside the paper's theoretical line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    networks = list(dict.fromkeys(row["network"] for row in result["rows"]))
    figure, axes = plt.subplots(1, len(networks), figsize=(5.2 * len(networks), 4.2), sharey=True, squeeze=False)
    for ax, network in zip(axes[0], networks, strict=True):
        rows = [row for row in result["rows"] if row["network"] == network]
        cuts = sorted((r["perturbed"], r["ratio"], r["method"]) for r in rows if r["method"].startswith("SSAM-C"))
        shares = [i / 100 for i in range(101)]
        ax.plot(
            [100 * s for s in shares],
            [theoretical_flops(s) for s in shares],
            "--",
            color="0.6",
            label="theory of the paper",
        )
        ax.plot(
            [100 * c[0] for c in cuts], [c[1] for c in cuts], "o", **STYLES["SSAM-C"].line, label="SSAM-C, measured"
        )
        for method, style, marker in (
            ("SGD", STYLES["SGD"], "s"),
            ("SAM", STYLES["SAM"], "D"),
            ("unstructured, 50 %", STYLES["SSAM, random"], "^"),
        ):
            row = next(r for r in rows if r["method"] == method)
            ax.plot(
                100 * row["perturbed"],
                row["ratio"],
                marker,
                color=style.line["color"],
                markersize=8,
                label=f"{method}, measured",
            )
        for share, ratio, name in cuts:
            text = name.removeprefix("SSAM-C, ")
            side = {"xytext": (-6, 5), "ha": "right"} if share > 0.1 else {"xytext": (8, -3), "ha": "left"}
            ax.annotate(text, (100 * share, ratio), textcoords="offset points", fontsize=8, **side)
        ax.set(title=network, xlabel="perturbed weights, %", xlim=(-4, 104), ylim=(0.95, 2.2))
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("time of a step, × SGD")
    axes[0][0].legend(fontsize=8, loc="upper left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"\n{path}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(CUTS), choices=list(CUTS))
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40, help="in each round")
    parser.add_argument("--warm-up", type=int, default=20, help="steps before the first round")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--redraw", type=Path, help="draw and print an earlier output, measure nothing")
    options = parser.parse_args()
    if options.redraw:
        result = json.loads(options.redraw.read_text())
    else:
        device = torch.device(options.device)
        torch.backends.cudnn.benchmark = True
        result = {
            **machine(device),
            "batch_size": options.batch_size,
            "precision": options.precision,
            "rounds": options.rounds,
            "steps": options.steps,
            "rows": [row for network in options.networks for row in measure(network, options, device)],
        }
    if not options.redraw:
        write(result, options.output)
    show(result)
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
