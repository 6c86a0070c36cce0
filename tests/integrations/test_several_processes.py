"""Trainers on two processes: FSDP2 equals one process on the joined batch; each replica by its own gradient (DDP).

Lightning shards on a CPU by itself. Accelerate, and with it the Hugging Face Trainer, ignores FSDP there and trains by
DistributedDataParallel: `shard_on_cpu` switches that one decision, everything else is Accelerate's own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from plain_loops import BASE, as_launched, shard_on_cpu, smooth_network, train, train_local, train_on_share
from ranks import in_ranks
from sharded import whole
from torch import distributed as dist
from torch import nn
from torch.utils.data import Subset

from cases import same, task, weights
from sparsam import SAM, FriendlyAscent, NormMask, RandomMask, SuffixMask

L = pytest.importorskip("lightning", reason="lightning is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import test_accelerate  # noqa: E402
import test_huggingface  # noqa: E402
import test_lightning  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy  # noqa: E402
from test_lightning import sam  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402

from sparsam.integrations.lightning import SAMMonitor  # noqa: E402
from sparsam.integrations.passes import find_sam  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed"),
    pytest.mark.filterwarnings("ignore:the second pass is computed in full"),  # with a cut and accumulation
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

K, LIMIT, RHO = 3, 0.1, 0.3
POLICIES: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "dense": lambda model: {},
    "random": lambda model: {"mask": RandomMask(0.5, interval=2)},
    "norm": lambda model: {"mask": NormMask(model)},
    "suffix": lambda model: {"mask": SuffixMask(model, "4")},
    "friendly": lambda model: {"ascent": FriendlyAscent()},
    "share": lambda model: {"share": 1 / K, "ascent": FriendlyAscent()},
}


def the_task() -> Any:
    return task(samples=24)._replace(model=smooth_network())


def share(dataset: Any, rank: int) -> Subset:
    """Batches of 2 go to the ranks in turn, as Accelerate does it: together they are batches of 4."""
    return Subset(dataset, [i for i in range(24) if i // 2 % 2 == rank])


def reset() -> None:
    accelerate.state.GradientState._reset_state()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    for name in "ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING":  # set by the Trainer and by the plugin
        os.environ.pop(name, None)


def refusal(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# ------------------------------------------------------------------------------------------------- Lightning


class Sharded(test_lightning.Net):
    """Shards in `configure_model`, as Lightning wants it."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model[1], self.model[2], self.model[4]:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


class FSDP1(test_lightning.Net):
    """Wrapped in FSDP1."""

    def configure_model(self):
        self.model = FullyShardedDataParallel(self.model, device_id=torch.device("cpu"), use_orig_params=True)


class OnCPU(FSDPStrategy):
    """Lightning refuses the class itself without a GPU."""


def lightning(rank: int, net: nn.Module, dataset: Any, strategy: Any, **options: Any) -> Any:
    return test_lightning.fit(
        net,
        share(dataset, rank),
        batch=2,
        accumulate_grad_batches=K,
        gradient_clip_val=LIMIT,
        strategy=strategy,
        devices=2,
        use_distributed_sampler=False,
        **options,
    )


def two_dimensional() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


def lightning_fsdp2(rank: int, policy: str, folder: str) -> dict[str, Any]:
    t = the_task()
    net = Sharded(t.model, lambda: sam(t.model, **POLICIES[policy](t.model)))
    run = lightning(rank, net, t.dataset, two_dimensional(), callbacks=[SAMMonitor()], log_every_n_steps=1)
    assert all(hasattr(p, "full_tensor") for p in t.model.parameters())
    result = {"weights": whole(t.model.parameters()), "masks": whole(net.opt.masks())}
    result["share"] = run.callback_metrics["sparsam/share"].item()
    if policy == "random":
        run.save_checkpoint(f"{folder}/lightning")
        other = the_task()
        again = Sharded(other.model, lambda: sam(other.model, **POLICIES[policy](other.model)))
        result["resumed"] = refusal(lambda: resume(rank, again, other.dataset, f"{folder}/lightning"))
    return result


def lightning_fsdp1(rank: int) -> str:
    t = the_task()
    net = FSDP1(t.model, None)
    net.make_optimizer = lambda: sam(net.model)
    return refusal(lambda: lightning(rank, net, t.dataset, OnCPU()))


def lightning_without_ddp(rank: int) -> str:
    t = the_task()
    net = test_lightning.Net(t.model, lambda: sam(t.model, perturbation="local"))
    return refusal(lambda: lightning(rank, net, t.dataset, "ddp"))


def resume(rank: int, net: nn.Module, dataset: Any, path: str) -> None:
    run = test_lightning.trainer(strategy=two_dimensional(), devices=2, epochs=3)
    run.fit(net, torch.utils.data.DataLoader(share(dataset, rank), batch_size=2), ckpt_path=path)


def lightning_local(rank: int) -> list[torch.Tensor]:
    t = the_task()
    net = test_lightning.Net(t.model, None)
    net.make_optimizer = lambda: sam(net.trainer.strategy.model, perturbation="local")
    lightning(rank, net, t.dataset, "ddp")
    return weights(t.model)


# --------------------------------------------------------------------------------- Accelerate and the Trainer


def sharding(version: int = 2, **options: Any) -> Any:
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=version, **options)
    return shard_on_cpu(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=K), plugin)


def accelerate_fsdp2(rank: int, policy: str, way: str, folder: str, **options: Any) -> dict[str, Any]:
    t = the_task()
    opt = sam(t.model, **POLICIES[policy](t.model))
    accelerator = sharding(**options)
    clip = None if policy == "share" and way == "closure" else LIMIT  # which would clip each call
    test_accelerate.fit(t, opt, way=way, k=K, batch=2, clip=clip, accelerator=accelerator)
    params = [p for group in opt.param_groups for p in group["params"]]
    assert all(hasattr(p, "full_tensor") for p in params)
    assert all(p is q for p, q in zip(params, t.model.parameters(), strict=True))
    result = {"weights": whole(params), "masks": whole(opt.masks())}
    if policy == "random":
        accelerator.save_state(f"{folder}/{way}")
        result["resumed"] = refusal(lambda: accelerator.load_state(f"{folder}/{way}"))
    reset()
    return result


def accelerate_refusals(rank: int) -> dict[str, Any]:
    t = the_task()
    opt = SAM(t.model.parameters(), torch.optim.SGD, rho=RHO, lr=0.1)
    results = {
        "no model": refusal(lambda: test_accelerate.fit(t, opt, way="closure", batch=2, accelerator=sharding())),
        "untouched": same(whole(t.model.parameters()), weights(smooth_network())),
    }
    reset()
    t = the_task()
    opt = sam(t.model, mask=RandomMask(0.5))
    x, y = next(iter(torch.utils.data.DataLoader(t.dataset, batch_size=4)))
    opt.step(lambda: (opt.zero_grad(), nn.functional.cross_entropy(t.model(x), y).backward()))
    results["too late"] = refusal(lambda: test_accelerate.fit(t, opt, way="closure", batch=2, accelerator=sharding()))
    reset()
    t = the_task()
    first = sharding(1, use_orig_params=True)
    results["fsdp1"] = refusal(lambda: test_accelerate.fit(t, sam(t.model), way="closure", batch=2, accelerator=first))
    reset()
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
    results["on a CPU"] = str(accelerate.Accelerator(cpu=True, fsdp_plugin=plugin).distributed_type)
    reset()
    return results


def accelerate_local(rank: int, way: str) -> list[torch.Tensor]:
    """The model is prepared first, so that the optimizer can be told of the DistributedDataParallel."""
    t = the_task()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=K)
    model = accelerator.prepare(t.model)
    opt = sam(model, perturbation="local")
    test_accelerate.fit(t._replace(model=model), opt, way=way, k=K, batch=2, clip=LIMIT, accelerator=accelerator)
    reset()
    return weights(t.model)


def huggingface(t: Any, policy: str = "dense", batch: int = 2, **options: Any) -> Any:
    """Let the Trainer make the optimizer: with FSDP it takes no other."""
    sgd = partial(test_huggingface.SAMTrainer, optimizer_cls_and_kwargs=(torch.optim.SGD, dict(BASE)))
    sam = {"rho": RHO, **POLICIES[policy](t.model)}
    given = {"max_grad_norm": LIMIT, "weight_decay": BASE["weight_decay"], "sam": sam, "cls": sgd}
    options = {**given, **options}
    return test_huggingface.trainer(test_huggingface.Model(t.model), t.dataset, k=K, batch=batch, **options)


def huggingface_sharded(t: Any, policy: str = "dense", version: int = 2, **options: Any) -> Any:
    config = {"version": version, "state_dict_type": "SHARDED_STATE_DICT"}
    config |= {"use_orig_params": True, "sync_module_states": False} if version == 1 else {}
    run = huggingface(t, policy, fsdp=True, fsdp_config=config, **options)
    assert not run.is_fsdp_enabled  # on a CPU
    shard_on_cpu(run.accelerator, accelerate.FullyShardedDataParallelPlugin(**run.args.fsdp_plugin_args))
    run.is_fsdp_enabled = True
    return run


def trained(t: Any, run: Any) -> dict[str, Any]:
    run.train()
    return {"weights": whole(t.model.parameters()), "masks": whole(find_sam(run.optimizer).masks())}


def huggingface_fsdp2(policy: str, folder: str) -> dict[str, Any]:
    t = the_task()
    saving = {"save_strategy": "epoch", "output_dir": folder} if policy == "random" else {}
    result = trained(t, huggingface_sharded(t, policy, **saving))
    assert all(hasattr(p, "full_tensor") for p in t.model.parameters())
    reset()
    if saving:
        run = huggingface_sharded(the_task(), policy, **saving)
        result["resumed"] = refusal(lambda: run.train(resume_from_checkpoint=True))
        reset()
    return result


def huggingface_fsdp1() -> str:
    run = huggingface_sharded(the_task(), version=1)
    message = refusal(run.train)
    reset()
    return message


def huggingface_local() -> list[torch.Tensor]:
    t = the_task()
    all_decay = torch.optim.SGD(t.model.parameters(), **BASE)
    sam = {"rho": RHO, "perturbation": "local"}
    huggingface(t, optimizers=(all_decay, None), sam=sam, cls=test_huggingface.SAMTrainer).train()
    reset()
    return weights(t.model)


# ------------------------------------------------------------------------------------------------- the tests


def all_of_it(rank: int, folder: str) -> dict[str, Any]:
    as_launched(rank)
    results: dict[str, Any] = {}
    for policy in POLICIES:
        results["Lightning", policy] = lightning_fsdp2(rank, policy, folder)
        results["Trainer", policy] = huggingface_fsdp2(policy, folder)
        for way in "closure", "run_passes":
            results[f"Accelerate, {way}", policy] = accelerate_fsdp2(rank, policy, way, folder)
    results["Accelerate, from meta", "random"] = accelerate_fsdp2(
        rank, "random", "closure", folder, cpu_ram_efficient_loading=True
    )
    results["refused"] = accelerate_refusals(rank)
    results["fsdp1"] = [lightning_fsdp1(rank), huggingface_fsdp1(), results["refused"]["fsdp1"]]
    results["no ddp"] = lightning_without_ddp(rank)
    results["local"] = {
        "Lightning": lightning_local(rank),
        "Trainer": huggingface_local(),
        "Accelerate, closure": accelerate_local(rank, "closure"),
        "Accelerate, run_passes": accelerate_local(rank, "run_passes"),
    }
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return in_ranks(all_of_it, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.fixture(scope="module")
def joined():
    """Return what one process makes of the joined batches, for each policy and trainer."""

    def run(policy: str, by: str) -> dict[str, Any]:
        t = the_task()
        if by == "Trainer":  # whose groups have another order; test_huggingface.py compares it with a plain loop
            return trained(t, huggingface(t, policy, batch=4))
        options = POLICIES[policy](t.model)
        share_of_batch = options.pop("share", None)
        opt = sam(t.model, **options)
        clip = lambda params: nn.utils.clip_grad_norm_(params, LIMIT)  # noqa: E731
        if share_of_batch:
            last_clip = None if by == "Accelerate, closure" else clip
            train_on_share(t.model, opt, t.dataset, share_of_batch, batch=4, k=K, clip=last_clip)
        else:
            train(t.model, opt, t.dataset, batch=4, k=K, clip=clip, clip_first=by != "Accelerate, run_passes")
        return {"weights": weights(t.model), "masks": opt.masks()}

    return run


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("by", ["Lightning", "Trainer", "Accelerate, closure", "Accelerate, run_passes"])
def test_fsdp2_equals_one_process_on_the_joined_batch(ranks, joined, by, policy):
    expected = joined(policy, by)
    assert not same(expected["weights"], weights(smooth_network()))
    for results in ranks:
        got = results[by, policy]
        assert same(got["masks"], expected["masks"])
        torch.testing.assert_close(got["weights"], expected["weights"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("policy", POLICIES)
def test_monitor_logs_the_share_of_all_weights(ranks, policy):
    for results in ranks:
        got = results["Lightning", policy]
        chosen, weights = sum(int(m.sum()) for m in got["masks"]), sum(m.numel() for m in got["masks"])
        assert got["share"] == pytest.approx(chosen / weights, rel=1e-6)


def test_weights_that_accelerate_loads_from_one_process(ranks, joined):
    for results in ranks:
        got, expected = results["Accelerate, from meta", "random"], joined("random", "Accelerate, closure")
        assert same(got["masks"], expected["masks"])
        torch.testing.assert_close(got["weights"], expected["weights"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("by", ["Lightning", "Trainer", "Accelerate, closure", "Accelerate, run_passes"])
def test_local_perturbation_is_that_of_each_replica(ranks, joined, by):
    model, dataset = smooth_network(), the_task().dataset
    train_local(model, [share(dataset, 0), share(dataset, 1)], rho=RHO, k=K, batch=2, limit=LIMIT)
    for results in ranks:
        torch.testing.assert_close(results["local"][by], weights(model), rtol=1e-10, atol=1e-10)
    differences = [(a - b).abs().max() for a, b in zip(weights(model), joined("dense", by)["weights"], strict=True)]
    assert max(differences) > 1e-4  # another method than perturbation="global"


@pytest.mark.parametrize("by", ["Lightning", "Trainer", "Accelerate, closure", "Accelerate, run_passes"])
def test_a_trainer_s_own_checkpoint_of_shards_is_refused(ranks, by):
    """They are made with torch's helpers, which drop all of sparsam's part."""
    for results in ranks:
        assert "has no entry 'sparsam'" in results[by, "random"]["resumed"]


FSDP1_MESSAGE = (
    "UserTypeError: params must be tensors or DTensors, but parameter 0 is a piece of FullyShardedDataParallel; "
    "shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
)


def test_local_perturbation_needs_the_ddp(ranks):
    for results in ranks:
        assert "model must be the DistributedDataParallel" in results["no ddp"]
        assert "in Lightning it is self.trainer.strategy.model" in results["no ddp"]


def test_fsdp1_is_refused(ranks):
    for results in ranks:
        assert results["fsdp1"] == [FSDP1_MESSAGE] * 3


def test_what_accelerate_shards_must_be_known_and_new(ranks):
    for results in ranks:
        refused = results["refused"]
        assert refused["no model"].startswith("UserTypeError: model must be given where parameters are sharded")
        assert refused["untouched"]
        assert refused["too late"].startswith("UserRuntimeError: params must be sharded before the first step")


def test_accelerate_ignores_fsdp_on_a_cpu(ranks):
    """If this fails, `shard_on_cpu` is not needed any more."""
    assert [results["refused"]["on a CPU"] for results in ranks] == ["DistributedType.MULTI_CPU"] * 2
