"""The paper's theoretical cost."""

from __future__ import annotations


def theoretical_flops(perturbed: float | None, two_passes: float = 1.0, share: float = 1.0) -> float:
    """Return FLOPs relative to the base optimizer: 2 - 0.706 s at sparsity s, which fits the paper's Tables 1-3.

    Theoretical: they count what hardware that skips single weights would save, and there is none.

    Args:
        perturbed: The share of the weights that a mean step perturbs, 1 - s; None: no perturbation, one pass.
        two_passes: The share of the steps that have a second pass.
        share: The share of the batch that has one.

    >>> [round(theoretical_flops(perturbed), 2) for perturbed in (None, 1.0, 0.5, 0.01)]
    [1.0, 2.0, 1.65, 1.3]
    >>> theoretical_flops(0.5, two_passes=0.5)  # half of the steps perturb everything
    1.5
    >>> theoretical_flops(1.0, share=0.25)
    1.25
    """
    return 1.0 if perturbed is None else 1 + share * (two_passes - 0.706 * (two_passes - perturbed))
