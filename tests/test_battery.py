"""What every mask, ascent, schedule and base optimizer must do, by being named in cases.py."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import sparsam
from cases import ASCENTS, BASES, MASKS, SCHEDULES, SPARSE, STEPS, Policy, optimizer, policies, same, task, weights
from sparsam import SAM
from sparsam.masks import SparseMask

# In two steps a mask with a cut saves nothing, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:the second pass is computed in full.*only step:UserWarning")

every_policy = pytest.mark.parametrize("case", policies())
every_base = pytest.mark.parametrize("base", BASES)


@pytest.mark.parametrize(
    ("contract", "cases"), [(sparsam.Mask, MASKS), (sparsam.Ascent, ASCENTS), (sparsam.Schedule, SCHEDULES)]
)
def test_every_public_policy_is_registered(contract, cases):
    t = task()
    made = [make(t) if contract is sparsam.Mask else make() for make in cases.values()]
    public = {c for c in vars(sparsam).values() if isinstance(c, type) and issubclass(c, contract)}
    assert public - {contract} <= {type(policy) for policy in made}


def build(t, case: Policy) -> SAM:
    return optimizer(t, **case._asdict())


def test_every_mask_with_a_sparsity_is_counted():
    t = task()
    with_sparsity = {type(m) for m in (make(t) for make in MASKS.values()) if isinstance(m, SparseMask)}
    assert with_sparsity == {type(make(t, 0.5)) for make in SPARSE.values()}


def train(t, opt, steps, scheduler=None):
    losses = []
    for _ in range(steps):
        losses.append(opt.step(t.closure(opt)).item())
        if scheduler:
            scheduler.step()
    return losses


@every_policy
def test_state_dict_round_trip_in_mid_interval_continues_bit_exactly(case):
    whole, cut = task(dropout=0.3), task(dropout=0.3)
    torch.manual_seed(7)
    opt = build(whole, case)
    losses = train(whole, opt, STEPS)
    torch.manual_seed(7)
    first = build(cut, case)
    before = train(cut, first, 5)
    file = io.BytesIO()
    torch.save({"model": cut.model.state_dict(), "opt": first.state_dict(), "rng": torch.get_rng_state()}, file)

    resumed = task(dropout=0.3, seed=0)
    with torch.no_grad():
        for p in resumed.model.parameters():
            p.zero_()
    second = build(resumed, case)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.model.load_state_dict(saved["model"])
    second.load_state_dict(saved["opt"])
    torch.set_rng_state(saved["rng"])
    after = train(resumed, second, STEPS - 5)

    assert before + after == losses
    assert same(weights(resumed.model), weights(whole.model))
    assert same(second.masks(), opt.masks())


@every_policy
def test_learning_rate_schedulers_drive_it(case):
    t, reference = task(), task()
    opt = build(t, case)
    train(t, opt, 4, torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.5))
    assert opt.param_groups[0]["lr"] == pytest.approx(BASES[case.base][1]["lr"] * 0.5**4)

    by_hand = build(reference, case)
    for k in range(4):
        by_hand.param_groups[0]["lr"] = BASES[case.base][1]["lr"] * 0.5**k
        by_hand.step(reference.closure(by_hand))
    assert same(weights(t.model), weights(reference.model))


@pytest.mark.parametrize("case", [case for case in policies() if case.values[0].share == 1])
def test_weights_come_back_after_an_exception(case):
    t = task(dropout=0.3)
    opt = build(t, case)
    train(t, opt, 2)
    opt.zero_grad()
    t.loss().backward()
    before, numbers, coming = weights(t.model), torch.get_rng_state(), opt.schedule.ascent(opt.steps, opt.ascent)
    with pytest.raises(ZeroDivisionError), opt.perturbed():
        assert any(m.any() for m in opt.masks()) == (coming is not None)
        assert same(weights(t.model), before) == (coming is None)
        t.loss().backward()
        raise ZeroDivisionError
    assert same(weights(t.model), before)
    assert torch.equal(torch.get_rng_state(), numbers)
    if coming is not None:
        with pytest.raises(RuntimeError, match="step\\(\\) without closure"):
            opt.step()


@pytest.mark.parametrize("case", [case for case in policies() if case.values[0].share == 1])
def test_closure_two_steps_and_context_agree(case):
    def two_step(t, opt):
        t.loss().backward()
        opt.first_step(zero_grad=True)
        t.loss().backward()
        opt.second_step(zero_grad=True)

    def context(t, opt):
        opt.zero_grad()
        t.loss().backward()
        with opt.perturbed():
            opt.zero_grad()
            t.loss().backward()
        opt.step()

    results = []

    def thrifty_context(t, opt):
        """Run one pass where one is enough."""
        if opt.needs_second_pass:
            return context(t, opt)
        with opt.perturbed():
            opt.zero_grad()
            t.loss().backward()
        return opt.step()

    statistics = []
    for way in (lambda t, opt: opt.step(t.closure(opt)), thrifty_context, two_step, context):
        t = task(dropout=0.3)
        torch.manual_seed(7)
        opt = build(t, case)
        for _ in range(STEPS):
            way(t, opt)
        results.append([p.detach() for p in t.model.parameters()] + [*opt.masks(), torch.get_rng_state()])
        statistics.append(list(t.model.buffers()))
    # A loop that runs a pass at w although one at w + eps is enough has the running statistics of w, which a Fisher
    # mask reads.
    one_pass = any(a.passes == 1 for a in opt.schedule.ascents(opt.ascent))
    for other in statistics[1:2] if one_pass else statistics[1:]:
        assert same(statistics[0], other)
    for other in results[1:2] if one_pass and "fisher" in case.mask else results[1:]:
        assert same(results[0], other)


@every_policy
def test_wrap_is_the_same(case):
    built, wrapped = task(), task()
    cls, arguments = BASES[case.base]
    one = build(built, case)
    base_optimizer = cls(wrapped.model.parameters(), **arguments)
    policy = {
        "mask": MASKS[case.mask](wrapped),
        "ascent": ASCENTS[case.ascent](),
        "schedule": SCHEDULES[case.schedule](),
    }
    other = SAM.wrap(base_optimizer, rho=0.1, model=wrapped.model, share=case.share, **policy)
    assert other.base_optimizer is base_optimizer
    train(built, one, 4)
    train(wrapped, other, 4)
    assert same(weights(built.model), weights(wrapped.model))


@every_policy
def test_it_is_deterministic_and_finite(case):
    results = []
    for _ in range(2):
        t = task(dropout=0.3)
        torch.manual_seed(3)
        train(t, build(t, case), 4)
        results.append(weights(t.model))
    assert same(*results)
    assert all(torch.isfinite(w).all() for w in results[0])


@every_policy
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
def test_copies_and_pickles_continue_alike(case, duplicate):
    t = task()
    opt = build(t, case)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.5)  # puts a step of its own onto the optimizer
    train(t, opt, 2, scheduler)
    twin_opt, twin_model = duplicate((opt, t.model))
    train(t, opt, 4)
    train(t._replace(model=twin_model), twin_opt, 4)
    assert same(weights(t.model), weights(twin_model))


@pytest.mark.parametrize("mask", SPARSE)
@every_base
def test_sparsity_zero_is_sam_bit_for_bit(mask, base):
    sparse, dense = task(dropout=0.3), task(dropout=0.3)
    cls, arguments = BASES[base]
    torch.manual_seed(1)
    opt = SAM(sparse.model.parameters(), cls, rho=0.1, mask=SPARSE[mask](sparse, 0.0), model=sparse.model, **arguments)
    train(sparse, opt, 5)
    assert all(m.all() for m in opt.masks())
    torch.manual_seed(1)
    train(dense, optimizer(dense, "none", base), 5)
    assert same(weights(sparse.model), weights(dense.model))


@pytest.mark.parametrize("mask", SPARSE)
@every_base
def test_sparsity_one_is_the_base_optimizer_bit_for_bit(mask, base):
    sparse, plain = task(dropout=0.3), task(dropout=0.3)
    cls, arguments = BASES[base]
    torch.manual_seed(1)
    opt = SAM(sparse.model.parameters(), cls, rho=0.1, mask=SPARSE[mask](sparse, 1.0), model=sparse.model, **arguments)
    train(sparse, opt, 5)
    assert not any(m.any() for m in opt.masks())
    torch.manual_seed(1)
    base_optimizer = cls(plain.model.parameters(), **arguments)
    for _ in range(5):
        plain.closure(base_optimizer)()
        base_optimizer.step()
    assert same(weights(sparse.model), weights(plain.model))


@every_base
def test_rho_zero_is_the_base_optimizer_bit_for_bit(base):
    t, plain = task(), task()
    with torch.no_grad():  # a weight of -0.0 must not become 0.0
        for p in (*t.model.parameters(), *plain.model.parameters()):
            p.view(-1)[0] = -0.0
    cls, arguments = BASES[base]
    train(t, optimizer(t, "none", base, rho=0.0), 3)
    base_optimizer = cls(plain.model.parameters(), **arguments)
    for _ in range(3):
        plain.closure(base_optimizer)()
        base_optimizer.step()
    assert same(weights(t.model), weights(plain.model))


@pytest.mark.parametrize("mask", SPARSE)
@pytest.mark.parametrize("sparsity", [0.0, 0.013, 0.2, 0.5, 0.99, 1.0])
def test_exactly_the_right_number_of_weights_at_every_update(mask, sparsity):
    t = task()
    total = sum(p.numel() for p in t.model.parameters())
    opt = SAM(t.model.parameters(), torch.optim.SGD, mask=SPARSE[mask](t, sparsity), lr=0.1)
    for _ in range(6):
        opt.step(t.closure(opt))
        assert sum(m.sum().item() for m in opt.masks()) == round((1 - sparsity) * total)
