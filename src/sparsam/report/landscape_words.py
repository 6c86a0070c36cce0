"""Titles, labels and captions of landscapes."""

from __future__ import annotations

from collections.abc import Sequence

from sparsam.analysis.landscape import Landscape


def labels(landscapes: Sequence[Landscape]) -> list[str]:
    """Return labels that differ: the method of each run, or also its seed, or its directory, or else a number."""
    about = [shown.about for shown in landscapes]
    own = methods(landscapes)
    choices = (
        own,
        [f"{method}, seed {known.get('seed')}" for method, known in zip(own, about, strict=True)],
        [str(known.get("run")) for known in about],
    )
    numbered = [f"{method} ({i})" for i, method in enumerate(own, 1)]
    return next((names for names in choices if len(set(names)) == len(names)), numbered)


def methods(landscapes: Sequence[Landscape]) -> list[str]:
    """Return the method of each run, as far as it is known."""
    return [str(shown.about.get("label", "loss")) for shown in landscapes]


def numbers(shown: Landscape) -> str:
    """Return a run's numbers; the median of a part of the grid would not compare with others."""
    return f"at w {shown.centre:.3g}" + (f" · median {shown.median:.3g}" if shown.complete else " · unfinished")


def title(landscapes: Sequence[Landscape]) -> str:
    """Return what is seen: the networks and the data, where they are known."""
    setups = dict.fromkeys(shown.about["setup"] for shown in landscapes if "setup" in shown.about)
    return f"Loss landscape: {', '.join(setups)}" if setups else "Loss landscape"


def caption(landscapes: Sequence[Landscape], *, dot: bool = True) -> str:
    """Return how it was made, and what it leaves out; `dot` says that w is marked by one."""
    settings = landscapes[0].settings
    plane = settings["dimensions"] == 2
    grid = f"{settings['points']}×{settings['points']}" if plane else str(settings["points"])
    samples = " or ".join(f"{n:,}" for n in sorted({shown.settings["samples"] for shown in landscapes}))
    where, noun = ("w + a·d₁ + b·d₂", "Directions") if plane else ("w + a·d", "Direction")
    whose = {"best": "best epoch’s weights", "last": "last epoch’s weights"}
    weights = " or ".join(
        sorted({whose.get(shown.about.get("weights", ""), "model’s weights") for shown in landscapes})
    )
    text = (
        f"Mean loss over {samples} samples at {where}, model in eval mode, {settings['precision']}, {grid} points; "
        f"w{' (round dot)' if dot else ''}: the {weights}. "
    )
    if settings["directions"] == "random":
        text += (
            f"{noun}: random (seed {settings['seed']}), each filter scaled to the length of the run’s own filter; "
            f"biases and normalisation parameters are not moved. "
        )
    elif settings["directions"] == "pca":
        shares = "; ".join(" and ".join(f"{100 * s:.1f} %" for s in shown.explained) for shown in landscapes)
        text += (
            f"{noun}: principal, of checkpoints around w{' (small marks)' if dot else ''}, with {shares} of their "
            f"squared distance; running statistics are those of w. "
        )
    else:
        text += f"{noun}: given. "
    gaps = sum(shown.gaps for shown in landscapes)
    missing = sum(shown.losses.size - shown.finished for shown in landscapes)
    if gaps:
        text += f"Left blank: {gaps:,} {'point' if gaps == 1 else 'points'} without a finite loss. "
    if missing:
        text += f"Unfinished: {missing:,} {'point is' if missing == 1 else 'points are'} still to be computed. "
    return text.strip()
