"""Which way: F-SAM and Momentum-SAM against the slow reference, what they keep, what they refuse."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cases import STEPS, optimizer, same, task, weights
from reference import Reference, SuffixReference, check_step, suffix_masks
from sparsam import SAM, DynamicMask, EveryNth, FriendlyAscent, LastSteps, MomentumAscent, RandomMask, SuffixMask

BASE = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
RHO = 0.1


def sam(model: nn.Module, ascent, **options) -> SAM:
    return SAM(model.parameters(), torch.optim.SGD, **{"rho": RHO, "model": model, "ascent": ascent, **options}, **BASE)


def loss_of(t):
    return lambda model, k: F.cross_entropy(model(t.x), t.y)


def means(opt: SAM) -> list[torch.Tensor | None]:
    """The saved means of F-SAM, tensor by tensor."""
    return [kept and kept["mean"] for kept in opt.state_dict()["sparsam"]["memories"][0]]


# ------------------------------------------------------------------------------------------------------- friendly
# Dense, Fisher and dynamic masks are in test_reference.py.


@pytest.mark.parametrize("cut", ["3", "8"])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("resume_at", [None, 7])
def test_friendly_in_a_suffix_equals_the_slow_reference(cut, adaptive, resume_at):
    t = task(dropout=0.25)
    twin = copy.deepcopy(t.model)
    options = {"rho": RHO, "adaptive": adaptive}
    reference = SuffixReference(
        twin, loss_of(t), friendly=(0.8, 0.7), suffix=suffix_masks(twin, int(cut)), **options, **BASE
    )
    opt = sam(t.model, FriendlyAscent(0.8, 0.7), mask=SuffixMask(t.model, cut), **options)
    for step in range(20):
        if step == resume_at:
            state = copy.deepcopy(opt.state_dict())
            opt = sam(t.model, FriendlyAscent(0.8, 0.7), mask=SuffixMask(t.model, cut), **options)
            opt.load_state_dict(state)
        check_step(reference, t.model, lambda opt=opt: opt.step(t.closure(opt)), seed=step)


def test_sigma_zero_is_sam_and_the_first_step_always():
    for steps, sigma in ((5, 0.0), (1, 1.0)):
        results = []
        for ascent in (None, FriendlyAscent(sigma)):
            t = task()
            opt = sam(t.model, ascent)
            for _ in range(steps):
                opt.step(t.closure(opt))
            results.append(weights(t.model))
        assert same(*results)


def test_a_mask_update_never_touches_the_mean():
    """It follows g over the whole scope, whatever is perturbed: with rho = 0, masks make no difference to it."""
    results = []
    for mask in (None, RandomMask(0.9, interval=1), DynamicMask(0.5, interval=2, total_steps=STEPS)):
        t = task()
        opt = sam(t.model, FriendlyAscent(), mask=mask, rho=0.0)
        for _ in range(STEPS):
            opt.step(t.closure(opt))
        results.append(means(opt))
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_the_mean_of_a_suffix_has_nothing_before_the_cut():
    t = task()
    opt = sam(t.model, FriendlyAscent(), mask=SuffixMask(t.model, "3"))
    opt.step(t.closure(opt))
    kept = [m is not None for m in means(opt)]
    assert kept == [int(name[0]) >= 3 for name, _ in t.model.named_parameters()]


@pytest.mark.filterwarnings("ignore:the second pass is computed in full")
def test_where_nothing_after_the_cut_is_trained_it_is_the_base_step():
    t, other = task(), task()
    for model in (t.model, other.model):
        model[8].requires_grad_(False)
    opt = sam(t.model, FriendlyAscent(), mask=SuffixMask(t.model, "8"))
    base = torch.optim.SGD(other.model.parameters(), **BASE)
    for _ in range(2):
        opt.step(t.closure(opt))
        base.step(other.closure(base))
    assert not any(m.any() for m in opt.masks())
    assert same(weights(t.model), weights(other.model))


def test_only_its_own_steps_move_the_mean():
    t = task()
    opt = sam(t.model, FriendlyAscent(), schedule=EveryNth(3))
    seen = []
    for _ in range(6):
        opt.step(t.closure(opt))
        seen.append(means(opt))
    assert same(seen[0], seen[1])
    assert same(seen[0], seen[2])
    assert not same(seen[2], seen[3])
    assert same(seen[3], seen[5])


def test_two_friendly_ascents_have_a_mean_each():
    t = task()
    opt = sam(t.model, FriendlyAscent(), schedule=LastSteps(0.5, 4, before=FriendlyAscent(0.5, 0.9)))
    opt.step(t.closure(opt))
    main, before = opt.state_dict()["sparsam"]["memories"]
    assert all(kept is None for kept in main)
    assert all(kept is not None for kept in before)
    for _ in range(3):
        opt.step(t.closure(opt))
    assert all(kept is not None for kept in opt.state_dict()["sparsam"]["memories"][0])


def gradient_steps(opt: SAM, w: nn.Parameter, gradients: list[float]) -> list[float]:
    """Take steps with these gradients in both passes; return the mean after each."""
    seen = []
    for g in gradients:
        w.grad = torch.tensor([g, 2 * g])
        opt.first_step()
        opt.second_step()
        seen.append(means(opt)[0][0].item())
    return seen


def test_a_gradient_that_is_not_finite_does_not_move_the_mean():
    w = nn.Parameter(torch.zeros(2))
    opt = SAM([w], torch.optim.SGD, rho=1.0, ascent=FriendlyAscent(decay=0.5), lr=0.0)
    nan, inf = float("nan"), float("inf")
    # The first one that is finite sets it: not half of it.
    assert gradient_steps(opt, w, [nan, inf, 4.0, nan, 2.0, -inf, 3.0]) == [0.0, 0.0, 4.0, 4.0, 3.0, 3.0, 3.0]


def test_each_parameter_s_first_gradient_sets_its_mean():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    opt = SAM([a, b], torch.optim.SGD, rho=1.0, ascent=FriendlyAscent(decay=0.75), lr=0.0)
    seen = []
    for g_a, g_b in [(4.0, None), (8.0, 6.0), (4.0, 2.0)]:
        a.grad = torch.tensor([g_a])
        b.grad = None if g_b is None else torch.tensor([g_b])
        opt.first_step()
        opt.second_step()
        seen.append([None if m is None else m.item() for m in means(opt)])
    assert seen == [[4.0, None], [5.0, 6.0], [4.75, 5.0]]


@pytest.mark.parametrize("way", ["first_step", "perturbed"])
def test_a_scale_that_changes_leaves_the_mean_in_one_scale(way):
    results = []
    for scales in ([None, None, None], [1024.0, torch.tensor(256.0), 0.5]):
        t = task()
        opt = sam(t.model, FriendlyAscent())
        for scale in scales:
            opt.zero_grad()
            (t.loss() * (1 if scale is None else scale)).backward()
            if way == "first_step":
                opt.first_step(zero_grad=True, scale=scale)
                t.loss().backward()
                opt.second_step()
            else:
                with opt.perturbed(scale=scale):
                    opt.zero_grad()
                    t.loss().backward()
                opt.step()
        results.append([*weights(t.model), *means(opt)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_the_mean_never_lies_in_the_state_of_the_base_optimizer():
    """Adam initialises a parameter's state where it is empty."""
    t = task()
    opt = optimizer(t, base="Adam", ascent="friendly")
    t.loss().backward()
    opt.first_step()
    assert not opt.state
    opt.second_step()
    assert {key for state in opt.state.values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}


def test_the_saved_mean_is_read_with_weights_only_and_is_a_copy():
    t = task()
    opt = sam(t.model, FriendlyAscent())
    opt.step(t.closure(opt))
    file = io.BytesIO()
    state = opt.state_dict()
    torch.save(state, file)
    before = means(opt)
    opt.step(t.closure(opt))
    assert same([kept["mean"] for kept in state["sparsam"]["memories"][0]], before)
    file.seek(0)
    again = sam(t.model, FriendlyAscent())
    again.load_state_dict(torch.load(file, weights_only=True))
    assert same(means(again), before)


def test_parameters_that_came_together_are_worked_on_together_after_a_resume():
    """What they share, they share in the saved state too: else each would be a bucket of its own."""
    t = task()
    opt = sam(t.model, FriendlyAscent())
    opt.step(t.closure(opt))
    again = sam(t.model, FriendlyAscent())
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert len({id(kept["seen"]) for kept in again._perturber.memories[0].values()}) == 1


def test_bf16_weights_have_a_mean_in_float32():
    w = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = SAM([w], torch.optim.SGD, ascent=FriendlyAscent(), lr=0.1)
    for _ in range(2):
        opt.zero_grad()
        w.square().sum().backward()
        opt.first_step()
        opt.second_step()
    assert means(opt)[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma": -1}, "sigma must be a finite number >= 0, but is -1"),
        ({"sigma": float("inf")}, "sigma must be a finite number >= 0, but is inf"),
        ({"decay": 1.5}, "decay must be a number in \\[0, 1\\], but is 1.5"),
        ({"decay": "half"}, "decay must be a number in \\[0, 1\\], but is 'half'"),
    ],
)
def test_friendly_refuses(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        FriendlyAscent(**options)


# ------------------------------------------------------------------------------------------------------- momentum


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("rho", [None, 0.4])
def test_momentum_equals_the_slow_reference(adaptive, rho):
    t = task(dropout=0.25)
    reference = Reference(
        copy.deepcopy(t.model), loss_of(t), adaptive=adaptive, momentum_rho=RHO if rho is None else rho, **BASE
    )
    opt = sam(t.model, MomentumAscent(rho), adaptive=adaptive)
    for step in range(20):
        check_step(reference, t.model, lambda opt=opt: opt.step(t.closure(opt)), seed=step)


def test_the_only_pass_is_ahead_of_the_weights_by_rho():
    t = task()
    opt = sam(t.model, MomentumAscent(0.4))
    opt.step(t.closure(opt))
    before, params = weights(t.model), list(t.model.parameters())
    with opt.perturbed():
        moved = [p.detach() - b for p, b in zip(params, before[: len(params)], strict=True)]
    assert sum(m.square().sum() for m in moved).sqrt().item() == pytest.approx(0.4, rel=1e-12)
    dot = sum((m * opt.state[p]["momentum_buffer"]).sum() for m, p in zip(moved, params, strict=True)).item()
    assert dot < 0  # where the next step goes, w - lr v
    assert same(weights(t.model), before)


def test_one_pass_inside_an_autocast_block():
    """Without clearing autocast's cache of casts the pass would see w, and the step be SGD's."""
    t, twin = task(torch.float32), task(torch.float32)
    opt = sam(t.model, MomentumAscent(2.0))
    base = torch.optim.SGD(twin.model.parameters(), **BASE)
    opt.step(t.closure(opt))
    base.step(twin.closure(base))
    with torch.autocast("cpu", torch.bfloat16):
        t.loss()  # casts that are kept
        opt.step(t.closure(opt))
        after = t.loss().item()
    moved = [p.detach().clone() for p in twin.model.parameters()]
    velocities = [base.state[p]["momentum_buffer"] for p in twin.model.parameters()]
    norm = torch.stack([v.square().sum() for v in velocities]).sum().sqrt()
    with torch.no_grad():
        for p, v in zip(twin.model.parameters(), velocities, strict=True):
            p -= 2.0 * v / norm
    base.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        twin.loss().backward()
    with torch.no_grad():
        for p, w in zip(twin.model.parameters(), moved, strict=True):
            p.copy_(w)
    base.step()
    for a, b in zip(t.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert after == pytest.approx(t.loss().item(), rel=1e-6)


def test_weights_come_back_after_an_exception_in_a_closure():
    t = task()
    opt = sam(t.model, MomentumAscent(0.4))
    opt.step(t.closure(opt))
    before = weights(t.model)

    def closure():
        assert not same(weights(t.model), before)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        opt.step(closure)
    assert same(weights(t.model), before)
    opt.step(t.closure(opt))


@pytest.mark.parametrize("base", ["Adam", "AdamW", "RMSprop"])
def test_other_optimizers_have_a_momentum_too(base):
    results = []
    for rho in (0.0, 0.4):
        t = task()
        opt = optimizer(t, base=base, ascent="momentum", rho=rho)
        opt.ascent.rho = rho
        for _ in range(3):
            opt.step(t.closure(opt))
        results.append(weights(t.model))
    plain = task()
    opt = optimizer(plain, base=base).base_optimizer
    for _ in range(3):
        opt.step(plain.closure(opt))
    assert same(results[0], weights(plain.model))
    assert not same(results[0], results[1])


def test_frozen_weights_stay():
    t = task()
    opt = sam(t.model, MomentumAscent(0.4))
    for _ in range(2):
        opt.step(t.closure(opt))
    t.model[0].requires_grad_(False)
    before, seen = weights(t.model[0]), []

    def closure():
        seen.append(weights(t.model[0]))
        return t.closure(opt)()

    opt.step(closure)
    assert all(same(s, before) for s in seen)
    assert [bool(m.any()) for m in opt.masks()] == [p.requires_grad for p in t.model.parameters()]


@pytest.mark.parametrize(
    ("base", "arguments"),
    [(torch.optim.SGD, {}), (torch.optim.Adagrad, {}), (torch.optim.Adam, {"betas": (0.0, 0.9)})],
)
@pytest.mark.parametrize("policy", [{"ascent": MomentumAscent()}, {"schedule": LastSteps(0.5, 9, MomentumAscent())}])
def test_a_base_without_momentum_is_refused(base, arguments, policy):
    t = task()
    message = (
        f"^MomentumAscent needs a base optimizer with momentum, such as SGD with momentum=0.9 or AdamW, but "
        f"{base.__name__} has none in parameter group 0$"
    )
    with pytest.raises(ValueError, match=message):
        SAM(t.model.parameters(), base, lr=0.1, **policy, **arguments)


def test_a_group_without_momentum_is_refused():
    t = task()
    base = torch.optim.SGD(t.model[3:].parameters(), lr=0.1, momentum=0.9)
    opt = SAM.wrap(base, ascent=MomentumAscent())
    with pytest.raises(ValueError, match=r"but SGD has none in parameter group 1$"):
        opt.add_param_group({"params": list(t.model[:3].parameters()), "momentum": 0.0})
    assert len(opt.param_groups) == 1


def test_a_momentum_of_another_name_is_missed():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for state in self.state.values():
                if "momentum_buffer" in state:
                    state["speed"] = state.pop("momentum_buffer")

    t = task()
    opt = SAM(t.model.parameters(), Own, ascent=MomentumAscent(), lr=0.1, momentum=0.9)
    opt.step(t.closure(opt))
    before = weights(t.model)
    message = "^MomentumAscent finds no momentum in the base optimizer's state, which has speed: it must be called "
    with pytest.raises(RuntimeError, match=message + "momentum_buffer or exp_avg$"):
        opt.step(t.closure(opt))
    assert same(weights(t.model), before)


@pytest.mark.parametrize("schedule", [None, EveryNth(2)])
def test_a_mask_that_no_step_would_read_is_refused(schedule):
    t = task()
    message = (
        r"^mask must be None with MomentumAscent\(rho=None\), because its steps take one pass .*, but is RandomMask\("
    )
    with pytest.raises(ValueError, match=message):
        sam(t.model, MomentumAscent(), mask=RandomMask(0.5), schedule=schedule)


def test_a_negative_radius_is_refused():
    with pytest.raises(ValueError, match=r"^rho must be a finite number >= 0, but is -1$"):
        MomentumAscent(-1)


def test_parameters_that_part_ways_are_told_apart():
    """Both come in one step whose gradient is not finite; each is set by its own first finite one."""
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    opt = SAM([a, b], torch.optim.SGD, rho=1.0, ascent=FriendlyAscent(decay=0.5), lr=0.0)
    for g_a, g_b in [(float("inf"), 1.0), (4.0, None), (2.0, 5.0)]:
        a.grad = torch.tensor([g_a])
        b.grad = None if g_b is None else torch.tensor([g_b])
        opt.first_step()
        opt.second_step()
    assert [m.item() for m in means(opt)] == [3.0, 5.0]
