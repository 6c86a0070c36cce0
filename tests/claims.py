"""The numbers on the pages: claims with the files that they come from, and settings.

To quote a measured number, add a `Sentence` or a `TableOf` to CLAIMS. To quote a setting, add a phrase to SETTINGS.
The functions that read the files are in support/committed.py.
"""

from functools import partial

from committed import (
    AT_1_15,
    AT_1_35,
    PLAIN,
    SAM,
    SGD,
    SSAM_F,
    above_sam,
    accuracy,
    below_the_paper,
    benchmark,
    best,
    best_epoch,
    cost,
    cost_in_time,
    difference,
    difference_or_none,
    gain,
    gain_of_best_epoch,
    gap,
    last_steps,
    little_accuracy,
    little_difference,
    loss_difference,
    lost_at_90,
    ours,
    paper,
    ratio,
    run,
    searched,
    seeds,
    share_cost,
    share_run,
    train_loss,
)
from page_numbers import Sentence, TableOf

README, RUNS, THRIFTY, LITTLE_DATA = "README.md", "results/README.md", "docs/thrifty.md", "docs/little-data.md"
SHARES = "docs/shares.md"
TABLE_1, TABLE_9 = "results/notes/table1.md", "results/notes/table9.md"
H200, HOST, STEPS = "peers/h200.json", "peers/cpu-host.json", "ssam-c/step-times.json"

PAPER_ROWS = {  # a run of each row is in FOLDER/NAME-seed0
    "SGD": "sgd",
    "SGD at SAM's weight decay": "sgd-decay",
    "SAM": "sam",
    "SSAM-F, sparsity 0.5": "ssam-f",
    "SSAM-F, sparsity 0.9": "ssam-f-sparsity0.9",
    "SSAM-D, sparsity 0.5": "ssam-d",
    "SSAM-D, sparsity 0.9": "ssam-d-sparsity0.9",
}
PAPER_COLUMNS = {
    "weight decay": lambda path: [run(path).weight_decay],
    "rho": lambda path: [run(path).rho] if run(path).sam else [],
    "here": lambda path: [100 * run(path).accuracy],
    "best epoch": lambda path: [100 * run(path).best_accuracy],
    "paper (maximum over epochs)": lambda path: [n for n in [paper(run(path).name)] if n is not None],
}

SGD_RUNS, SAM_RUNS = "sgd-decay-refresh_batchnorm100-seed*", "sam-*seed?"
SGD_NAME = "cifar100-resnet18-sgd-decay"
THRIFTY_RUNS, LAYER2_RUNS = "thrifty-refresh_batchnorm100-seed?", "thrifty-layer2-*-seed?"
THRIFTY_VIT = "thrifty-rho0.8-blocks.2-fraction0.3"
LITTLE_ROWS = {  # of the tables with base optimizers, by the epochs of the first row: the table and the row of each
    30: {
        "30 epochs, weight decay 1e-3": ("resnet", "sgd"),
        "15 epochs": ("resnet", "sgd-epochs15"),
        "35 epochs": ("resnet", "sgd-epochs35"),
        "60 epochs": ("resnet", "sgd-epochs60"),
        "weight decay 5e-3": ("resnet", "sgd-weight_decay0.005"),
        "weight decay 1e-2": ("resnet", "sgd-weight_decay0.01"),
        "SAM, ρ = 0.1, weight decay 1e-3": ("small-data", "sam"),
    },
    60: {
        "60 epochs, weight decay 0.05": ("vit", "vit-adamw"),
        "20 epochs": ("vit", "vit-adamw-epochs20"),
        "30 epochs": ("vit", "vit-adamw-epochs30"),
        "70 epochs": ("vit", "vit-adamw-epochs70"),
        "120 epochs": ("vit", "vit-adamw-epochs120"),
        "weight decay 0.5": ("vit", "vit-adamw-weight_decay0.5"),
        "SAM, ρ = 0.4, 60 epochs": ("vit-small-data", "vit-sam-rho0.4"),
    },
}

CLAIMS = [
    # README.md
    Sentence(README, "at a counted cost of {} times SGD, instead of {} times", lambda: [cost(AT_1_15), cost(SAM)]),
    Sentence(
        README,
        "test accuracy over three seeds: SGD {} %, sparsam {} %, SAM {} %",
        lambda: [accuracy(name)[0] for name in (SGD, AT_1_15, SAM)],
    ),
    Sentence(README, "`layer3` and everything after it, in the last {} %", lambda: [last_steps(AT_1_15)]),
    Sentence(
        README,
        "12 epochs took {} times as long as SGD, both with CUDA graphs",
        lambda: [run("thrifty/timing/thrifty-seed0").seconds / run("thrifty/timing/sgd-decay-seed0").seconds],
    ),
    Sentence(
        README,
        "In eager steps it was {} times, and {} for SAM",
        lambda: [ratio(H200, method)[0] for method in ("sparsam, thrifty at 1.15, mean", "sparsam, SAM")],
    ),
    Sentence(
        README,
        "The plain gradient was no worse: 1.15 reached {} ± {} (n = {})",
        lambda: [*accuracy(PLAIN), seeds(PLAIN)],
    ),
    Sentence(
        README,
        "on a small ResNet (five seeds) 0.2 gained {} points, and 0.8 gained {}",
        lambda: [gain("small-data", "thrifty"), gain("small-data", "thrifty-rho0.8")],
    ),
    Sentence(README, "SGD ends at a training loss of {}", lambda: [train_loss("cifar100-resnet18-sgd-decay")]),
    Sentence(
        README,
        "SGD reaches {} % at the table's 1e-3, and {} % at the usual 5e-4 (one seed)",
        lambda: [accuracy(SGD)[0], ours("cifar100-resnet18-sgd")],
    ),
    Sentence(
        README,
        "A small ResNet gains {} points by thrifty SAM, and {} by ten times the weight decay",
        lambda: [gain("small-data", "thrifty-rho0.8"), gain("resnet", "sgd-weight_decay0.01")],
    ),
    Sentence(
        README,
        "A small ViT gains {}, and {} by a third of the epochs",
        lambda: [gain("vit-small-data", f"vit-{THRIFTY_VIT}"), gain("vit", "vit-adamw-epochs20")],
    ),
    Sentence(
        README,
        "A ResNet-18 step took {} ms by SGD, {} ms by SAM",
        lambda: [benchmark(STEPS)[method]["ms"] for method in ("SGD", "SAM")],
    ),
    # results/README.md: the paper's methods
    TableOf(
        RUNS,
        "CIFAR-10, ResNet-18, 200 epochs",
        {row: f"cifar10-resnet18-200/{name}-seed0" for row, name in PAPER_ROWS.items()},
        PAPER_COLUMNS,
    ),
    TableOf(
        RUNS,
        "One seed: the paper's methods",
        {row: f"cifar100-resnet18-200/{name}-seed0" for row, name in PAPER_ROWS.items()},
        PAPER_COLUMNS,
    ),
    # docs
    *(
        TableOf(
            LITTLE_DATA,
            "Plain training, tuned",
            rows,
            {"test accuracy, %": little_accuracy, f"difference to {length} epochs (95 % interval)": little_difference},
        )
        for length, rows in LITTLE_ROWS.items()
    ),
    Sentence(
        LITTLE_DATA,
        "Stopped there it has {} %, above SAM's {} % and thrifty SAM's {} % at 1.15",
        lambda: [
            best_epoch("vit-adamw"),
            *(little_accuracy(("vit-small-data", f"vit-{row}"))[0] for row in ("sam-rho0.4", THRIFTY_VIT)),
        ],
    ),
    Sentence(LITTLE_DATA, "only 20 epochs is above SAM, by {} ({} to {})", above_sam),
    Sentence(
        THRIFTY,
        "SGD reached {} ± {} %, thrifty SAM at 1.15 reached {} ± {} %, and SAM reached {} ± {} %",
        lambda: [*accuracy(SGD), *accuracy(AT_1_15), *accuracy(SAM)],
    ),
    Sentence(THRIFTY, "difference to SAM is {} points (95 % interval {} to {})", lambda: difference(AT_1_15, SAM)),
    Sentence(
        THRIFTY,
        "A budget of 1.35 was no better: {} ± {} %. Along the plain gradient, 1.15 reached {} ± {} %",
        lambda: [*accuracy(AT_1_35), *accuracy(PLAIN)],
    ),
    TableOf(
        THRIFTY,
        "Measure it on your machine",
        {"budget 1.15": "thrifty-1.15", "budget 1.35": "thrifty-1.35", "SAM": "sam"},
        {
            heading: partial(cost_in_time, workload)
            for heading, workload in (
                ("small ResNet", "resnet"),
                ("small ViT", "vit"),
                ("CNN", "noise"),
                ("language model", "text"),
                ("forecaster", "forecast"),
            )
        },
    ),
    TableOf(
        SHARES,
        "What it costs",
        {
            "counted": "counted",
            "H200: ResNet-18, 32², batch 128": "resnet18-128-graph",
            "H200: ResNet-18, 32², batch 512": "resnet18-512-graph",
            "H200: ResNet-18, 32², batch 2048": "resnet18-2048-graph",
            "H200: ResNet-50, 224², batch 64": "resnet50-64-graph",
            "H200: ViT-S, 224², batch 128": "vit-s-128-graph",
            "CPU: small ViT, batch 100": "vit-small-100-eager",
        },
        {
            method: partial(share_cost, method=method)
            for method in ("SAM", "share 1/16", "share 1/8", "share 1/4", "share 1/2")
        },
    ),
    TableOf(
        SHARES,
        "What it brings",
        {
            "SGD, without ρ": {0.1: "sgd-decay"},
            "SAM": {0.1: "sam-rho0.1", 0.2: "sam-rho0.2"},
            "thrifty SAM, budget 1.15": {rho: f"thrifty-layer3-fraction0.304-rho{rho}" for rho in (0.1, 0.2)},
            "share 1/4": {rho: share_run(rho, 0.25) for rho in (0.2, 0.4, 0.8)},
            "share 1/8": {rho: share_run(rho, 0.125) for rho in (0.4, 0.8)},
        },
        {
            heading: lambda names, rho=rho: searched(names[rho]) if rho in names else []
            for rho, heading in (
                (0.1, "ρ = 0.1: accuracy (fresh), loss"),
                (0.2, "ρ = 0.2"),
                (0.4, "ρ = 0.4"),
                (0.8, "ρ = 0.8"),
            )
        },
    ),
    # results/README.md: thrifty SAM
    TableOf(
        RUNS,
        "Three seeds: SGD, thrifty SAM and SAM",
        {
            "SGD": SGD,
            "thrifty SAM, budget 1.15": AT_1_15,
            "thrifty SAM, budget 1.15, along the plain gradient": PLAIN,
            "thrifty SAM, budget 1.35": AT_1_35,
            "SAM": SAM,
        },
        {
            "cost, × SGD": lambda name: [cost(name)],
            "test accuracy, %": accuracy,
            "n": lambda name: [seeds(name)],
            "difference to SGD": lambda name: difference_or_none(name, SGD),
            "difference to SAM": lambda name: difference_or_none(name, SAM),
        },
    ),
    Sentence(RUNS, "A budget of 1.35 was no better than 1.15: {} ({} to {})", lambda: difference(AT_1_35, AT_1_15)),
    Sentence(
        RUNS,
        "The plain gradient brought {} points more than F-SAM's direction, the default, at 1.15 ({} to {})",
        lambda: difference(PLAIN, AT_1_15),
    ),
    Sentence(
        RUNS,
        "worse than SAM: by {} ({} to {}) at 1.15, and by {} ({} to {}) at 1.35",
        lambda: [n for name in (THRIFTY_RUNS, LAYER2_RUNS) for n in loss_difference(name, SAM_RUNS)],
    ),
    Sentence(RUNS, "SGD's loss is {} above SAM's", lambda: loss_difference(SGD_RUNS, SAM_RUNS)[:1]),
    Sentence(
        RUNS,
        "SAM was better with 0.1 ({} %) than with 0.2 ({} %;",
        lambda: [100 * run(f"thrifty/search/sam-rho{rho}-seed0").accuracy for rho in (0.1, 0.2)],
    ),
    *(
        Sentence(page, text, lambda: [100 * run(f"cifar100-resnet18-longer/{SGD_NAME}-epochs230-seed0").accuracy])
        for page, text in (
            (RUNS, "SGD for 230 epochs: {} % on the test images"),
            (README, "the cost of budget 1.15, brought nothing: {} % (one seed)"),
        )
    ),
    Sentence(RUNS, "1.15 buys the last {} %", lambda: [last_steps(PLAIN)]),
    Sentence(
        RUNS,
        "SSAM-F's second seed has {} %",
        lambda: [100 * run("cifar100-resnet18-200/ssam-f-seed1").accuracy],
    ),
    Sentence(RUNS, "At 1.15 thrifty SAM perturbs from `layer3` on, in the last {} %", lambda: [last_steps(AT_1_15)]),
    Sentence(RUNS, "At 1.35 it perturbs from `layer2` on, in the last {} %", lambda: [last_steps(AT_1_35)]),
    Sentence(
        RUNS,
        "`sgd-decay-refresh_batchnorm100-seed0` ({} %)",
        lambda: [100 * run("cifar100-resnet18-200/sgd-decay-refresh_batchnorm100-seed0").accuracy],
    ),
    Sentence(RUNS, "`sgd-decay-seed0` ({} %)", lambda: [100 * run("cifar100-resnet18-200/sgd-decay-seed0").accuracy]),
    # results/README.md: beside other libraries
    TableOf(
        RUNS,
        "Beside other libraries",
        {
            "sparsam, SAM": "sparsam, SAM",
            "pytorch_optimizer 4.1.0, SAM": "pytorch_optimizer 4.1.0, SAM",
            "the authors' code, SAM": "the authors' code, SAM",
            "davda54/sam": "davda54/sam",
            "sparsam, SAM from `layer4` on": "sparsam, from layer4 on",
            "sparsam, thrifty at 1.15: mean of all steps": "sparsam, thrifty at 1.15, mean",
            "sparsam, SAM in a CUDA graph": "sparsam, SAM, in a CUDA graph",
        },
        {
            "× SGD": lambda method: ratio(H200, method),
            "peak memory, MB": lambda method: [benchmark(H200)[method]["memory_mb"]],
        },
    ),
    Sentence(
        RUNS,
        "less time than plain eager SGD: {} and {} ms",
        lambda: [benchmark(H200)["sparsam, SAM, in a CUDA graph"]["ms"], benchmark(H200)["SGD"]["ms"]],
    ),
    TableOf(
        RUNS,
        "Beside other libraries",
        {  # the method of each column; the other codes have no cut
            "a loop by hand": ("by hand, SAM", "by hand, from layer4 on"),
            "the authors' code": ("the authors' code, SAM", None),
            "sparsam": ("sparsam, SAM", "sparsam, from layer4 on"),
            "pytorch_optimizer 4.1.0": ("pytorch_optimizer 4.1.0, SAM", None),
            "davda54/sam": ("davda54/sam", None),
        },
        {
            "SAM": lambda methods: ratio(HOST, methods[0]),
            "from `layer4` on": lambda methods: ratio(HOST, methods[1]) if methods[1] else [],
        },
    ),
    Sentence(
        RUNS,
        "base steps take {} of SGD's there, its last steps, from `layer3` on, {}: {} in the mean for a budget of 1.15",
        lambda: [ratio(HOST, f"sparsam, thrifty at 1.15, {part}")[0] for part in ("first steps", "last steps", "mean")],
    ),
    # results/notes/
    Sentence(TABLE_1, "ours would be {} to {} points higher that way", gain_of_best_epoch),
    Sentence(
        TABLE_1,
        "SSAM-F at sparsity 0.9 has {} here, {} in Table 8 and {} in Table 9; SSAM-D at 0.5 has {} here and {} in Table 9",
        lambda: [
            paper("cifar10-resnet18-ssam-f-sparsity0.9"),
            paper("cifar10-resnet18-ssam-f-sparsity0.9", "table8"),
            paper("cifar10-resnet18-ssam-f-sparsity0.9", "table9"),
            paper("cifar10-resnet18-ssam-d"),
            paper("cifar10-resnet18-ssam-d", "table9"),
        ],
    ),
    Sentence(
        TABLE_1,
        "it closes {} of the {} points between SGD and SAM on CIFAR-100, and {} of {} on CIFAR-10",
        lambda: [*gap("cifar100"), *gap("cifar10")],
    ),
    Sentence(TABLE_1, "On CIFAR-10 all rows are {} to {} points below the paper", lambda: below_the_paper("cifar10-")),
    Sentence(
        TABLE_1,
        "SAM and SSAM-F at 50 % differ by {} here",
        lambda: [ours("cifar10-resnet18-sam") - ours("cifar10-resnet18-ssam-f")],
    ),
    Sentence(
        TABLE_1,
        "In the paper too 90 % is below 50 %: on CIFAR-100 by {} points (SSAM-F) and {} (SSAM-D), here by {} and {}; on "
        "CIFAR-10 by {} and {}, here by {} and {}",
        lambda: [n for data in ("cifar100", "cifar10") for number in (paper, ours) for n in lost_at_90(data, number)],
    ),
    Sentence(
        TABLE_1,
        "SSAM-F is {} points below SAM here, with two seeds (95 % interval {} to {}). In the paper it is {} above",
        lambda: [
            -difference(SSAM_F, SAM)[0],
            *difference(SSAM_F, SAM)[1:],
            paper("cifar100-resnet18-ssam-f") - paper("cifar100-resnet18-sam"),
        ],
    ),
    Sentence(
        TABLE_1,
        "On CIFAR-10 SSAM-D at 0.5 is {} points below SAM",
        lambda: [ours("cifar10-resnet18-sam") - ours("cifar10-resnet18-ssam-d")],
    ),
    Sentence(
        TABLE_1,
        "By the best epoch, as the paper counts, it is {} below the paper's, and at 0.9 it is {} below",
        lambda: [
            paper(name) - best(name) for name in ("cifar10-resnet18-ssam-d", "cifar10-resnet18-ssam-d-sparsity0.9")
        ],
    ),
    Sentence(
        TABLE_9, "the paper's {} for SSAM-F", lambda: [paper("cifar10-resnet18-ssam-f-sparsity0.9-interval2", "table9")]
    ),
]

SETTINGS = {  # phrases with numbers that are not measured, and the reason
    "Python ≥ 3.11": "a version",
    "PyTorch ≥ 2.11": "a version",
    "`rho=` 0.1, 0.2 (the default), 0.4 and 0.8": "values of rho",
    "ρ = 0.2": "a setting of the runs",
    "SGD 79.21 %, thrifty SAM 81.08 %, SAM 81.33 %": "the words for the picture",
    "at 1.15": "a budget",
    "the cost of budget 1.15": "a budget",
    "ρ is 0.2": "a setting of the runs",
    "SAM with 0.1 was not trained": "a value of rho",
    "95 % intervals": "a level of confidence",
    "SSAM-F at 50 %": "a sparsity",
    "90 % is below 50 % in all four pairs": "sparsities",
    "A difference of 0.2 points": "a size, for comparison",
    "SSAM-F at sparsity 0.9": "a setting of the paper",
}
