"""What every mask and every base optimizer must do, by being named in cases.py."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import sparsam
from cases import BASES, MASKS, NEED_CLOSURES, SPARSE, STEPS, optimizer, same, task, weights
from sparsam import SAM
from sparsam.masks import SparseMask

# In two steps a mask with a cut saves nothing, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:the second pass is computed in full.*only step:UserWarning")

every_mask = pytest.mark.parametrize("mask", MASKS)
every_mask_without_closure = pytest.mark.parametrize("mask", [mask for mask in MASKS if mask not in NEED_CLOSURES])
every_base = pytest.mark.parametrize("base", BASES)


def test_every_public_mask_is_registered():
    t = task()
    registered = {type(make(t)) for make in MASKS.values()}
    public = {c for c in vars(sparsam).values() if isinstance(c, type) and issubclass(c, sparsam.Mask)}
    assert public - {sparsam.Mask} <= registered


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


@every_mask
@every_base
def test_state_dict_round_trip_in_mid_interval_continues_bit_exactly(mask, base):
    whole, cut = task(dropout=0.3), task(dropout=0.3)
    torch.manual_seed(7)
    opt = optimizer(whole, mask, base)
    losses = train(whole, opt, STEPS)
    torch.manual_seed(7)
    first = optimizer(cut, mask, base)
    before = train(cut, first, 5)
    file = io.BytesIO()
    torch.save({"model": cut.model.state_dict(), "opt": first.state_dict(), "rng": torch.get_rng_state()}, file)

    resumed = task(dropout=0.3, seed=0)
    with torch.no_grad():
        for p in resumed.model.parameters():
            p.zero_()
    second = optimizer(resumed, mask, base)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.model.load_state_dict(saved["model"])
    second.load_state_dict(saved["opt"])
    torch.set_rng_state(saved["rng"])
    after = train(resumed, second, STEPS - 5)

    assert before + after == losses
    assert same(weights(resumed.model), weights(whole.model))
    assert same(second.masks(), opt.masks())


@every_mask
@every_base
def test_learning_rate_schedulers_drive_it(mask, base):
    t, reference = task(), task()
    opt = optimizer(t, mask, base)
    train(t, opt, 4, torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.5))
    assert opt.param_groups[0]["lr"] == pytest.approx(BASES[base][1]["lr"] * 0.5**4)

    by_hand = optimizer(reference, mask, base)
    for k in range(4):
        by_hand.param_groups[0]["lr"] = BASES[base][1]["lr"] * 0.5**k
        by_hand.step(reference.closure(by_hand))
    assert same(weights(t.model), weights(reference.model))


@every_mask_without_closure
@every_base
def test_weights_come_back_after_an_exception(mask, base):
    t = task(dropout=0.3)
    opt = optimizer(t, mask, base)
    train(t, opt, 2)
    opt.zero_grad()
    t.loss().backward()
    before, numbers = weights(t.model), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), opt.perturbed():
        assert any(m.any() for m in opt.masks())
        assert not same(weights(t.model), before)
        t.loss().backward()
        raise ZeroDivisionError
    assert same(weights(t.model), before)
    assert torch.equal(torch.get_rng_state(), numbers)
    with pytest.raises(RuntimeError, match="step\\(\\) without closure"):
        opt.step()


@every_mask_without_closure
@every_base
def test_closure_two_steps_and_context_agree(mask, base):
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
    for way in (lambda t, opt: opt.step(t.closure(opt)), two_step, context):
        t = task(dropout=0.3)
        torch.manual_seed(7)
        opt = optimizer(t, mask, base)
        for _ in range(4):
            way(t, opt)
        results.append([*weights(t.model), *opt.masks(), torch.get_rng_state()])
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@every_mask
@every_base
def test_wrap_is_the_same(mask, base):
    built, wrapped = task(), task()
    cls, arguments = BASES[base]
    one = optimizer(built, mask, base)
    base_optimizer = cls(wrapped.model.parameters(), **arguments)
    other = SAM.wrap(base_optimizer, rho=0.1, mask=MASKS[mask](wrapped), model=wrapped.model)
    assert other.base_optimizer is base_optimizer
    train(built, one, 4)
    train(wrapped, other, 4)
    assert same(weights(built.model), weights(wrapped.model))


@every_mask
@every_base
def test_it_is_deterministic_and_finite(mask, base):
    results = []
    for _ in range(2):
        t = task(dropout=0.3)
        torch.manual_seed(3)
        train(t, optimizer(t, mask, base), 4)
        results.append(weights(t.model))
    assert same(*results)
    assert all(torch.isfinite(w).all() for w in results[0])


@every_mask
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
def test_copies_and_pickles_continue_alike(mask, duplicate):
    t = task()
    opt = optimizer(t, mask)
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
