"""Closures of all shapes: what is called, what is returned, what is refused."""

from __future__ import annotations

import warnings
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from cases import optimizer, same, task, weights
from sparsam import SAM, EveryNth, LastSteps, MomentumAscent
from sparsam.errors import UserRuntimeError

NOT_CLEARED = (
    r"^the closure must clear the gradients, with opt.zero_grad\(\) in its first line, but does not: .*another$"
)
ACCUMULATED = r"^the closure must clear the gradients, but added to some from before step\(closure\): .*SAMModule"


def clears(how):
    """A closure that clears the gradients in one of several ways, and then adds to them."""

    def build(t, opt):
        def closure():
            how(t, opt)
            loss = t.loss()
            loss.backward()
            return loss

        return closure

    return build


def zero_by_hand(t, opt):
    for p in t.model.parameters():
        if p.grad is not None:
            p.grad.zero_()


CLEARED = {
    "the optimizer": clears(lambda t, opt: opt.zero_grad()),
    "the optimizer, with zeros": clears(lambda t, opt: opt.zero_grad(set_to_none=False)),
    "the model": clears(lambda t, opt: t.model.zero_grad()),
    "the model, with zeros": clears(lambda t, opt: t.model.zero_grad(set_to_none=False)),
    "by hand": clears(zero_by_hand),
}
SCHEDULES = {
    "every step": lambda: {},
    "some steps": lambda: {"schedule": EveryNth(2)},
    "one pass": lambda: {"ascent": MomentumAscent(0.1)},
}


def sam(t, **policy) -> SAM:
    return SAM(t.model.parameters(), torch.optim.SGD, rho=0.1, lr=0.05, momentum=0.9, model=t.model, **policy)


@pytest.mark.parametrize("how", CLEARED)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_way_to_clear_gives_the_same_step(how, schedule):
    results = []
    for build in (CLEARED["the optimizer"], CLEARED[how]):
        t = task()
        opt = sam(t, **SCHEDULES[schedule]())
        closure = build(t, opt)
        results.append([[opt.step(closure).item() for _ in range(4)], weights(t.model)])
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_closure_that_does_not_clear_is_refused_and_the_weights_stay(schedule):
    t = task()
    opt = sam(t, **SCHEDULES[schedule]())
    closure = clears(lambda t, opt: None)(t, opt)
    if schedule == "one pass":
        opt.step(closure)  # nothing was there to clear
    before = [p.detach().clone() for p in t.model.parameters()]
    with pytest.raises(UserRuntimeError, match=NOT_CLEARED):
        opt.step(closure)
    assert same(before, [p.detach() for p in t.model.parameters()])
    assert all(p.grad is None for p in t.model.parameters())
    opt.step(t.closure(opt))  # with another closure it goes on


def test_gradients_from_before_the_step_are_refused():
    """As Lightning does with accumulate_grad_batches: some backward passes first, the last one in the closure."""
    t = task()
    opt = sam(t)
    opt.step(t.closure(opt))
    opt.zero_grad()
    t.loss().backward()
    before = [p.detach().clone() for p in t.model.parameters()]
    with pytest.raises(UserRuntimeError, match=ACCUMULATED):
        opt.step(clears(lambda t, opt: None)(t, opt))
    assert same(before, [p.detach() for p in t.model.parameters()])


def test_gradients_from_before_the_step_that_the_closure_clears_are_no_matter():
    results = []
    for early in (False, True):
        t = task()
        opt = sam(t)
        for _ in range(3):
            if early:
                opt.zero_grad()
                t.model.eval()
                t.loss().backward()
                t.model.train()
            opt.step(t.closure(opt))
        results.append(weights(t.model))
    assert same(*results)


def test_accumulation_inside_the_closure_adds_up():
    results = []
    for parts in (1, 3):
        t = task()
        t.model.eval()  # so that parts of a batch are independent
        opt = sam(t)

        def closure(t=t, opt=opt, parts=parts):
            opt.zero_grad()
            total = 0.0
            for x, y in zip(t.x.chunk(parts), t.y.chunk(parts), strict=True):
                loss = nn.functional.cross_entropy(t.model(x), y) / parts
                loss.backward()
                total += loss.item()
            return total

        losses = [opt.step(closure) for _ in range(3)]
        results.append((losses, weights(t.model)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_closure_that_calls_backward_twice_means_twice_the_loss():
    results = []
    for twice in (True, False):
        t = task()
        opt = sam(t)

        def closure(t=t, opt=opt, twice=twice):
            opt.zero_grad()
            loss = t.loss()
            if twice:
                loss.backward(retain_graph=True)
                loss.backward()
            else:
                (2 * loss).backward()
            return loss

        for _ in range(3):
            opt.step(closure)
        results.append(weights(t.model))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("entry", ["step", "first_step", "opt"])
def test_a_compiled_step_is_the_step(entry):
    results = []
    for compiled in (False, True):
        t = task()
        opt = sam(t)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if entry == "step":
                step = torch.compile(opt.step, backend="eager") if compiled else opt.step
                for _ in range(2):
                    step(t.closure(opt))
            elif entry == "first_step":
                for _ in range(2):
                    opt.zero_grad()
                    t.loss().backward()
                    (torch.compile(opt.first_step, backend="eager") if compiled else opt.first_step)(zero_grad=True)
                    t.loss().backward()
                    (torch.compile(opt.second_step, backend="eager") if compiled else opt.second_step)()
            else:

                def train(t=t, opt=opt):
                    opt.zero_grad()
                    t.loss().backward()
                    with opt.perturbed():
                        opt.zero_grad()
                        t.loss().backward()
                    opt.step()

                for _ in range(2):
                    (torch.compile(train, backend="eager") if compiled else train)()
        results.append(weights(t.model))
    assert same(*results)


def test_an_infinite_gradient_in_a_first_pass_does_no_harm():
    """It gives no perturbation: the step is that of the base optimizer."""
    t, plain = task(), task()
    opt, base = sam(t), torch.optim.SGD(plain.model.parameters(), lr=0.05, momentum=0.9)
    calls = []

    def closure():
        loss = t.closure(opt)()
        calls.append(1)
        if len(calls) == 1:
            next(t.model.parameters()).grad.view(-1)[0] = float("inf")
        return loss

    opt.step(closure)
    base.step(plain.closure(base))
    assert same(weights(t.model), weights(plain.model))
    assert all(torch.isfinite(w).all() for w in weights(t.model))


@pytest.mark.parametrize("schedule", ["some steps", "one pass"])
@pytest.mark.parametrize("call", ["step", "state_dict", "second_step"])
def test_what_is_refused_inside_a_closure_s_only_pass(schedule, call):
    t = task()
    opt = sam(t, **SCHEDULES[schedule]())
    opt.step(t.closure(opt))

    def closure():
        loss = t.closure(opt)()
        with pytest.raises(UserRuntimeError, match="inside the closure's only pass"):
            getattr(opt, call)()
        return loss

    opt.step(closure)
    assert opt.steps == 2


@pytest.mark.parametrize("schedule", [None, LastSteps(0.1, 100)], ids=["sharpness-aware", "base steps"])
def test_gradients_that_a_closure_clears_take_no_memory(schedule):
    t = task()
    opt, left = SAM(t.model.parameters(), torch.optim.SGD, model=t.model, schedule=schedule, lr=0.1), []

    def closure():
        old = [weakref.ref(p.grad) for p in t.model.parameters() if p.grad is not None]
        opt.zero_grad()
        left.append(sum(grad() is not None for grad in old))
        loss = t.loss()
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure)
    assert left[2:] == [0] * len(left[2:])  # those of the first two calls show that the closure clears them
    assert len(left) == (6 if schedule is None else 3)


def test_zeros_are_no_gradients_of_a_first_pass():
    """A loop of one pass a step that fills gradients with zeros moves the running statistics all the same."""
    t = task()
    opt = sam(t, ascent=MomentumAscent(0.1))
    for _ in range(4):
        opt.zero_grad(set_to_none=False)
        with opt.perturbed():
            t.loss().backward()
        opt.step()
    assert t.model[1].num_batches_tracked == 4


def test_an_ascent_that_fails_leaves_w():
    class Fails(MomentumAscent):
        def remember(self, params, grads, memory, norm):
            raise MemoryError

    t = task()
    opt = sam(t, ascent=Fails(0.3))
    opt.step(t.closure(opt))
    before = weights(t.model)
    with pytest.raises(MemoryError):
        opt.step(t.closure(opt))
    assert same(weights(t.model), before)


@pytest.mark.parametrize("way", ["given up", "skipped"])
def test_a_step_that_is_not_taken_leaves_the_mean(way):
    t = task()
    opt = optimizer(t, ascent="friendly")
    opt.step(t.closure(opt))
    before = [kept["mean"].clone() for kept in opt._perturber.memories[0].values()]
    opt.zero_grad()
    t.loss().backward()
    opt.first_step(zero_grad=True)
    if way == "given up":
        opt.restore()
    else:  # as a GradScaler does after an overflow: no step
        t.loss().backward()
        with torch.no_grad():
            opt._leave(type(opt._phase).READY)
        opt.zero_grad()
    assert same([kept["mean"] for kept in opt._perturber.memories[0].values()], before)


@pytest.mark.parametrize(
    ("scale", "error"),
    [(0, ValueError), (-2.0, ValueError), (float("nan"), ValueError), (float("inf"), ValueError), ("1", ValueError)],
)
def test_a_scale_that_is_none(scale, error):
    t = task()
    opt = sam(t)
    t.loss().backward()
    before = weights(t.model)
    with pytest.raises(error, match=r"^scale must be a finite number > 0, but is "):
        opt.first_step(scale=scale)
    assert same(weights(t.model), before)


def test_a_schedule_that_does_not_list_its_ascent():
    class Forgets(LastSteps):
        def ascents(self, main):
            return [main]

    t = task()
    opt = sam(t, schedule=Forgets(0.5, 4, before=MomentumAscent()))
    message = r"^ascents\(main\) of Forgets\(.*\) must return every ascent that a step may take, but MomentumAscent\("
    with pytest.raises(ValueError, match=message):
        opt.step(t.closure(opt))


def test_a_closure_that_clears_does_not_vouch_for_another():
    t = task()
    opt = sam(t)
    for _ in range(2):
        opt.step(t.closure(opt))
    with pytest.raises(UserRuntimeError, match=NOT_CLEARED):
        opt.step(clears(lambda t, opt: None)(t, opt))


WRAPPED = {
    "partial": lambda closure: partial(closure),
    "partial of a partial": lambda closure: partial(partial(closure)),
    "decorated": torch.enable_grad(),
    "decorated partial": lambda closure: partial(torch.enable_grad()(closure)),
}


@pytest.mark.parametrize("how", WRAPPED)
def test_a_wrapped_closure_does_not_vouch_for_what_is_wrapped_in_the_same_way(how):
    t = task()
    opt = sam(t)
    for _ in range(2):
        opt.step(WRAPPED[how](t.closure(opt)))
    before = [p.detach().clone() for p in t.model.parameters()]
    with pytest.raises(UserRuntimeError, match=NOT_CLEARED):
        opt.step(WRAPPED[how](clears(lambda t, opt: None)(t, opt)))
    assert same(before, [p.detach() for p in t.model.parameters()])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_closure_that_no_longer_clears_is_refused(schedule):
    """In the second pass of the same step, or in the next step if that has one pass."""
    t = task()
    opt = sam(t, **SCHEDULES[schedule]())
    still = [True]
    closure = clears(lambda t, opt: opt.zero_grad() if still else None)(t, opt)
    for _ in range(4):
        opt.step(closure)
    still.clear()
    with pytest.raises(UserRuntimeError, match=NOT_CLEARED):
        for _ in range(1 if schedule != "one pass" else 2):
            opt.step(closure)


def test_a_closure_that_clears_in_first_passes_alone_is_refused():
    t = task()
    opt = sam(t)
    calls = []

    def closure():
        if len(calls) < 4 or len(calls) % 2 == 0:
            opt.zero_grad()
        calls.append(1)
        loss = t.loss()
        loss.backward()
        return loss

    opt.step(closure)
    opt.step(closure)
    before = [p.detach().clone() for p in t.model.parameters()]
    with pytest.raises(UserRuntimeError, match=NOT_CLEARED):
        opt.step(closure)
    assert same(before, [p.detach() for p in t.model.parameters()])


def test_a_closure_may_clear_in_turns():
    t = task()
    opt = sam(t)
    ways = [lambda: opt.zero_grad(), lambda: t.model.zero_grad(), lambda: t.model.zero_grad(set_to_none=False)]

    def closure():
        ways[opt.steps % 3]()
        loss = t.loss()
        loss.backward()
        return loss

    other = task()
    plain = sam(other)
    for _ in range(9):
        opt.step(closure)
        plain.step(other.closure(plain))
    assert same(weights(t.model), weights(other.model))


def test_sparse_gradients_of_a_base_step_are_left_alone():
    embedding = nn.Embedding(5, 3, sparse=True)
    opt = SAM(embedding.parameters(), torch.optim.SGD, lr=0.1, schedule=LastSteps(0.01, 1000))

    def closure():
        opt.zero_grad()
        loss = embedding(torch.tensor([1, 2])).sum()
        loss.backward()
        return loss

    before = embedding.weight.detach().clone()
    for _ in range(3):
        opt.step(closure)
    assert torch.allclose(before - embedding.weight, 0.3 * torch.tensor([0.0, 1, 1, 0, 0])[:, None].expand(5, 3))


def test_a_closure_that_fails_leaves_no_nan():
    t = task()
    opt = sam(t)
    t.loss().backward()
    opt.zero_grad(set_to_none=False)

    def closure():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        opt.step(closure)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in t.model.parameters())


LATE = LastSteps(0.1, 50)  # base steps for a while


def test_a_closure_that_leaves_clearing_to_the_loop_is_refused_in_a_base_step():
    t = task()
    opt = SAM(t.model.parameters(), torch.optim.SGD, schedule=LATE, lr=0.1)

    def closure():
        loss = t.loss()
        loss.backward()
        return loss

    opt.zero_grad()
    opt.step(closure)
    opt.zero_grad()
    before = [p.detach().clone() for p in t.model.parameters()]
    with pytest.raises(UserRuntimeError, match=NOT_CLEARED):
        opt.step(closure)
    assert same(list(t.model.parameters()), before)
    assert all(p.grad is None for p in t.model.parameters())
    assert opt.steps == 1


@pytest.mark.parametrize("how", ["by hand", "model", "optimizer"])
def test_base_steps_of_closures_that_clear_are_those_of_the_base_optimizer(how):
    """Also of a weight that is not used: it has no gradient, so weight decay does not move it."""
    models = [nn.ModuleDict({"unused": nn.Linear(2, 2), "used": nn.Linear(3, 2)}) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    opt = SAM(models[0].parameters(), torch.optim.SGD, schedule=LATE, **settings)
    plain = torch.optim.SGD(models[1].parameters(), **settings)
    x = torch.randn(4, 3)
    for _ in range(4):

        def closure(model=models[0]):
            if how == "by hand":
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.zero_()
            else:
                (opt if how == "optimizer" else model).zero_grad()
            loss = model["used"](x).square().sum()
            loss.backward()
            return loss

        opt.step(closure)
        for p in models[0].parameters():
            p.grad = None  # as a loop does that clears after each step
        plain.zero_grad()
        models[1]["used"](x).square().sum().backward()
        plain.step()
        assert same(weights(models[0]), weights(models[1]))
        assert models[0]["unused"].weight.grad is None


def test_a_closure_without_backward_is_refused_in_a_base_step():
    t = task()
    opt = SAM(t.model.parameters(), torch.optim.SGD, schedule=LATE, lr=0.1)
    with pytest.raises(UserRuntimeError, match=r"no parameter has a gradient: call backward\(\)"):
        opt.step(t.loss)
    assert opt.steps == 0


@pytest.mark.parametrize("schedule", [None, LATE], ids=["two passes", "base step"])
def test_a_closure_that_clears_the_gradients_last_is_refused(schedule):
    t = task()
    opt = SAM(t.model.parameters(), torch.optim.SGD, schedule=schedule, lr=0.1)

    def closure():
        loss = t.loss()
        loss.backward()
        opt.zero_grad()
        return loss

    message = (
        r"^no parameter has a gradient: call backward\(\) first; if the closure clears the gradients after it, "
        r"zero_grad\(\) belongs in its first line$"
    )
    with pytest.raises(UserRuntimeError, match=message):
        opt.step(closure)
    assert opt.steps == 0


BETWEEN = {
    "nothing": lambda t, opt: None,
    "the optimizer": lambda t, opt: opt.zero_grad(),
    "the optimizer, with zeros": lambda t, opt: opt.zero_grad(set_to_none=False),
    "the model": lambda t, opt: t.model.zero_grad(),
    "the model, with zeros": lambda t, opt: t.model.zero_grad(set_to_none=False),
    "by hand": zero_by_hand,
}


@pytest.mark.parametrize("way", ["two steps", "context"])
@pytest.mark.parametrize("how", BETWEEN)
def test_a_first_gradient_that_is_not_cleared_gives_one_warning(how, way):
    t = task()
    opt = sam(t)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            opt.zero_grad()
            t.loss().backward()
            if way == "context":
                with opt.perturbed():
                    BETWEEN[how](t, opt)
                    t.loss().backward()
                opt.step()
            else:
                opt.first_step()
                BETWEEN[how](t, opt)
                t.loss().backward()
                opt.second_step()
    texts = [str(w.message) for w in caught]
    assert len(texts) == (how == "nothing")
    assert all(text.startswith("the gradient at w + eps was added to that at w, ") for text in texts)


def test_a_step_that_was_given_up_gives_no_warning_later():
    t = task()
    opt = sam(t)
    t.loss().backward()
    opt.first_step()
    opt.restore()
    for _ in range(2):
        opt.step(t.closure(opt))
