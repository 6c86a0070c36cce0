"""SAM on a share of the batch: which rows each call computes, by what it weighs them, and what it refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from cases import same, task, weights
from sparsam import SAM, FriendlyAscent, LastSteps, MomentumAscent, SuffixMask, measure_cost
from sparsam.errors import UserError
from sparsam.sam.without_closure import run_passes

SGD = {"lr": 0.05, "momentum": 0.9}


def build(t, share, **options):
    return SAM(t.model.parameters(), torch.optim.SGD, rho=0.3, share=share, model=t.model, **SGD, **options)


@pytest.mark.parametrize(
    ("share", "rows", "first"), [(1 / 8, 24, 3), (0.2, 24, 5), (0.01, 24, 1), (0.5, 1, 1), (0.99, 24, 24)]
)
def test_the_calls_of_a_step(share, rows, first):
    t = task(samples=rows) if rows > 1 else task(samples=2)._replace()
    t = t._replace(x=t.x[:rows], y=t.y[:rows])
    t.model.eval()  # BatchNorm takes no single row
    opt, calls = build(t, share), []

    def closure(part):
        at_w = same(weights(t.model), before)
        calls.append((len(part(t.x)), at_w))
        return t.closure(opt)(part)

    before = weights(t.model)
    opt.step(closure)
    rest = [(rows - first, True)] if rows > first else []
    assert calls == [(first, True), (first, False), *rest]


def test_a_base_step_computes_the_whole_batch_once():
    t = task()
    opt, calls = build(t, 0.25, schedule=LastSteps(0.5, 2)), []

    def closure(part):
        calls.append(len(part(t.x)))
        return t.closure(opt)(part)

    opt.step(closure)
    opt.step(closure)
    assert calls == [24, 6, 6, 18]


def test_the_loss_is_that_of_the_whole_batch_at_w():
    t = task()
    t.model.eval()
    expected = t.loss().item()
    opt = build(t, 0.2)
    assert opt.step(t.closure(opt)).item() == pytest.approx(expected, rel=1e-12)


def test_rows_takes_what_a_batch_is_made_of():
    t = task()
    opt, seen = build(t, 0.25), []
    batch = {"x": t.x, "others": [t.y, (t.y, None, "name")]}

    def closure(rows):
        part = rows(batch)
        seen.append((len(part["x"]), len(part["others"][0]), part["others"][1][2]))
        loss = F.cross_entropy(t.model(part["x"]), part["others"][1][0])
        opt.zero_grad()
        loss.backward()
        return loss

    opt.step(closure)
    assert seen == [(6, 6, "name"), (6, 6, "name"), (18, 18, "name")]


@pytest.mark.parametrize(
    ("share", "k", "calls"),
    [(1 / 8, 4, [1, 1, 3]), (0.5, 4, [2, 2, 2]), (0.4, 3, [1, 1, 2]), (0.9, 3, [3, 3]), (0.25, 1, [1, 1, 1])],
)
def test_micro_batches_are_the_rows_of_an_accumulated_step(share, k, calls):
    """They may differ in size: each loss is divided by their number."""
    t, other = task(dropout=0.3), task(dropout=0.3)
    options = {"ascent": FriendlyAscent()}
    opt, twin, seen = build(t, share, **options), build(other, 1.0, **options), []
    sizes = [9, 5, 4, 6] if k > 1 else [24]
    batches = list(zip(t.x.split(sizes), t.y.split(sizes), strict=True))[:k]

    def closure(rows):
        opt.zero_grad()
        total = 0
        seen.append(len(rows.micro_batches(batches)))
        for x, y in rows.micro_batches(batches):
            loss = F.cross_entropy(t.model(x), y) / k
            loss.backward()
            total += loss.item()
        return total

    def backward(parts):
        for weight, x, y in parts:
            (weight * F.cross_entropy(other.model(x), y)).backward()

    n, parts = calls[0], [(1 / k, x, y) for x, y in batches]
    if k == 1:
        (x, y), rows = batches[0], 6
        parts = [(rows / 24, x[:rows], y[:rows]), (1 - rows / 24, x[rows:], y[rows:])]
    mean = 1 / sum(weight for weight, *_ in parts[:n])
    torch.manual_seed(3)
    for _ in range(3):
        opt.step(closure)
    torch.manual_seed(3)
    for _ in range(3):
        twin.zero_grad()
        backward([(mean * weight, x, y) for weight, x, y in parts[:n]])
        with twin.perturbed():
            twin.zero_grad()
            backward(parts[:n])
        backward(parts[n:])
        twin.step()
    assert seen == calls * 3
    torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-12, atol=1e-12)


def test_the_last_batch_may_be_smaller():
    t = task()
    opt, calls = build(t, 0.25), []
    for count in (24, 7):
        part = t._replace(x=t.x[:count], y=t.y[:count])

        def closure(rows, part=part):
            calls.append(len(rows(part.x)))
            return part.closure(opt)(rows)

        opt.step(closure)
    assert calls == [6, 6, 18, 2, 2, 5]


def test_by_hand_it_is_the_context():
    """The idiom of docs/shares.md, for loops without a closure."""
    shared, by_hand = task(dropout=0.3), task(dropout=0.3)
    opt, other = build(shared, 0.25), build(by_hand, 1.0)
    n, total = 6, 24
    torch.manual_seed(3)
    for _ in range(4):
        opt.step(shared.closure(opt))
    torch.manual_seed(3)
    for _ in range(4):
        t = by_hand
        other.zero_grad()
        F.cross_entropy(t.model(t.x[:n]), t.y[:n]).backward()
        with other.perturbed():
            other.zero_grad()
            (n / total * F.cross_entropy(t.model(t.x[:n]), t.y[:n])).backward()
        ((total - n) / total * F.cross_entropy(t.model(t.x[n:]), t.y[n:])).backward()
        other.step()
    for a, b in zip(weights(shared.model), weights(by_hand.model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_parameter_that_only_one_part_uses():
    w, only_share, only_rest = (torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(3))
    opt = SAM([w, only_share, only_rest], torch.optim.SGD, rho=0.0, share=0.25, lr=1.0)
    x = torch.ones(8, 2, dtype=torch.float64)

    def closure(rows):
        opt.zero_grad()
        own = only_share if len(rows(x)) == 2 else only_rest
        loss = (rows(x) * (w + own)).sum(1).mean()
        loss.backward()
        return loss

    opt.step(closure)
    assert w.tolist() == pytest.approx([0, 0], abs=1e-12)
    assert only_share.tolist() == pytest.approx([0.75, 0.75])
    assert only_rest.tolist() == pytest.approx([0.25, 0.25])


def without_rows(t, opt):
    return lambda rows: t.closure(opt)()


def another_batch(t, opt):
    sizes = iter((24, 24, 20))

    def closure(rows):
        count = next(sizes)
        return t._replace(x=t.x[:count], y=t.y[:count]).closure(opt)(rows)

    return closure


def two_sizes(t, opt):
    return lambda rows: rows((t.x, t.y[:5]))


def no_tensor(t, opt):
    return lambda rows: rows("x")


def no_dimension(t, opt):
    return lambda rows: rows(torch.tensor(1.0))


def more_than_the_loss(t, opt):
    return lambda rows: (t.closure(opt)(rows), 1)


def no_list(t, opt):
    return lambda rows: rows.micro_batches(zip(t.x, t.y, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t, opt: lambda: t.closure(opt)(), r"must take one argument.*\n.*def closure\(rows\)"),
        (without_rows, r"did not call rows:\n.*def closure\(rows\)"),
        (another_batch, "one batch in all calls.*24 rows first and 20 then"),
        (two_sizes, "tensors of one batch.*24 and of 5 rows"),
        (no_tensor, "rows takes a tensor.*given a str"),
        (no_dimension, "a row for each sample"),
        (more_than_the_loss, "return the loss alone, a tensor, a number or None, but returned a tuple"),
        (no_list, "takes a list, but was given a zip"),
    ],
)
def test_closures_that_are_refused_move_no_weight(make, message):
    t = task()
    opt = build(t, 0.25)
    before = [p.detach().clone() for p in t.model.parameters()]
    with pytest.raises(UserError, match=rf"(?s){message}"):
        opt.step(make(t, opt))
    assert same([p.detach() for p in t.model.parameters()], before)
    opt.step(t.closure(opt))  # and the next step is a whole one
    assert opt.steps == 1


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_weights_come_back_after_an_exception(failing):
    t = task(dropout=0.3)
    opt = build(t, 0.25)
    calls = itertools.count(1)

    def closure(rows):
        loss = t.closure(opt)(rows)
        if next(calls) == failing:
            raise ZeroDivisionError
        return loss

    before = [p.detach().clone() for p in t.model.parameters()]
    with pytest.raises(ZeroDivisionError):
        opt.step(closure)
    assert same([p.detach() for p in t.model.parameters()], before)
    opt.step(t.closure(opt))
    assert opt.steps == 1


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan"), "1/8", True])
def test_shares_that_are_refused(share):
    with pytest.raises(UserError, match=r"share must be a number in \(0, 1\]"):
        build(task(), share)


def test_what_does_not_go_with_a_share():
    t = task()
    with pytest.raises(UserError, match="share must be 1 with a mask that has a cut"):
        build(t, 0.25, mask=SuffixMask(t.model, "3"))
    with pytest.raises(UserError, match="share must be 1 with MomentumAscent"):
        build(t, 0.25, ascent=MomentumAscent(0.1))


def test_a_loop_without_a_closure_is_refused():
    t = task()
    opt = build(t, 0.25)
    t.loss(lambda x: x).backward()
    with pytest.raises(UserError, match=r"share=0.25 works in step\(closure\).*Leave share= out"):
        opt.first_step()
    with pytest.raises(UserError, match=r"share=0.25 works in step\(closure\)"), opt.perturbed():
        pass
    opt.step(t.closure(opt))


def test_a_resumed_run_has_the_same_share():
    t = task()
    opt = build(t, 0.25)
    opt.step(t.closure(opt))
    assert opt.share == 0.25
    assert "0.25 of the batch" in repr(opt)
    with pytest.raises(UserError, match=r"share was 0\.25"):
        build(t, 0.5).load_state_dict(opt.state_dict())


def test_passes_without_a_closure_are_those_of_one():
    """What a recipe in fp16 and the trainers run."""
    closed, run = task(dropout=0.3), task(dropout=0.3)
    opt, other = build(closed, 0.25), build(run, 0.25)

    def backward(rows):
        loss = run.loss(rows)
        loss.backward()
        return loss.detach()

    torch.manual_seed(3)
    losses = [opt.step(closed.closure(opt)) for _ in range(4)]
    torch.manual_seed(3)
    for expected in losses:
        torch.testing.assert_close(run_passes(other, backward), expected, rtol=1e-12, atol=1e-12)
        other.step()
    for a, b in zip(weights(closed.model), weights(run.model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_measure_cost_takes_the_same_closure():
    t, rows = task(), []
    opt = build(t, 0.25)

    def closure(part):
        rows.append(len(part(t.x)))
        return t.closure(opt)(part)

    measure_cost(t.model, closure, opt, rounds=1)
    assert rows == [24, 6, 6, 18] * 4
    assert opt.steps == 0
