"""The sharpness of a trained run, written to one small file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sparsam.analysis.hessian import top_eigenvalues
from sparsam.analysis.objective import Objective
from sparsam.analysis.run_objective import load_objective, run_mask
from sparsam.analysis.sharpness import average_case, worst_case
from sparsam.runs.results import write_result


def measure_sharpness(
    run: str | Path,
    *,
    rho: float = 0.1,
    adaptive_rho: float = 1.0,
    ascent: int = 1,
    noise: int = 10,
    samples: int = 10_000,
    seed: int = 0,
    best: bool = False,
    data_root: str | Path | None = None,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Measure how much the training loss rises near a run's weights. Write it to RUN/analysis/sharpness.json.

    Args:
        run: The directory of a run.
        rho: The radius.
        adaptive_rho: The radius of the adaptive variants, relative to the weights.
        ascent: Steps of gradient ascent for the worst case; 1 is SAM's own perturbation.
        noise: The number of random perturbations for the average case.
        samples: The number of training images.
        seed: The seed of the noise.
        best: Take the weights of the best epoch, not of the last.
        data_root: Where the data is now, if it has moved since the run.
        device: Where it is computed.
    """
    objective = load_objective(run, samples=samples, best=best, data_root=data_root, device=device)
    mask = run_mask(run, objective)
    average, error = average_case(objective, rho, samples=noise, seed=seed)
    adaptive, adaptive_error = average_case(objective, adaptive_rho, samples=noise, seed=seed, adaptive=True)
    values = {
        "loss": objective.loss().item(),
        "worst_case": worst_case(objective, rho, steps=ascent),
        "worst_case_masked": None if mask is None else worst_case(objective, rho, steps=ascent, mask=mask),
        "worst_case_adaptive": worst_case(objective, adaptive_rho, steps=ascent, adaptive=True),
        "average_case": average,
        "average_case_error": error,
        "average_case_adaptive": adaptive,
        "average_case_adaptive_error": adaptive_error,
        "lambda1": largest_eigenvalue(objective),
        "rho": rho,
        "adaptive_rho": adaptive_rho,
        "ascent": ascent,
        "noise": noise,
        "samples": objective.count,
        "samples_asked": samples,
        "seed": seed,
        "weights": "best" if best else "last",
    }
    write_result(run, "sharpness", values)
    return values


def largest_eigenvalue(objective: Objective) -> float:
    """Return the largest eigenvalue of the Hessian, to about a percent."""
    return float(top_eigenvalues(objective, k=1, tolerance=1e-2).values[0])
