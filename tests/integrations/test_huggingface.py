"""The Hugging Face Trainer itself trains with SAM: the same weights as a plain loop, under one seed."""

from __future__ import annotations

import pytest
import torch
from plain_loops import BASE, as_launched, scale_on_cpu, smooth_network, train, train_on_share, train_scaled
from ranks import in_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from cases import Policy, optimizer, same, task, weights
from sparsam import SAM, RandomMask

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
from sparsam.integrations.huggingface import SAMTrainer  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:this is step"),  # LastSteps of tests/cases.py ends before these runs do
    pytest.mark.filterwarnings("ignore:the second pass is computed in full"),  # with a cut
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]
SEED = 7
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


class Model(nn.Module):
    """A network that returns its loss, as models of transformers do."""

    def __init__(self, network, overflow_in=()):
        super().__init__()
        self.network, self.overflow_in, self.attempt = network, overflow_in, 0

    def forward(self, x, labels=None):
        outputs = self.network(x)
        if labels is None:
            return {"logits": outputs}
        loss = F.cross_entropy(outputs, labels) * (torch.inf if self.attempt in self.overflow_in else 1)
        return {"loss": loss, "logits": outputs}


def collate(samples):
    return {"x": torch.stack([x for x, _ in samples]), "labels": torch.stack([y for _, y in samples])}


def trainer(model, dataset, *, k=1, batch=4, optimizers=(None, None), cls=SAMTrainer, **options):
    sam, loss = ({name: options.pop(name)} if name in options else {} for name in ("sam", "compute_loss_func"))
    arguments = transformers.TrainingArguments(
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=k,
        **{
            "output_dir": "unused",
            "num_train_epochs": 2,
            "max_grad_norm": 0,
            "lr_scheduler_type": "constant",
            "train_sampling_strategy": "sequential",
            "report_to": [],
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": SEED,
            **options,
        },
    )
    return cls(
        model=model, args=arguments, train_dataset=dataset, data_collator=collate, optimizers=optimizers, **sam, **loss
    )


def sam(model, **options):
    return SAM(model.parameters(), torch.optim.SGD, **{"rho": 0.3, "model": model, **BASE, **options})


def clipping(limit):
    return {"clip": lambda params: nn.utils.clip_grad_norm_(params, limit), "clip_first": False}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_equals_a_plain_loop(policy, k):
    """With BatchNorm, dropout, clipping, and fewer than k batches in each epoch's last step."""
    t, other = task(dropout=0.25, samples=28), task(dropout=0.25, samples=28)
    opt, twin = (optimizer(each, **policy._asdict()) for each in (t, other))
    run = trainer(Model(t.model), t.dataset, k=k, optimizers=(opt, None), max_grad_norm=0.5)
    run.train()
    torch.manual_seed(SEED)
    losses = train(other.model, twin, other.dataset, k=k, whole_windows=False, **clipping(0.5))
    if policy.mask == "suffix":  # replayed in the plain loop: the same numbers, in another order
        torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-12, atol=1e-12)
    else:
        assert same(weights(t.model), weights(other.model))
    logged = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("policy", SHARED, ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_a_share_equals_one_by_hand(policy, k):
    """Rows, or one micro-batch of three; the last step of an epoch has two rows."""
    t, other = task(dropout=0.25, samples=26), task(dropout=0.25, samples=26)
    opt, twin = optimizer(t, **policy._replace(share=0.4)._asdict()), optimizer(other, **policy._asdict())
    run = trainer(Model(t.model), t.dataset, k=k, optimizers=(opt, None), max_grad_norm=0.5)
    run.train()
    torch.manual_seed(SEED)
    clip = clipping(0.5)["clip"]
    losses = train_on_share(other.model, twin, other.dataset, 0.4, k=k, whole_windows=False, clip=clip)
    torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-12, atol=1e-12)
    logged = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("k", [1, 2])
def test_a_share_in_fp16(k):
    t, other = task(torch.float32, dropout=0.25), task(torch.float32, dropout=0.25)
    opt = optimizer(t, ascent="friendly", share=0.5)
    run = trainer(Model(t.model), t.dataset, k=k, optimizers=(opt, None), max_grad_norm=0.1)
    scale_on_cpu(run.accelerator)
    run.train()
    torch.manual_seed(SEED)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    clip = clipping(0.1)["clip"]
    train_on_share(other.model, optimizer(other, ascent="friendly"), other.dataset, 0.5, k=k, clip=clip, scaler=scaler)
    torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-4, atol=1e-5)


def train_by_labels(model, opt, dataset, share, k):
    """Each label that counts has the same weight in a step."""
    for _ in range(2):
        batches = list(DataLoader(dataset, batch_size=4))
        for start in range(0, len(batches), k):
            window = batches[start : start + k]
            x, y = (torch.cat(tensors) for tensors in zip(*window, strict=True))
            n = max(1, round(share * len(window))) * len(window[0][0]) if k > 1 else max(1, round(share * len(x)))
            labels = y.ne(-100).sum()
            opt.zero_grad()
            F.cross_entropy(model(x[:n]), y[:n], reduction="sum").backward()
            with opt.perturbed():
                opt.zero_grad()
                (F.cross_entropy(model(x[:n]), y[:n], reduction="sum") / labels).backward()
            (F.cross_entropy(model(x[n:]), y[n:], reduction="sum") / labels).backward()
            opt.step()


@pytest.mark.parametrize("k", [1, 3])
def test_a_share_with_losses_per_token(k):
    t = task(samples=24)._replace(model=smooth_network())
    t.y[[0, 1, 3, 9, 14]] = -100  # among them are all of a share
    other = t._replace(model=smooth_network())

    def loss(outputs, labels, num_items_in_batch):
        return F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    opt = sam(t.model, share=0.5)
    trainer(Model(t.model), t.dataset, k=k, optimizers=(opt, None), compute_loss_func=loss).train()
    train_by_labels(other.model, sam(other.model), other.dataset, 0.5, k)
    torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-6, atol=1e-6)


def test_a_share_with_a_loss_that_ignores_the_number_of_labels():
    def loss(outputs, labels, num_items_in_batch):
        return F.cross_entropy(outputs["logits"], labels)

    t, other = task(samples=26), task(samples=26)
    opt = sam(t.model, share=0.4)
    trainer(Model(t.model), t.dataset, optimizers=(opt, None), compute_loss_func=loss).train()
    train_on_share(other.model, sam(other.model), other.dataset, 0.4)
    torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-12, atol=1e-12)


def test_a_share_of_what_a_tokenizer_returns():
    """Its rows are taken of a BatchEncoding, which is no dict; other things in it stay."""
    t, other = task(), task()
    seen = []

    class Loads(SAMTrainer):
        def get_batch_samples(self, *arguments, **options):
            samples, items = super().get_batch_samples(*arguments, **options)
            return [transformers.BatchEncoding(sample) for sample in samples], items

        def compute_loss(self, model, inputs, **options):
            seen.append((type(inputs), len(inputs["x"])))
            return super().compute_loss(model, inputs, **options)

    trainer(Model(t.model), t.dataset, optimizers=(sam(t.model, share=0.25), None), cls=Loads).train()
    train_on_share(other.model, sam(other.model), other.dataset, 0.25)
    torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-12, atol=1e-12)
    assert seen == [(transformers.BatchEncoding, n) for n in (1, 1, 3)] * 12


def test_a_share_of_inputs_without_common_rows_is_refused():
    class Extra(Model):
        def forward(self, x, labels=None, places=None):
            return super().forward(x, labels)

    t = task()

    class Loads(SAMTrainer):
        def get_batch_samples(self, *arguments, **options):
            samples, items = super().get_batch_samples(*arguments, **options)
            return [{**sample, "places": torch.arange(3)} for sample in samples], items

    def train(k):
        run = trainer(Extra(t.model), t.dataset, k=k, sam={"share": 0.5}, cls=Loads)
        run.train()

    with pytest.raises(
        ValueError, match=r"tensors of one batch, but .* of 4 and of 3 rows; with gradient accumulation"
    ):
        train(1)
    train(2)


def test_the_trainer_s_own_optimizer_is_wrapped():
    """AdamW in the Trainer's two groups, the second without weight decay."""
    t, other = (task(samples=28)._replace(model=smooth_network()) for _ in range(2))
    run = trainer(
        Model(t.model), t.dataset, k=3, sam={"rho": 0.2, "adaptive": True}, learning_rate=0.01, weight_decay=0.1
    )
    run.train()
    names = run.get_decay_parameter_names(run.model)
    assert 0 < len(names) < len(list(t.model.parameters()))
    twin_groups = [
        {"params": [p for n, p in Model(other.model).named_parameters() if (n in names) is decays], "weight_decay": wd}
        for decays, wd in ((True, 0.1), (False, 0.0))
    ]
    twin = SAM(twin_groups, torch.optim.AdamW, rho=0.2, adaptive=True, model=other.model, lr=0.01)
    torch.manual_seed(SEED)
    train(other.model, twin, other.dataset, k=3, whole_windows=False)
    torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-10, atol=1e-12)


def test_a_plain_optimizer_of_the_user_is_wrapped():
    t, other = task(), task()
    base = torch.optim.SGD(t.model.parameters(), **BASE)
    trainer(Model(t.model), t.dataset, k=3, optimizers=(base, None), sam={"rho": 0.3}).train()
    train(other.model, sam(other.model), other.dataset, k=3)
    assert same(weights(t.model), weights(other.model))


def test_losses_per_token_over_unequal_micro_batches():
    """`num_items_in_batch`: the mean over all labels that count is that of the joined batch."""
    t = task(samples=24)._replace(model=smooth_network())
    t.y[[0, 1, 2, 9, 13]] = -100
    other = t._replace(model=smooth_network())

    def loss(outputs, labels, num_items_in_batch):
        return F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    opt = sam(t.model)
    trainer(Model(t.model), t.dataset, k=3, optimizers=(opt, None), compute_loss_func=loss).train()
    train(other.model, sam(other.model), other.dataset, batch=12)
    torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-12, atol=1e-12)


def test_bf16():
    t, other = task(torch.float32), task(torch.float32)
    trainer(Model(t.model), t.dataset, k=2, optimizers=(sam(t.model), None), bf16=True).train()
    train(other.model, sam(other.model), other.dataset, k=2, autocast=torch.bfloat16)
    torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ascent", ["gradient", "friendly"])
def test_fp16_with_an_overflow(ascent):
    """A GradScaler on the CPU, where Accelerate makes none; an overflow skips the step."""
    t, other = task(torch.float32, dropout=0.25), task(torch.float32, dropout=0.25)
    opt = optimizer(t, ascent=ascent)
    model = Model(t.model, overflow_in=(1,))

    class Counts(transformers.TrainerCallback):
        def on_step_end(self, *arguments, **options):
            model.attempt += 1

    run = trainer(model, t.dataset, k=2, optimizers=(opt, None), max_grad_norm=0.1)
    run.add_callback(Counts())
    scaler = scale_on_cpu(run.accelerator)
    run.train()
    torch.manual_seed(SEED)
    scale = train_scaled(other.model, optimizer(other, ascent=ascent), other.dataset, k=2, overflows=(1,))
    assert same(weights(t.model), weights(other.model))
    assert scaler.get_scale() == scale == 2.0**9
    assert opt.steps == 5


@pytest.mark.parametrize(("k", "share"), [(2, 1.0), (1, 0.25), (2, 0.25)])
def test_resuming_from_a_checkpoint(tmp_path, k, share):
    whole, half, resumed = (task(dropout=0.25) for _ in range(3))
    options = {"k": k, "max_grad_norm": 0.5, "save_strategy": "epoch", "learning_rate": 0.05}

    def run(t, **more):
        mask = RandomMask(0.5, interval=2)
        return trainer(Model(t.model), t.dataset, sam={"rho": 0.3, "mask": mask, "share": share}, **options, **more)

    run(whole, output_dir=str(tmp_path / "whole")).train()
    saving = run(half, output_dir=str(tmp_path / "half"), num_train_epochs=1)
    saving.train()
    other = run(resumed, output_dir=str(tmp_path / "resumed"))
    other.train(resume_from_checkpoint=str(tmp_path / "half" / f"checkpoint-{6 // k}"))
    assert other.state.global_step == other.optimizer.optimizer.steps == 12 // k
    assert same(weights(resumed.model), weights(whole.model))


def test_micro_batches_of_an_epoch_that_broke_off_are_given_up():
    t, other = task(samples=24), task(samples=24)

    class Stop(transformers.TrainerCallback):
        """Ends the first epoch after two of the three micro-batches of its second step."""

        seen = 0

        def on_substep_end(self, args, state, control, **options):
            self.seen += 1
            control.should_epoch_stop = self.seen == 4

    opt, twin = sam(t.model), sam(other.model)
    run = trainer(Model(t.model), t.dataset, k=3, optimizers=(opt, None), max_steps=3)
    run.add_callback(Stop())
    run.train()
    train(other.model, twin, Subset(other.dataset, range(12)), k=3, epochs=1)
    train(other.model, twin, other.dataset, k=3, epochs=1)
    assert same(weights(t.model), weights(other.model))


def test_an_existing_trainer():
    class Doubled(transformers.Trainer):
        def compute_loss(self, *arguments, **options):
            return 2 * super().compute_loss(*arguments, **options)

    class WithSAM(SAMTrainer, Doubled):
        pass

    t, other = task(), task()
    opt, twin = sam(t.model, weight_decay=0), sam(other.model, weight_decay=0, lr=2 * BASE["lr"])
    trainer(Model(t.model), t.dataset, k=3, cls=WithSAM, optimizers=(opt, None)).train()
    train(other.model, twin, other.dataset, k=3)
    torch.testing.assert_close(weights(t.model), weights(other.model), rtol=1e-10, atol=1e-12)


def test_two_sams_are_refused():
    t = task()
    with pytest.raises(
        ValueError, match=r"sam must be None beside an optimizer that is a SAM already, but is \{'rho': 1\}"
    ):
        trainer(Model(t.model), t.dataset, optimizers=(sam(t.model), None), sam={"rho": 1})


JOBS = [(3, 1.0), (1, 0.5), (3, 0.5)]
"""How many micro-batches, and which share."""


def distributed(rank: int) -> list[list[torch.Tensor]]:
    as_launched(rank)
    results = []
    for k, share in JOBS:
        t = task(samples=24)._replace(model=smooth_network())
        opt = sam(t.model, share=share)
        # Batches of 2 go to the ranks in turn: together they are batches of 4.
        run = trainer(Model(t.model), t.dataset, k=k, batch=2, optimizers=(opt, None), max_grad_norm=0.1)
        run.train()
        assert run.accelerator.num_processes == 2
        results.append(weights(t.model))
    return results


def test_ddp_equals_one_process_on_the_joined_batch():
    clip = clipping(0.1)
    for (k, share), first, second in zip(JOBS, *in_ranks(distributed), strict=True):
        t = task(samples=24)._replace(model=smooth_network())
        if share == 1:
            train(t.model, sam(t.model), t.dataset, batch=4, k=k, **clip)
        else:
            shares_first = Subset(t.dataset, [4 * i + j for i in range(6) for j in (0, 2, 1, 3)])
            train_on_share(t.model, sam(t.model), shares_first, share, batch=4, k=k, clip=clip["clip"])
        assert same(first, second)
        torch.testing.assert_close(first, weights(t.model), rtol=1e-12, atol=1e-12)
