"""Make the table and the picture of the README from the committed runs: test accuracy and cost of each method.

    python benchmarks/front_page.py          # write README.md and docs/images/accuracy-cost-*.svg
    python benchmarks/front_page.py --check  # write nothing; exit with 1 if a file would change
    python benchmarks/front_page.py --print  # print the table and write nothing

To add a row, add an entry to METHODS. Methods without runs are left out.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from pictures import THEMES, changed, draw

from sparsam.data.shapes import SHAPES
from sparsam.models import build_model
from sparsam.replay.counting import PERTURBING, count_costs
from sparsam.report.method import Statistic
from sparsam.report.table import NONE, Cell, Table, spread
from sparsam.report.text import markdown
from sparsam.reproduce.comparison import Difference, compare, find_runs
from sparsam.reproduce.experiments import Experiment, find_experiments
from sparsam.thrifty import FRIENDLY

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "results" / "cifar100-resnet18-200"
README = ROOT / "README.md"
PICTURES = {theme: ROOT / "docs" / "images" / f"accuracy-cost-{theme}.svg" for theme in THEMES}
START, END = "<!-- results: made by benchmarks/front_page.py -->\n", "<!-- end of results -->"

SGD, SAM, SSAM_F = "SGD", "SAM", "SSAM-F, half of the weights"
AT_1_15, AT_1_35 = "**thrifty SAM, budget 1.15**", "**thrifty SAM, budget 1.35**"
METHODS = {  # the rows of the README's table in their order, each with its name in TABLES
    SGD: "cifar100-resnet18-sgd-decay",
    AT_1_15: "cifar100-resnet18-thrifty",
    AT_1_35: "cifar100-resnet18-thrifty-layer2-fraction0.469",
    SSAM_F: "cifar100-resnet18-ssam-f",
    "SSAM-D, half of the weights": "cifar100-resnet18-ssam-d",
    SAM: "cifar100-resnet18-sam",
}
TABLES = [str(ROOT / "results" / "thrifty" / "final.toml"), "table1"]
COLUMNS = (
    "Method",
    "Cost, × SGD (counted)",
    "Test accuracy, %",
    "n",
    "Difference to SGD (95 % interval)",
    "Difference to SAM (95 % interval)",
)
DRAWN = {SGD: "SGD", AT_1_15: "budget 1.15", AT_1_35: "budget 1.35", SAM: "SAM"}  # the names in the picture
ARROWS = {AT_1_15: 0.15, SAM: 0.04}  # methods with an arrow for the extra cost, and its height in the picture

HEIGHT = 360  # of the picture, in pixels


@dataclass(frozen=True)
class Measured:
    """The numbers of a method.

    Args:
        name: The name in the table.
        method: The kind of method, which has a colour of its own.
        cost: The cost of the training, relative to SGD.
        fraction: The part of the steps that is sharpness-aware; None: no schedule sets one.
        accuracies: The test accuracy of each seed after the last epoch, as a fraction.
    """

    name: str
    method: str
    cost: float
    fraction: float | None
    accuracies: tuple[float, ...]

    @property
    def mean(self):
        """The mean accuracy in percent."""
        return 100 * fmean(self.accuracies)

    @property
    def interval(self):
        """The 95 % interval of the mean accuracy. With a single seed, both ends are that seed's accuracy."""
        constant = [0.0, 0.0]  # against a constant, Welch's t-test is the t-test of a single mean
        return Difference.of(self.accuracies, constant).interval or (self.mean, self.mean)


def measure(methods=METHODS):
    """Return the methods that have runs, in their order; each is given with the name of its row."""
    rows = {row.name: row for table in find_experiments(TABLES) for row in table.rows}
    results = compare(Experiment("", "", tuple(rows[name] for name in methods.values())), find_runs(RUNS))
    return [
        Measured(
            name,
            found.method,
            cost(result.recipe),
            result.recipe.schedule.fraction,
            tuple(run.accuracy for run in found.counted),
        )
        for name, result in zip(methods, results, strict=True)
        if (found := result.method)
    ]


def cost(recipe):
    """Return the cost of a training relative to the base optimizer, as `sparsam cuts` counts it.

    A sharpness-aware step without a cut counts as two whole passes.
    """
    if not recipe.sam.enabled:
        return 1.0
    step = 2.0
    if recipe.mask.cut:
        images = SHAPES[recipe.data.name]
        with torch.device("meta"):
            model = build_model(recipe.model.name, images.classes, channels=images.channels, stem=recipe.model.stem)
            x = torch.empty(recipe.data.batch_size, images.channels, images.size, images.size)
        costs = count_costs(model, x).costs(FRIENDLY if recipe.ascent.name == "friendly" else PERTURBING)
        step = next(counted for cut, counted in costs.items() if cut.name == recipe.mask.cut)
    return 1 + (recipe.schedule.fraction or 1) * (step - 1)


def table(methods):
    """Return the table of the README."""
    others = [next((method for method in methods if method.name == name), None) for name in (SGD, SAM)]
    rows = [
        (
            method.name,
            f"{method.cost:.2f}",
            spread(Statistic.of(method.accuracies), 100, ".2f"),
            str(len(method.accuracies)),
            *(_difference(method, other) for other in others),
        )
        for method in methods
    ]
    return markdown(Table(COLUMNS, tuple(tuple(map(Cell, row)) for row in rows)))


def _difference(method, other):
    """Return the difference of two mean accuracies in percent, with a dash where there is no interval."""
    if other is None or other is method:
        return NONE
    found = Difference.of(method.accuracies, other.accuracies)
    interval = "{:+.2f} to {:+.2f}".format(*found.interval) if found.interval else NONE
    return f"{found.value:+.2f} ({interval})".replace("-", "−")


def picture(methods, theme):
    """Return the picture as SVG: accuracy against cost, for a light or a dark page."""
    points = [method for method in methods if method.name in DRAWN]
    return draw(theme, HEIGHT, partial(_draw, points=points))


def _draw(picture, points):
    low, high = (end(bound for point in points for bound in point.interval) for end in (min, max))
    seeds = " or ".join(map(str, sorted({len(point.accuracies) for point in points})))
    axes = picture.axes((0.05, 0.15, 0.93, 0.75))
    axes.set_title(
        f"Thrifty SAM, ResNet-18, CIFAR-100: test accuracy in %, mean of {seeds} seeds, 95 % interval",
        color=picture.grey,
        loc="left",
        size=14,
    )
    axes.set_xlabel("Counted cost of the training, × SGD", color=picture.grey)
    axes.set(xlim=(0.94, 2.06), ylim=(low - 0.68 * (high - low), high + 0.08 * (high - low)))
    axes.set_xticks([point.cost for point in points], [f"{point.cost:.2f}" for point in points])
    axes.set_yticks(range(math.ceil(low), math.ceil(high)))
    axes.spines["bottom"].set(visible=True, color=picture.faint)

    # Draw each mean with its interval, and the levels of SGD and SAM as lines. Names are below the intervals.
    write = partial(axes.annotate, textcoords="offset points", ha="center", color=picture.ink)
    for point in points:
        (lower, upper), colour = point.interval, picture.colour(point.method)
        if point.name in (SGD, SAM):
            axes.axhline(point.mean, color=colour, linewidth=1, dashes=(4, 4), alpha=0.6, zorder=0)
        axes.plot([point.cost, point.cost], [lower, upper], color=colour, linewidth=2.5)
        axes.plot(point.cost, point.mean, "o", color=colour, markersize=10)
        write(DRAWN[point.name], (point.cost, lower), (0, -6), va="top", weight="bold")
        write(f"{point.mean:.2f}", (point.cost, lower), (0, -24), va="top")

    # Draw the extra cost as arrows from SGD.
    place = axes.get_xaxis_transform()
    for point in points:
        if height := ARROWS.get(point.name):
            line = {"arrowstyle": "-|>", "color": picture.colour(point.method), "linewidth": 2, "mutation_scale": 16}
            ends = (point.cost, height), (1, height)
            axes.annotate("", *ends, place, place, arrowprops={**line, "shrinkA": 0, "shrinkB": 0})
            middle = ((1 + point.cost) / 2, height)
            write(f"+{100 * (point.cost - 1):.0f} % cost", middle, (0, 6), xycoords=place, size=13)


def readme(page, methods):
    """Return the text of the README with a new table between the markers."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise SystemExit(f"README.md must have the lines\n{START}{END}\nand the table is written between them")
    return f"{before}{start}\n{table(methods)}\n\n{end}{after}"


def files(methods):
    """Return what this program writes: a text for each file."""
    pictures = {path: picture(methods, theme) for theme, path in PICTURES.items()}
    return {README: readme(README.read_text(encoding="utf-8"), methods), **pictures}


def outdated(methods):
    """Return the files that would change."""
    return changed(files(methods))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    parser.add_argument("--print", action="store_true", help="print the table and write nothing")
    options = parser.parse_args()
    methods = measure()
    if options.print:
        print(table(methods))
    elif options.check:
        names = [str(path.relative_to(ROOT)) for path in outdated(methods)]
        if names:
            sys.exit(f"not up to date: {', '.join(names)}; run python benchmarks/front_page.py")
    else:
        for path, text in files(methods).items():
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
