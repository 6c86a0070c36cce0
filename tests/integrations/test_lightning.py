"""Lightning itself trains with SAM: the same weights as a plain loop, under one seed."""

from __future__ import annotations

import logging

import pytest
import torch
from plain_loops import BASE, as_launched, smooth_network, train, train_on_share, train_scaled
from ranks import in_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

import sparsam
from cases import Policy, optimizer, same, task, weights
from sparsam import SAM, RandomMask

L = pytest.importorskip("lightning", reason="lightning is not installed")
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from sparsam.integrations.lightning import SAMModule, SAMMonitor  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:.*LeafSpec.*is deprecated",  # Lightning calls torch so
        "ignore:.*does not have many workers",
        "ignore:.*fewer than the logging interval",
        "ignore:.*pin_memory",
        "ignore:the second pass is computed in full",  # with a cut and accumulation
        "ignore:.*`dataloader_iter`",
        "ignore:this is step",  # LastSteps of tests/cases.py ends before these runs do
    ),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
POLICIES = [
    Policy(),
    Policy("dynamic"),
    Policy("suffix"),
    Policy(ascent="friendly"),
    Policy(ascent="momentum"),
    Policy(schedule="last-steps-momentum"),
    Policy("random", schedule="every-nth"),
]
SHARED = [policy for policy in POLICIES if policy.mask != "suffix" and policy.ascent != "momentum"]


class Net(SAMModule):
    """The network, the optimizer and the loss of a test."""

    def __init__(self, model, make_optimizer):
        super().__init__()
        self.model, self.make_optimizer = model, make_optimizer
        self.losses, self.overflow_in = [], ()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        if not self.in_second_pass:
            self.losses.append(loss.item())
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(x))
        return loss * (torch.inf if self.trainer.global_step in self.overflow_in and self.current_epoch == 0 else 1)

    def configure_optimizers(self):
        self.opt = self.make_optimizer()
        return self.opt


def trainer(epochs=2, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", max_epochs=epochs, enable_model_summary=False, **{**quiet, **options})


def fit(net, dataset, batch=4, validation=None, **options):
    runner = trainer(**options)
    runner.fit(net, DataLoader(dataset, batch_size=batch), validation and DataLoader(validation, batch_size=batch))
    return runner


def sam(model, **options):
    return SAM(model.parameters(), torch.optim.SGD, **{"rho": 0.3, "model": model, **BASE, **options})


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_equals_a_plain_loop(policy, k):
    """Bit for bit, with BatchNorm, dropout, and fewer than k batches in each epoch's last step."""
    t, other = task(dropout=0.25, samples=28), task(dropout=0.25, samples=28)
    torch.manual_seed(0)
    fit(Net(t.model, lambda: optimizer(t, **policy._asdict())), t.dataset, accumulate_grad_batches=k)
    torch.manual_seed(0)
    train(other.model, optimizer(other, **policy._asdict()), other.dataset, k=k)
    assert same(weights(t.model), weights(other.model))


@pytest.mark.parametrize("policy", SHARED, ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_a_share_equals_one_by_hand(policy, k):
    """Rows, or one micro-batch of three; the last step of an epoch has two rows."""
    t, other = task(dropout=0.25, samples=26), task(dropout=0.25, samples=26)
    net = Net(t.model, lambda: optimizer(t, **policy._replace(share=0.4)._asdict()))
    torch.manual_seed(0)
    runner = fit(net, t.dataset, accumulate_grad_batches=k, gradient_clip_val=0.5)
    torch.manual_seed(0)
    twin = optimizer(other, **policy._asdict())
    clip = lambda params: nn.utils.clip_grad_norm_(params, 0.5)  # noqa: E731
    train_on_share(other.model, twin, other.dataset, 0.4, k=k, clip=clip)
    torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-12, atol=1e-12)
    assert net.opt.steps == runner.global_step == twin.steps


@pytest.mark.parametrize("k", [1, 2])
def test_a_share_in_16_mixed(k):
    t, other = task(torch.float32, dropout=0.25), task(torch.float32, dropout=0.25)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    torch.manual_seed(0)
    net = Net(t.model, lambda: optimizer(t, ascent="friendly", share=0.5))
    fit(net, t.dataset, accumulate_grad_batches=k, gradient_clip_val=0.1, plugins=[plugin])
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    clip = lambda params: nn.utils.clip_grad_norm_(params, 0.1)  # noqa: E731
    twin = optimizer(other, ascent="friendly")
    train_on_share(other.model, twin, other.dataset, 0.5, k=k, clip=clip, scaler=scaler)
    torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("schedule", ["none", "every-nth"])
def test_a_share_logs_each_row_once(k, given, schedule):
    class Logging(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)  # which takes no rows of these rows
            self.log("again", loss, on_step=False, on_epoch=True, **({"batch_size": len(batch[0])} if given else {}))
            return loss

    t, other = task(), task()
    net = Logging(t.model, lambda: optimizer(t, schedule=schedule, share=0.25))
    runner = fit(net, t.dataset, accumulate_grad_batches=k)
    losses = train_on_share(other.model, optimizer(other, schedule=schedule), other.dataset, 0.25, k=k)
    for name in "loss", "again":
        assert runner.callback_metrics[name].item() == pytest.approx(2 * sum(losses[len(losses) // 2 :]) / len(losses))


def test_a_share_refuses_what_has_no_rows():
    class Iterating(Net):
        def training_step(self, dataloader_iter):
            pytest.fail("it must not be called")

    class Plain(L.LightningModule):
        training_step, configure_optimizers = Net.training_step.__wrapped__, Net.configure_optimizers

    t = task()
    with pytest.raises(RuntimeError, match=r"share must be 1 with training_step\(dataloader_iter\)"):
        fit(Iterating(t.model, lambda: sam(t.model, share=0.5)), t.dataset)
    net = Plain()
    net.model, net.make_optimizer = t.model, lambda: sam(t.model, share=0.5)
    with pytest.raises(TypeError, match=r"(?s)share= the closure must take one argument.*SAMModule"):
        fit(net, t.dataset)


@pytest.mark.parametrize("k", [1, 2])
def test_a_cut_saves_the_prefix_without_accumulation(k):
    t = task()
    opt = optimizer(t, "suffix")
    calls = {0: 0, 8: 0}
    for i in calls:
        t.model[i].register_forward_hook(lambda *_, i=i: calls.update({i: calls[i] + 1}))
    fit(Net(t.model, lambda: opt), t.dataset, accumulate_grad_batches=k)
    assert calls[8] >= 24  # 12 batches, twice
    assert (calls[0] < calls[8]) is (k == 1)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(algorithm):
    t, other = task(samples=24), task(samples=24)
    fit(
        Net(t.model, lambda: sam(t.model)),
        t.dataset,
        accumulate_grad_batches=2,
        gradient_clip_val=0.01,
        gradient_clip_algorithm=algorithm,
    )
    clip = nn.utils.clip_grad_norm_ if algorithm == "norm" else nn.utils.clip_grad_value_
    train(other.model, sam(other.model), other.dataset, k=2, clip=lambda params: clip(params, 0.01))
    assert same(weights(t.model), weights(other.model))


def test_bf16_mixed():
    t, other = task(torch.float32), task(torch.float32)
    fit(Net(t.model, lambda: sam(t.model)), t.dataset, accumulate_grad_batches=2, precision="bf16-mixed")
    train(other.model, sam(other.model), other.dataset, k=2, autocast=torch.bfloat16)
    assert same(weights(t.model), weights(other.model))


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("ascent", ["gradient", "friendly"])
def test_16_mixed_with_an_overflow(k, ascent):
    """A GradScaler on the CPU; an overflow skips the step."""
    t, other = task(torch.float32, dropout=0.25), task(torch.float32, dropout=0.25)
    net = Net(t.model, lambda: optimizer(t, ascent=ascent))
    net.overflow_in = (1,)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    torch.manual_seed(0)
    fit(net, t.dataset, accumulate_grad_batches=k, gradient_clip_val=0.1, plugins=[plugin])
    torch.manual_seed(0)
    scale = train_scaled(other.model, optimizer(other, ascent=ascent), other.dataset, k=k, overflows=(1,))
    assert same(weights(t.model), weights(other.model))
    assert scaler.get_scale() == scale == 2.0**9
    assert net.opt.steps == 12 // k - 1


def test_16_mixed_without_the_module_is_refused():
    class Plain(L.LightningModule):
        training_step, configure_optimizers = Net.training_step.__wrapped__, Net.configure_optimizers
        overflow_in, in_second_pass = (), True

    t = task(torch.float32)
    net = Plain()
    net.model, net.make_optimizer = t.model, lambda: sam(t.model)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(RuntimeError, match="SAM needs two gradients"):
        fit(net, t.dataset, plugins=[plugin])


def test_accumulation_without_the_module_is_refused():
    class Plain(L.LightningModule):
        training_step, configure_optimizers = Net.training_step.__wrapped__, Net.configure_optimizers
        overflow_in, in_second_pass = (), True

    t = task()
    net = Plain()
    net.model, net.make_optimizer = t.model, lambda: sam(t.model)
    with pytest.raises(RuntimeError, match="SAMModule"):
        fit(net, t.dataset, accumulate_grad_batches=2)


def test_logged_losses_are_those_at_w():
    t, other = task(samples=24), task(samples=24)
    net = Net(t.model, lambda: sam(t.model))
    runner = fit(net, t.dataset, accumulate_grad_batches=2)
    losses = train(other.model, sam(other.model), other.dataset, k=2)
    assert len(net.losses) == 12
    assert runner.callback_metrics["loss"].item() == pytest.approx(sum(net.losses[6:]) / 6, rel=1e-12)
    assert runner.callback_metrics["loss"].item() == pytest.approx(sum(losses[3:]) / 3, rel=1e-12)


def test_another_optimizer_is_left_alone():
    class Plain(L.LightningModule):
        training_step, configure_optimizers = Net.training_step.__wrapped__, Net.configure_optimizers
        overflow_in, in_second_pass, losses = (), True, ()

    one, other = task(dropout=0.25), task(dropout=0.25)
    for cls, t in ((Net, one), (Plain, other)):
        make = lambda t=t: torch.optim.SGD(t.model.parameters(), **BASE)  # noqa: E731
        net = Net(t.model, make) if cls is Net else Plain()
        net.model, net.make_optimizer = t.model, make
        torch.manual_seed(0)
        fit(net, t.dataset, accumulate_grad_batches=3)
    assert same(weights(one.model), weights(other.model))


def test_a_module_that_exists_already():
    class Plain(L.LightningModule):
        def __init__(self, t):
            super().__init__()
            self.t, self.model = t, t.model

        def training_step(self, batch):  # without batch_idx
            return {"loss": F.cross_entropy(self.model(batch[0]), batch[1])}

        def configure_optimizers(self):
            return sam(self.model)

    class WithSAM(SAMModule, Plain):
        pass

    t, other = task(), task()
    fit(WithSAM(t), t.dataset, accumulate_grad_batches=3)
    train(other.model, sam(other.model), other.dataset, k=3)
    assert same(weights(t.model), weights(other.model))


def test_a_fit_that_broke_off_leaves_no_batches_behind():
    t, other = task(), task()
    net = Net(t.model, lambda: sam(t.model))

    class Stop(L.Callback):
        def on_train_batch_end(self, *arguments):
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fit(net, t.dataset, accumulate_grad_batches=3, callbacks=[Stop()])
    fit(net, t.dataset, accumulate_grad_batches=3)
    train(other.model, sam(other.model), other.dataset, k=3)
    assert same(weights(t.model), weights(other.model))


def test_an_iterator_cannot_be_kept():
    class Iterating(Net):
        def training_step(self, dataloader_iter):
            batch, *_ = next(dataloader_iter)
            return F.cross_entropy(self.model(batch[0]), batch[1])

    t = task()
    with pytest.raises(RuntimeError, match=r"accumulate_grad_batches must be 1 with training_step\(dataloader_iter\)"):
        fit(Iterating(t.model, lambda: sam(t.model)), t.dataset, accumulate_grad_batches=2)


@pytest.mark.parametrize(("k", "share"), [(2, 1.0), (1, 0.25), (2, 0.25)])
def test_resuming_from_a_checkpoint(tmp_path, k, share):
    t, other = task(dropout=0.25), task(dropout=0.25)
    options = {"mask": RandomMask(0.5, interval=2), "share": share}
    for epochs, each in ((2, t), (1, other)):
        torch.manual_seed(0)
        runner = fit(
            Net(each.model, lambda each=each: sam(each.model, **options)),
            each.dataset,
            epochs=epochs,
            accumulate_grad_batches=k,
            callbacks=[monitor := SAMMonitor()],
        )
    state = torch.get_rng_state()
    runner.save_checkpoint(tmp_path / "half.ckpt")
    resumed = task(dropout=0.25)
    net = Net(resumed.model, lambda: sam(resumed.model, **options))
    runner = trainer(2, accumulate_grad_batches=k, callbacks=[monitor := SAMMonitor()])
    torch.set_rng_state(state)
    runner.fit(net, DataLoader(resumed.dataset, batch_size=4), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert same(weights(resumed.model), weights(t.model))
    assert net.opt.steps == monitor.aware_steps == 12 // k


def test_monitor_logs_share_rho_and_steps():
    t = task()
    schedule = {"schedule": "every-nth"}
    seen = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, *arguments):
            seen.append({name: value.item() for name, value in trainer.callback_metrics.items() if "sparsam" in name})

    net = Net(t.model, lambda: optimizer(t, "random", rho=0.25, **schedule))
    fit(net, t.dataset, callbacks=[SAMMonitor(), Watch()], log_every_n_steps=1, epochs=1)
    nth = net.opt.schedule.n
    total = sum(p.numel() for p in t.model.parameters())
    aware = 0
    for step, values in enumerate(seen):
        aware += step % nth == 0
        share = round(0.5 * total) / total if step % nth == 0 else 0.0
        assert values["sparsam/share"] == pytest.approx(share)
        assert values["sparsam/rho"] == 0.25
        assert values["sparsam/aware_steps"] == aware
    assert 0 < aware < len(seen) == 6


def test_monitor_names_the_groups():
    t = task()
    params = list(t.model.parameters())
    groups = [{"params": params[:2], "rho": 0.1}, {"params": params[2:]}]
    net = Net(t.model, lambda: SAM(groups, torch.optim.SGD, rho=0.5, lr=0.1))
    runner = fit(net, t.dataset, callbacks=[SAMMonitor()], log_every_n_steps=2, epochs=1)
    assert runner.callback_metrics["sparsam/rho/0"] == pytest.approx(0.1)
    assert runner.callback_metrics["sparsam/rho/1"] == pytest.approx(0.5)


def test_monitor_refreshes_batchnorm_when_training_ends():
    class Forward(Net):
        def forward(self, x):
            return self.model(x)

    t, other = task(), task()
    fit(Forward(t.model, lambda: sam(t.model)), t.dataset, callbacks=[SAMMonitor(refresh_batchnorm=True)])
    train(other.model, sam(other.model), other.dataset)
    before = weights(other.model)
    sparsam.refresh_batchnorm(other.model, DataLoader(other.dataset, batch_size=4))
    assert same(weights(t.model), weights(other.model))
    assert not same(before, weights(other.model))


def test_a_validation_step_may_be_the_training_step():
    """Its losses are those of its batches, and what it sees is not trained on."""

    class Validated(Net):
        losses: list = []  # noqa: RUF012

        def validation_step(self, batch, index):
            self.losses.append(float(self.training_step(batch, index)))

    t, other = task(), task()
    net = Validated(t.model, lambda: sam(t.model))
    fit(net, t.dataset, validation=t.dataset)
    train(other.model, sam(other.model), other.dataset)
    assert same(weights(t.model), weights(other.model))
    assert len(net.losses) > 1
    assert min(net.losses) > 0


def test_monitor_needs_sam():
    t = task()
    net = Net(t.model, lambda: torch.optim.SGD(t.model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"SAMMonitor needs an optimizer that is a sparsam\.SAM"):
        fit(net, t.dataset, callbacks=[SAMMonitor()])


JOBS = [(3, 1.0), (1, 0.5), (3, 0.5)]
"""How many micro-batches, and which share."""


def distributed(rank: int) -> list[list[torch.Tensor]]:
    as_launched(rank)
    results = []
    for k, share in JOBS:
        t = task(samples=24)._replace(model=smooth_network())
        net = Net(t.model, lambda t=t, share=share: sam(t.model, share=share))
        own = Subset(t.dataset, list(range(rank, 24, 2)))
        options = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
        fit(net, own, batch=2, accumulate_grad_batches=k, gradient_clip_val=0.1, **options)
        results.append(weights(t.model))
    return results


def test_ddp_equals_one_process_on_the_joined_batch():
    clip = lambda params: nn.utils.clip_grad_norm_(params, 0.1)  # noqa: E731
    for (k, share), first, second in zip(JOBS, *in_ranks(distributed), strict=True):
        t = task(samples=24)._replace(model=smooth_network())
        if share == 1:
            train(t.model, sam(t.model), t.dataset, batch=4, k=k, clip=clip)
        else:
            train_on_share(t.model, sam(t.model), t.dataset, share, batch=4, k=k, clip=clip)
        assert same(first, second)
        torch.testing.assert_close(first, weights(t.model), rtol=1e-12, atol=1e-12)
        assert not same(first, weights(smooth_network()))
