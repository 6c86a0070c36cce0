"""The Hugging Face Trainer itself trains with SAM: the same weights as a plain loop, under one seed."""

from __future__ import annotations

import pytest
import torch
from plain_loops import BASE, as_launched, scale_on_cpu, smooth_network, train, train_scaled
from ranks import in_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset

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


def test_resuming_from_a_checkpoint(tmp_path):
    whole, half, resumed = (task(dropout=0.25) for _ in range(3))
    options = {"k": 2, "max_grad_norm": 0.5, "save_strategy": "epoch", "learning_rate": 0.05}

    def run(t, **more):
        mask = RandomMask(0.5, interval=2)
        return trainer(Model(t.model), t.dataset, sam={"rho": 0.3, "mask": mask}, **options, **more)

    run(whole, output_dir=str(tmp_path / "whole")).train()
    saving = run(half, output_dir=str(tmp_path / "half"), num_train_epochs=1)
    saving.train()
    other = run(resumed, output_dir=str(tmp_path / "resumed"))
    other.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-3"))
    assert other.state.global_step == other.optimizer.optimizer.steps == 6
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


def distributed(rank: int) -> list[torch.Tensor]:
    as_launched(rank)
    t = task(samples=24)._replace(model=smooth_network())
    # Batches of 2 go to the ranks in turn: together they are batches of 4.
    run = trainer(Model(t.model), t.dataset, k=3, batch=2, optimizers=(sam(t.model), None), max_grad_norm=0.1)
    run.train()
    assert run.accelerator.num_processes == 2
    return weights(t.model)


def test_ddp_equals_one_process_on_the_joined_batch():
    first, second = in_ranks(distributed)
    t = task(samples=24)._replace(model=smooth_network())
    train(t.model, sam(t.model), t.dataset, batch=4, k=3, **clipping(0.1))
    assert same(first, second)
    torch.testing.assert_close(first, weights(t.model), rtol=1e-12, atol=1e-12)
