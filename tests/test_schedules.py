"""When: which steps are sharpness-aware, and how schedule, ascent and mask meet."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.nn import functional as F

from cases import same, task, weights
from reference import Reference, SuffixReference, check_step, suffix_masks
from sparsam import (
    SAM,
    EveryNth,
    EveryStep,
    FriendlyAscent,
    GradientAscent,
    LastSteps,
    MomentumAscent,
    RandomMask,
    SuffixMask,
    TopKMask,
)

BASE = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
RHO = 0.1


def sam(model, schedule, **options) -> SAM:
    options = {"rho": RHO, "model": model, **options}
    return SAM(model.parameters(), torch.optim.SGD, schedule=schedule, **options, **BASE)


def counted(t, opt):
    """A closure, and how often it was called."""
    calls = []

    def closure():
        calls.append(1)
        return t.closure(opt)()

    return closure, calls


# ------------------------------------------------------------------------------------------------- which ascent


MAIN, BEFORE = GradientAscent(), MomentumAscent(0.3)


@pytest.mark.parametrize(
    ("fraction", "total", "first"),
    [(0.3, 10, 7), (0.21, 100, 79), (0.5, 7, 3), (0.57, 100, 43), (1.0, 4, 0), (0.9, 10, 1), (0.01, 3, 2)],
)
@pytest.mark.parametrize("before", [None, BEFORE])
def test_the_last_steps_are_sharpness_aware(fraction, total, first, before):
    schedule = LastSteps(fraction, total, before)
    assert [schedule.ascent(step, MAIN) for step in range(total)] == [before] * first + [MAIN] * (total - first)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_every_nth_step_counts_from_zero(n):
    schedule = EveryNth(n)
    assert [schedule.ascent(step, MAIN) is MAIN for step in range(12)] == [step % n == 0 for step in range(12)]
    assert all(EveryStep().ascent(step, MAIN) is MAIN for step in range(3))


REFUSED = {
    "no steps": (lambda: LastSteps(0.5, 0), ValueError, "total_steps must be a whole number >= 1, but is 0"),
    "half a step": (lambda: LastSteps(0.5, 1.5), ValueError, "total_steps must be a whole number >= 1, but is 1.5"),
    "more than all": (lambda: LastSteps(1.5, 9), ValueError, r"fraction must be a number in \(0, 1\], but is 1.5"),
    "none": (lambda: LastSteps(0.0, 9), ValueError, r"fraction must be a number in \(0, 1\], but is 0.0"),
    "less than a step": (
        lambda: LastSteps(1e-9, 9),
        ValueError,
        "fraction must be that of at least one of total_steps=9 steps, but is 1e-09",
    ),
    "before by name": (
        lambda: LastSteps(0.5, 9, before="momentum"),
        TypeError,
        "before must be an ascent or None, but is 'momentum'",
    ),
    "every 0-th": (lambda: EveryNth(0), ValueError, "n must be a whole number >= 1, but is 0"),
    "a schedule by name": (
        lambda: sam(task().model, "every"),
        TypeError,
        "schedule must be a sparsam schedule or None, but is 'every'",
    ),
    "an ascent by name": (
        lambda: sam(task().model, None, ascent="friendly"),
        TypeError,
        "ascent must be a sparsam ascent or None, but is 'friendly'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=f"^{message}$"):
        make()


def test_beyond_the_last_step_one_warning_and_the_main_ascent():
    t = task()
    opt = sam(t.model, LastSteps(0.5, 2), mask=SuffixMask(t.model, "3"))
    for _ in range(2):
        opt.step(t.closure(opt))
    with pytest.warns(
        UserWarning, match=r"^this is step 3, but total_steps of LastSteps is 2: .* not epochs$"
    ) as record:
        assert opt.needs_second_pass
        opt.step(t.closure(opt))
    assert len(record) == 1
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            opt.step(t.closure(opt))
    assert all(m.all() for m in opt.masks()[-2:])


# -------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("cut", ["3", None])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("momentum_rho", [0.0, 0.4])
@pytest.mark.parametrize("friendly", [None, (0.8, 0.7)])
def test_it_equals_the_slow_reference(cut, adaptive, momentum_rho, friendly):
    """Ten base steps, or steps along the momentum, then ten that perturb."""
    t = task(dropout=0.25)
    twin = copy.deepcopy(t.model)
    options = {"adaptive": adaptive, "momentum_rho": momentum_rho, "friendly": friendly, **BASE}
    loss = lambda model, k: F.cross_entropy(model(t.x), t.y)  # noqa: E731
    if cut:
        reference = SuffixReference(twin, loss, suffix=suffix_masks(twin, int(cut)), **options)
    else:
        reference = Reference(twin, loss, **options)
    opt = sam(
        t.model,
        LastSteps(0.5, 20, before=MomentumAscent(momentum_rho) if momentum_rho else None),
        ascent=friendly and FriendlyAscent(*friendly),
        mask=SuffixMask(t.model, cut) if cut else None,
        adaptive=adaptive,
    )
    for step in range(20):
        reference.rho = None if step < 10 else RHO
        check_step(reference, t.model, lambda: opt.step(t.closure(opt)), seed=step)


def test_base_steps_are_those_of_the_base_optimizer():
    t, plain = task(), task()
    opt, base = sam(t.model, LastSteps(0.5, 6)), torch.optim.SGD(plain.model.parameters(), **BASE)
    for _ in range(3):
        opt.step(t.closure(opt))
        base.step(plain.closure(base))
    assert same(weights(t.model), weights(plain.model))


@pytest.mark.parametrize("at", [3, 6, 9])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_resumed_run_is_the_same_in_both_phases(at, adaptive):
    results = []
    for resumes in (False, True):
        t = task()

        def build(t=t):
            schedule = LastSteps(0.5, 12, before=MomentumAscent(0.4))
            return sam(t.model, schedule, ascent=FriendlyAscent(), mask=SuffixMask(t.model, "3"), adaptive=adaptive)

        opt = build()
        for step in range(12):
            if resumes and step == at:
                state = copy.deepcopy(opt.state_dict())
                masks = opt.masks()
                opt = build()
                opt.load_state_dict(state)
                assert same(opt.masks(), masks)
            opt.step(t.closure(opt))
        results.append(weights(t.model))
    assert same(*results)


# ---------------------------------------------------------------------------------------------- how they meet


def test_closures_are_called_once_or_twice_and_masks_tell_what_moved():
    t = task()
    opt = sam(t.model, LastSteps(0.5, 4, before=MomentumAscent(0.4)), mask=SuffixMask(t.model, "3"))
    with pytest.raises(RuntimeError, match=r"^there is no mask before the first step: it is made in that step$"):
        opt.masks()
    seen = []
    for _ in range(4):
        closure, calls = counted(t, opt)
        needed = opt.needs_second_pass
        opt.step(closure)
        seen.append((needed, len(calls), [bool(m.all()) for m in opt.masks()]))
    everything, nothing = [True] * 10, [False] * 10
    suffix = [int(name[0]) >= 3 for name, _ in t.model.named_parameters()]
    assert seen == [
        (False, 1, nothing),  # no momentum yet
        (False, 1, everything),
        (True, 3, suffix),  # a new path is proven in two steps
        (True, 3, suffix),
    ]


def test_masks_are_false_after_a_base_step():
    t = task()
    opt = sam(t.model, EveryNth(2), mask=RandomMask(0.5))
    shares = []
    for _ in range(4):
        opt.step(t.closure(opt))
        shares.append(any(m.any() for m in opt.masks()))
    assert shares == [True, False, True, False]


def made_in(opt, t, steps: int) -> list[int]:
    """Take steps; return those in which the mask's scores were asked for."""
    asked = []
    opt.mask.scores = lambda params: asked.append(opt.steps) or [p.abs() for p in params]
    for _ in range(steps):
        opt.step(t.closure(opt))
    return asked


@pytest.mark.parametrize(
    ("schedule", "interval", "steps"),
    [
        (EveryStep(), 3, [0, 3, 6, 9]),
        (EveryNth(2), 3, [0, 4, 6, 10]),  # due at 3 and 9, made in the two-pass steps that follow
        (EveryNth(5), 3, [0, 5, 10]),
        (EveryNth(5), None, [0]),
        (LastSteps(0.5, 12), 4, [6, 8]),
        (LastSteps(0.5, 12), None, [6]),
        (LastSteps(0.5, 12, MomentumAscent()), 5, [6, 10]),
    ],
)
def test_a_mask_is_made_in_the_first_two_pass_step_at_or_after_each_multiple(schedule, interval, steps):
    t = task()
    opt = sam(t.model, schedule, mask=TopKMask(0.5, lambda params: [p.abs() for p in params], interval=interval))
    assert made_in(opt, t, 12) == steps


def test_a_step_that_is_tried_again_makes_the_same_mask_again():
    t = task()
    opt = sam(t.model, None, mask=RandomMask(0.5, interval=1))
    opt.step(t.closure(opt))
    masks = []
    for _ in range(2):
        opt.zero_grad()
        t.loss().backward()
        opt.first_step()
        masks.append(opt.masks())
        opt.restore()
    assert same(*masks)


def test_a_plain_loop_is_told_in_its_first_step_that_later_ones_need_more():
    t = task()
    opt = sam(t.model, LastSteps(0.2, 10))

    def step():
        opt.zero_grad()
        t.loss().backward()
        opt.step()

    with pytest.warns(UserWarning, match=r"step\(\) without closure is a step of the base optimizer alone.*LastSteps"):
        step()
    for _ in range(7):
        step()  # once is enough
    with pytest.raises(RuntimeError, match="SAM needs two gradients"):
        step()


@pytest.mark.parametrize("way", ["first_step", "perturbed", "step alone"])
def test_in_a_base_step_w_stays_and_step_needs_no_closure(way):
    t, plain = task(dropout=0.3), task(dropout=0.3)
    opt, base = sam(t.model, LastSteps(0.2, 10)), torch.optim.SGD(plain.model.parameters(), **BASE)
    torch.manual_seed(5)
    for _ in range(3):
        assert not opt.needs_second_pass
        opt.zero_grad()
        t.loss().backward()
        before = weights(t.model)
        if way == "first_step":  # a loop that knows nothing of schedules
            opt.first_step(zero_grad=True)
            assert same(weights(t.model), before)
            t.loss().backward()
            opt.second_step()
        else:
            if way == "perturbed":
                with opt.perturbed():
                    assert same(weights(t.model), before)
            opt.step()
        assert not any(m.any() for m in opt.masks())
    torch.manual_seed(5)
    for _ in range(3):
        base.step(plain.closure(base))
    assert same(weights(t.model), weights(plain.model))  # running statistics moved once, dropout was drawn once


def test_a_one_pass_step_without_a_closure_needs_its_context():
    t = task()
    opt = sam(t.model, None, ascent=MomentumAscent(0.4))
    t.loss().backward()
    message = (
        r"^step\(\) without closure needs `with opt.perturbed\(\):` around the backward pass in a step of Momentum"
    )
    with pytest.raises(RuntimeError, match=message):
        opt.step()


def test_a_pass_inside_perturbed_that_is_the_only_one_moves_the_statistics():
    """Gradients that the last base step has used do not count as those of a first pass."""
    t, closures = task(), task()
    opt, other = (sam(c.model, None, ascent=MomentumAscent(0.4)) for c in (t, closures))
    for _ in range(3):
        with opt.perturbed():
            opt.zero_grad()
            t.loss().backward()
        opt.step()
        other.step(closures.closure(other))
    assert same(weights(t.model), weights(closures.model))


def test_the_schedule_is_asked_once_a_step():
    class Counting(EveryStep):
        asked = 0

        def ascent(self, step, main):
            self.asked += 1
            return super().ascent(step, main)

    t, schedule = task(), Counting()
    opt = sam(t.model, schedule)
    for _ in range(3):
        assert opt.needs_second_pass
        opt.step(t.closure(opt))
    assert schedule.asked == 3


def test_policies_describe_themselves():
    assert repr(LastSteps(0.3, 10, MomentumAscent(1.0))) == (
        "LastSteps(fraction=0.3, total_steps=10, before=MomentumAscent(rho=1.0))"
    )
    assert repr(EveryStep()) == "EveryStep()"
    assert repr(FriendlyAscent()) == "FriendlyAscent(sigma=1.0, decay=0.6)"


def test_a_mask_without_an_interval_is_made_once_even_if_the_first_step_is_tried_again():
    t = task()
    asked = []
    scores = lambda params: asked.append(1) or [p.abs() for p in params]  # noqa: E731
    opt = sam(t.model, None, mask=TopKMask(0.5, scores))
    t.loss().backward()
    for _ in range(3):
        with opt.perturbed():
            pass
    assert len(asked) == 1
