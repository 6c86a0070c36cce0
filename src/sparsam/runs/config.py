"""The tables of a recipe. `[mask]`, `[ascent]` and `[schedule]` mirror the objects of those names."""

from __future__ import annotations

from dataclasses import dataclass

from sparsam.runs.schema import REQUIRED, not_negative, one_of, positive, setting, share, whole

DATA = ("digits", "cifar10", "cifar100", "imagefolder")
IN_MEMORY = ("digits", "cifar10", "cifar100")
FILES = ("cifar10", "cifar100", "imagefolder")
FOLDER = ("imagefolder",)
OPTIMIZERS = ("sgd", "adam", "adamw")
MASKS = ("dense", "random", "fisher", "dynamic", "norm", "suffix")
SPARSE = ("random", "fisher", "dynamic")  # those with a sparsity
ASCENTS = ("gradient", "friendly", "momentum")
SCHEDULES = ("every-step", "every-nth", "last-steps")
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    name: str = "resnet-small"
    stem: str = one_of("cifar", ("cifar", "imagenet"))


@dataclass(frozen=True)
class DataConfig:
    """The images and what happens to them.

    `validation` holds out so many training images and evaluates on them in place of the test images. `limit` takes the
    first so many images of a fixed shuffle, to train on and to evaluate on.
    """

    name: str = one_of("digits", DATA)
    root: str | None = setting("data", names=FILES)
    batch_size: int = whole(128)
    validation: int | None = whole(None)
    validation_seed: int = whole(0, 0)
    limit: int | None = whole(None)
    crop_padding: int | None = whole(0, 0, names=IN_MEMORY)
    flip: bool | None = setting(False, names=IN_MEMORY)
    cutout: int | None = whole(0, 0, names=IN_MEMORY)
    cutout_probability: float | None = share(1.0, names=IN_MEMORY)
    image_size: int | None = whole(224, names=FOLDER)
    resize: int | None = whole(256, names=FOLDER)
    workers: int | None = whole(4, 0, names=FOLDER)
    skip_corrupt: bool | None = setting(False, names=FOLDER)


@dataclass(frozen=True)
class OptimizerConfig:
    """The base optimizer. Its learning rate rises linearly for `warmup_epochs`, then it follows a cosine to 0."""

    name: str = one_of("sgd", OPTIMIZERS)
    lr: float = positive(0.05)
    momentum: float | None = share(0.9, names=("sgd",))
    weight_decay: float = not_negative(1e-3)
    warmup_epochs: int = whole(0, 0)


@dataclass(frozen=True)
class SamConfig:
    """Sharpness-aware minimization. Without it the base optimizer trains alone.

    rho rises in a line for `ramp_epochs`, whole or not, from the first step that perturbs on. 0: it does not change.
    `share` is the share of the batch that both passes see.
    """

    enabled: bool = True
    rho: float = not_negative(0.1)
    ramp_epochs: float = not_negative(0.0)
    adaptive: bool = False
    share: float = share(1.0, zero=False)


@dataclass(frozen=True)
class MaskConfig:
    """Which weights are perturbed. `interval_epochs` None: the mask is made once."""

    name: str = one_of("dense", MASKS)
    sparsity: float | None = share(0.5, names=SPARSE)
    interval_epochs: int | None = whole(None, names=SPARSE)
    samples: int | None = whole(128, names=("fisher",))
    drop: float | None = share(0.5, names=("dynamic",))
    criterion: str | None = one_of("flattest", ("flattest", "sharpest", "random"), names=("dynamic",))
    seed: int | None = whole(0, 0, names=SPARSE)
    cut: str | None = setting(REQUIRED, "the name of a module", names=("suffix",))
    inner: MaskConfig | None = setting(None, names=("suffix",))  # noqa: RUF009


@dataclass(frozen=True)
class AscentConfig:
    """Which way the weights are perturbed. `rho` None: SAM's own."""

    name: str = one_of("gradient", ASCENTS)
    sigma: float | None = not_negative(1.0, names=("friendly",))
    decay: float | None = share(0.6, names=("friendly",))
    rho: float | None = not_negative(None, names=("momentum",))


@dataclass(frozen=True)
class ScheduleConfig:
    """Which steps perturb. `before` None: the steps before the last ones are those of the base optimizer."""

    name: str = one_of("every-step", SCHEDULES)
    n: int | None = setting(REQUIRED, "a whole number >= 1", lambda value: value >= 1, names=("every-nth",))
    fraction: float | None = share(REQUIRED, zero=False, names=("last-steps",))
    before: AscentConfig | None = setting(None, names=("last-steps",))  # noqa: RUF009


@dataclass(frozen=True)
class TrainConfig:
    """How long, on what and how exactly.

    `max_steps` ends the run after so many steps in all, and schedules take it as their total. `threads` is the number
    of CPU threads, None: torch's default. `checkpoint_epochs` None: only the last weights are kept. After the last
    epoch, `refresh_batchnorm` takes BatchNorm's statistics again over so many training batches and evaluates once more;
    None: it does not.
    """

    epochs: int = whole(200)
    max_steps: int | None = whole(None)
    seed: int = whole(0, 0)
    precision: str = one_of("fp32", PRECISIONS)
    threads: int | None = whole(None)
    channels_last: bool = True
    label_smoothing: float = share(0.0)
    cuda_graph: bool = True
    compile: bool = False
    deterministic: bool = False
    tensorboard: bool = False
    checkpoint_epochs: int | None = whole(1)
    checkpoint_steps: int | None = whole(None)
    refresh_batchnorm: int | None = whole(None)


# What people call a method: the base optimizer alone, SAM by its ascent, sparse SAM by its mask.
BASE_METHODS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
DENSE_METHODS = {"gradient": "SAM", "friendly": "F-SAM", "momentum": "Momentum-SAM"}
SPARSE_METHODS = {
    "random": "SSAM, random",
    "fisher": "SSAM-F",
    "dynamic": "SSAM-D",
    "norm": "SAM-ON",
    "suffix": "SSAM-C",
}
