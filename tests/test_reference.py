"""The library equals the slow reference, step by step, to 1e-12 in float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cases import Task, task
from reference import Reference, drop_and_grow, ranked, signs_fisher, split, top_k
from sparsam import SAM, DynamicMask, FisherMask, FriendlyAscent, Mask, RandomMask, TopKMask
from sparsam.masks.dynamic import DROP, GROW, START
from sparsam.selection import random_generator, random_scores

STEPS = 50
BASE = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
INTERVAL = 7


def chance(total: int, *seed: int) -> list[float]:
    return random_scores([torch.empty(total)], *seed).tolist()


def sizes(reference: Reference) -> list[int]:
    return [p.numel() for p in reference.params]


class Given(Mask):
    """A mask that the test made."""

    def __init__(self, masks: list[torch.Tensor]) -> None:
        super().__init__()
        self.masks = masks

    def select(self, params, step, previous):
        return list(self.masks)


def given(t: Task):
    masks = [
        torch.rand(p.shape, generator=torch.Generator().manual_seed(p.numel())) < 0.4 for p in t.model.parameters()
    ]
    return Given(masks), lambda reference: [m.reshape(-1).numpy() for m in masks]


def random(t: Task):
    def expected(reference: Reference):
        step = reference.step_count - reference.step_count % INTERVAL
        scores = chance(sum(sizes(reference)), 5, step)
        return _largest(scores, 0.8, reference)

    return RandomMask(0.8, interval=INTERVAL, seed=5), expected


def _largest(scores: list[float], sparsity: float, reference: Reference):
    chosen = set(ranked(scores)[: round((1 - sparsity) * len(scores))])
    return split([i in chosen for i in range(len(scores))], sizes(reference))


def magnitude(t: Task):
    def expected(reference: Reference):
        if reference.step_count % INTERVAL:
            return reference.m
        return top_k([abs(reference.read(p)) for p in reference.params], 0.6)

    return TopKMask(0.6, lambda params: [p.abs() for p in params], interval=INTERVAL), expected


def dynamic(criterion: str):
    def case(t: Task):
        sparsity, alpha, seed = 0.6, 0.5, 3

        def expected(reference: Reference):
            step, total = reference.step_count, sum(sizes(reference))
            if step % INTERVAL:
                return reference.m
            m = reference.m or _largest(chance(total, seed, step, START), sparsity, reference)
            gradient = [abs(float(v)) for g in reference.g for v in g]
            order = {
                "flattest": [-v for v in gradient],
                "sharpest": gradient,
                "random": chance(total, seed, step, DROP),
            }[criterion]
            return drop_and_grow(
                m,
                reference.g,
                sparsity=sparsity,
                drop=alpha,
                t=step,
                total_steps=40,
                growth=chance(total, seed, step, GROW),
                drop_order=order,
            )

        mask = DynamicMask(sparsity, interval=INTERVAL, total_steps=40, drop=alpha, criterion=criterion, seed=seed)
        return mask, expected

    return case


def fisher(t: Task):
    sparsity, samples, seed = 0.5, 20, 2

    def expected(reference: Reference):
        if reference.step_count % INTERVAL:
            return reference.m
        generator = random_generator(seed, reference.step_count)
        chosen = torch.randperm(len(t.x), generator=generator)[:samples]
        signs = [2 * int(s) - 1 for s in torch.randint(0, 2, (samples,), generator=generator)]
        in_model_order = signs_fisher(reference.model, F.cross_entropy, t.x[chosen], t.y[chosen], signs, 32)
        by_parameter = dict(zip(reference.model.parameters(), in_model_order, strict=True))
        return top_k([by_parameter[p] for p in reference.params], sparsity)

    mask = FisherMask(sparsity, t.model, F.cross_entropy, t.dataset, samples=samples, interval=INTERVAL, seed=seed)
    return mask, expected


CASES = {
    "SAM": (None, {}),
    "ASAM": (None, {"adaptive": True}),
    "SSAM, given mask": (given, {}),
    "SSAM, random": (random, {}),
    "SSAM, magnitude": (magnitude, {}),
    "SSAM, given mask, adaptive": (given, {"adaptive": True}),
    "SSAM-D": (dynamic("flattest"), {}),
    "SSAM-D, sharpest dropped": (dynamic("sharpest"), {}),
    "SSAM-D, dropped at random": (dynamic("random"), {}),
    "SSAM-F": (fisher, {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("reordered", [False, True], ids=["model order", "groups reordered"])
@pytest.mark.parametrize("friendly", [None, (0.8, 0.7)], ids=["gradient", "friendly"])
def test_fifty_steps(name, reordered, friendly):
    t = task(dropout=0.25)
    make, options = CASES[name]
    twin = copy.deepcopy(t.model)
    mask, expected_mask = make(t) if make else (None, None)
    params = list(t.model.parameters())
    order = list(range(len(params)))
    groups: object = params
    if reordered:  # no decay for vectors, in front of the matrices: not the order of model.parameters()
        order = sorted(order, key=lambda i: params[i].dim() > 1)
        vectors, matrices = ([p for p in params if (p.dim() > 1) == big] for big in (False, True))
        groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]
        if name.startswith("SSAM, given"):
            mask.masks = [mask.masks[i] for i in order]
            given_masks = [m.reshape(-1).numpy() for m in mask.masks]
            expected_mask = lambda reference: given_masks  # noqa: E731
    policy = {"mask": mask, "ascent": friendly and FriendlyAscent(*friendly)}
    opt = SAM(groups, torch.optim.SGD, rho=0.3, **policy, model=t.model, **options, **BASE)
    reference = Reference(
        twin,
        lambda model, k: F.cross_entropy(model(t.x), t.y),
        rho=0.3,
        mask=expected_mask,
        order=order,
        friendly=friendly,
        **options,
        **{
            **BASE,
            "weight_decay": (lambda p: BASE["weight_decay"] * (p.dim() > 1)) if reordered else BASE["weight_decay"],
        },
    )

    def resumed() -> SAM:
        """The optimizer from its saved state, as a run has it that was stopped in mid-interval."""
        again = SAM(groups, torch.optim.SGD, rho=0.3, **policy, model=t.model, **options, **BASE)
        again.load_state_dict(copy.deepcopy(opt.state_dict()))
        return again

    run_both(t, opt, reference, STEPS - 20)
    if friendly:
        opt = resumed()
    run_both(t, opt, reference, 20)
    if reference.m is not None:
        for m, expected in zip(opt.masks(), reference.m, strict=True):
            np.testing.assert_array_equal(m.reshape(-1).numpy(), expected)


@pytest.mark.parametrize("name", ["SAM", "ASAM", "SSAM, random", "SSAM-D", "SSAM-F"])
@pytest.mark.parametrize("friendly", [None, (0.8, 0.7)], ids=["gradient", "friendly"])
def test_fifty_steps_on_a_share_of_the_batch(name, friendly):
    t = task(dropout=0.25)
    make, options = CASES[name]
    mask, expected_mask = make(t) if make else (None, None)
    count = 5  # of 24 rows
    parts = [(t.x[:count], t.y[:count]), (t.x[count:], t.y[count:])]
    policy = {"mask": mask, "ascent": friendly and FriendlyAscent(*friendly)}
    reference = Reference(
        copy.deepcopy(t.model),
        lambda model, k: F.cross_entropy(model(parts[k][0]), parts[k][1]),
        rho=0.3,
        mask=expected_mask,
        friendly=friendly,
        share=count / 24,
        **options,
        **BASE,
    )
    opt = SAM(t.model.parameters(), torch.optim.SGD, rho=0.3, share=0.2, model=t.model, **policy, **options, **BASE)
    run_both(t, opt, reference)


def test_fifty_steps_of_the_base_optimizer():
    t = task(dropout=0.25)
    reference = Reference(copy.deepcopy(t.model), lambda model, k: F.cross_entropy(model(t.x), t.y), **BASE)
    run_both(t, torch.optim.SGD(t.model.parameters(), **BASE), reference)


def run_both(t: Task, opt: torch.optim.Optimizer, reference: Reference, steps: int = STEPS) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        loss = opt.step(t.closure(opt))
        torch.manual_seed(step)
        expected = reference.step()
        assert loss.item() == pytest.approx(expected, rel=1e-12), step
        for a, b in zip(t.model.parameters(), reference.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for a, b in zip(t.model.buffers(), reference.model.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
