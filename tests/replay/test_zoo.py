"""Well-known models: each step is exact by an independent oracle, and a replayed step saves what it should.

`docs/replay-models.md` has the table below for readers.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from oracle import LR, RHO, judge
from patterns import CodebookBefore, Recurrent
from replay_models import CASES, UNet, images, loss_of
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from sparsam import SAM, SuffixMask
from sparsam.models import build_model

PAGE = Path(__file__).parents[2] / "docs" / "replay-models.md"
STEPS = 5
EXACT = {torch.float64: 1e-9, torch.float32: 1e-5}
SAVES = 0.95  # of two whole passes, at most

AROUND = "what is computed before {cut!r} is used after it, and not through its input"


class Entry(NamedTuple):
    """A model, its loss, where it is cut, and whether it is replayed."""

    model: Callable[[], nn.Module]
    cut: str
    loss: Callable[[nn.Module, int], Tensor]
    falls_back: str = ""
    """What the warning says; nothing: it is replayed."""
    page: str = ""
    """What the page says of the reason."""
    dtype: torch.dtype = torch.float64
    marks: Any = ()


# ------------------------------------------------------------------------------------------------ networks


def case(name: str) -> Callable[[nn.Module, int], Tensor]:
    def loss(model: nn.Module, step: int) -> Tensor:
        x, y = CASES[name].batch()
        return loss_of(model(x if x.dtype == torch.int64 else x + step / 10), y)

    return loss


def of_images(model: nn.Module, step: int) -> Tensor:
    x, y = images(3, 32, 10, 2)
    return loss_of(model(x.to(next(model.parameters()).dtype) + step / 10), y)


def of_one_channel(model: nn.Module, step: int) -> Tensor:
    x, y = images()
    return loss_of(model(x + step / 10), y)


class Encoder(nn.Module):
    """torch's own transformer encoder, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x)).mean(1))


class MixtureOfExperts(nn.Module):
    """Each sample goes to the expert that the router prefers; the second value says how evenly they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)])

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(h).softmax(1)
        largest, chosen = shares.max(1)
        output = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            samples = (chosen == i).nonzero()[:, 0]
            output = output.index_add(0, samples, expert(h[samples]) * largest[samples, None])
        return h + output, shares.mean(0).square().sum()


class Experts(nn.Module):
    """Blocks of experts, whose balance may be a term of the loss."""

    def __init__(self, *, balance: bool) -> None:
        super().__init__()
        self.stem, self.head, self.balance = nn.Linear(8, 8), nn.Linear(8, 3), balance
        self.blocks = nn.ModuleList([MixtureOfExperts() for _ in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, balances = self.stem(x), []
        for block in self.blocks:
            h, balance = block(h)
            balances.append(balance)
        return self.head(h), torch.stack(balances).sum() if self.balance else torch.zeros(())


def of_experts(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    output, balance = model(x)
    return loss_of(output, torch.arange(12) % 3) + balance


def of_pattern(model: Any, step: int) -> Tensor:
    return model.loss(step)


# -------------------------------------------------------------------------------------------- Hugging Face


def hugging_face(name: str, config: str, *, trained: tuple[str, ...] = (), **options: Any) -> Callable[[], nn.Module]:
    """Return a function that makes a small model with random weights; `trained`: what is not frozen, if not all."""

    def make() -> nn.Module:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        transformers = pytest.importorskip("transformers", reason="needs Hugging Face: pip install transformers")
        model = getattr(transformers, name)(getattr(transformers, config)(**options)).train()
        for key, p in model.named_parameters():
            p.requires_grad_(not trained or any(part in key for part in trained))
        return model

    return make


def tokens(step: int) -> Tensor:
    return torch.randint(1, 50, (3, 8), generator=torch.Generator().manual_seed(step))


def next_token(model: Any, step: int, **options: Any) -> Tensor:
    return model(input_ids=tokens(step), labels=tokens(step), **options).loss


def of_text(model: Any, step: int) -> Tensor:
    return model(input_ids=tokens(step), labels=torch.arange(3) % 2).loss


def of_pictures(model: Any, step: int) -> Tensor:
    x, y = images(3, 8, 2, 3)
    return model(pixel_values=x + step / 10, labels=y).loss


no_cache = functools.partial(next_token, use_cache=False)

WIDTH = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 3}
bert = hugging_face("BertForSequenceClassification", "BertConfig", vocab_size=50, max_position_embeddings=16, **WIDTH)
vit = hugging_face("ViTForImageClassification", "ViTConfig", image_size=8, patch_size=4, **WIDTH)
gpt2 = functools.partial(
    hugging_face, "GPT2LMHeadModel", "GPT2Config", vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip
llama = functools.partial(
    hugging_face, "LlamaForCausalLM", "LlamaConfig", vocab_size=50, max_position_embeddings=16, num_key_value_heads=1,
    **WIDTH,
)  # fmt: skip
t5 = hugging_face(
    "T5ForConditionalGeneration", "T5Config", vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
    decoder_start_token_id=0, pad_token_id=0,
)  # fmt: skip
mixtral = hugging_face(
    "MixtralForCausalLM", "MixtralConfig", vocab_size=50, max_position_embeddings=16, num_key_value_heads=1,
    num_local_experts=4, **WIDTH,
)  # fmt: skip
with_router_loss = functools.partial(next_token, output_router_logits=True)


# --------------------------------------------------------------------------------------------------- table

SKIP = "a skip connection goes around the cut"

ZOO = {
    "ResNet-18": Entry(
        lambda: build_model("resnet18", 10), "layer3", of_images, dtype=torch.float32, marks=pytest.mark.slow
    ),
    "WRN-16-4": Entry(
        lambda: build_model("wrn-16-4", 10), "layer3", of_images, dtype=torch.float32, marks=pytest.mark.slow
    ),
    "VGG-11": Entry(
        lambda: build_model("vgg11-bn", 10), "layer3", of_images, dtype=torch.float32, marks=pytest.mark.slow
    ),
    "ViT, 4×4 patches": Entry(lambda: build_model("vit-cifar", 10), "blocks.4", of_images, dtype=torch.float32),
    "small ResNet": Entry(CASES["resnet"].make, "layer2", case("resnet")),
    "WRN-10-2": Entry(CASES["wrn-10-2"].make, "layer3", case("wrn-10-2")),
    "small VGG, ReLU in place": Entry(CASES["vgg"].make, "8", case("vgg")),
    "small ViT": Entry(CASES["vit"].make, "blocks.1", case("vit")),
    "`nn.TransformerEncoder`, dropout": Entry(Encoder, "encoder.layers.1", case("encoder")),
    "GPT, tied embedding": Entry(CASES["gpt"].make, "blocks.1", case("gpt")),
    "LSTM, two": Entry(Recurrent, "body", of_pattern),
    "U-Net, cut at the bottom": Entry(UNet, "bottom", of_one_channel, AROUND, SKIP),
    "U-Net, cut where the skips have joined": Entry(UNet, "up", of_one_channel),
    "mixture of experts": Entry(lambda: Experts(balance=False), "blocks.1", of_experts),
    "mixture of experts, balance in the loss": Entry(
        lambda: Experts(balance=True), "blocks.1", of_experts, AROUND, "the first block's balance goes around the cut"
    ),
    "VQ, cut behind the codebook": Entry(
        CodebookBefore, "body", of_pattern, AROUND, "the codebook's distance goes around the cut"
    ),
    "VQ, cut at the codebook": Entry(CodebookBefore, "codebook", of_pattern),
    "Hugging Face BERT": Entry(bert, "bert.encoder.layer.1", of_text),
    "Hugging Face ViT": Entry(vit, "vit.layers.1", of_pictures),
    "Hugging Face GPT-2, no cache": Entry(gpt2(), "transformer.h.1", no_cache),
    "Hugging Face GPT-2": Entry(gpt2(), "transformer.h.1", next_token),
    "Hugging Face GPT-2, last MLP trained": Entry(gpt2(trained=("h.2.mlp",)), "transformer.h.1", next_token, marks=pytest.mark.slow),
    "Hugging Face Llama": Entry(llama(), "model.layers.1", next_token),
    "Hugging Face Llama, last MLP and head trained": Entry(
        llama(trained=("layers.2.mlp", "lm_head")), "model.layers.1", next_token
    ),
    "Hugging Face Llama, queries and head trained": Entry(llama(trained=("q_proj", "lm_head")), "model.layers.0", next_token),
    "Hugging Face Llama, head trained": Entry(llama(trained=("lm_head",)), "lm_head", next_token),
    "Hugging Face T5, cut at the decoder": Entry(t5, "decoder", next_token, marks=pytest.mark.slow),
    "Hugging Face T5, cut in the decoder": Entry(t5, "decoder.block.1", next_token),
    "Hugging Face T5, cut in the encoder": Entry(t5, "encoder.block.1", next_token, marks=pytest.mark.slow),
    "Hugging Face Mixtral": Entry(mixtral, "model.layers.1", next_token, dtype=torch.float32),
    "Hugging Face Mixtral, router loss": Entry(
        mixtral, "model.layers.1", with_router_loss, AROUND, "the first layers' routing goes around the cut",
        torch.float32,
    ),
}  # fmt: skip

every = [pytest.param(entry, id=name, marks=entry.marks) for name, entry in ZOO.items()]
replayed = [param for param in every if not param.values[0].falls_back]


def build(entry: Entry) -> nn.Module:
    torch.manual_seed(0)
    return entry.model().to(entry.dtype)


@pytest.mark.parametrize("entry", every)
def test_every_step_is_exact(entry):
    verdict = judge(build(entry), entry.loss, entry.cut, steps=STEPS)
    assert verdict.wrong < EXACT[entry.dtype]
    if entry.falls_back:
        assert len(verdict.messages) == 1
        assert re.search(re.escape(entry.falls_back.format(cut=entry.cut)), verdict.messages[0])
        assert verdict.calls[2:] == [2] * (STEPS - 2)
    else:
        assert verdict.messages == []
        assert verdict.calls == [3, 3, 2, 2, 2]


# -------------------------------------------------------------------------------------------- operations


class AtTheCut(Exception):
    """Ends a forward pass."""


def count(work: Callable[[], Any]) -> int:
    """Return how many floating-point operations some work takes."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


class Counts(NamedTuple):
    """What parts of a step take, found with hooks at the cut and nothing of replay."""

    whole: int  # a pass, forward and backward
    prefix: int  # what comes before the cut, forward
    shorter: int  # a pass whose gradient ends at the cut

    @property
    def replayed(self) -> int:
        """A step: a first pass whose gradient ends at the cut, a second one without the prefix' forward pass."""
        return self.shorter + self.whole - self.prefix


def counts_of(model: nn.Module, cut: str, loss: Callable[[], Tensor]) -> Counts:
    def one_pass() -> None:
        model.zero_grad()
        loss().backward()

    def until_the_cut() -> None:
        with pytest.raises(AtTheCut):
            loss()

    def stop(*_: Any) -> None:
        raise AtTheCut

    def detach(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, Tensor.detach, (args, kwargs))

    module, whole = model.get_submodule(cut), count(one_pass)
    with module.register_forward_pre_hook(stop):
        prefix = count(until_the_cut)
    with module.register_forward_pre_hook(detach, with_kwargs=True):
        return Counts(whole, prefix, count(one_pass))


@pytest.mark.parametrize("entry", replayed)
def test_a_replayed_step_saves_what_comes_before_the_cut(entry):
    model = build(entry)
    expected = counts_of(model, entry.cut, lambda: entry.loss(model, 0))
    opt = SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=SuffixMask(model, entry.cut), lr=LR)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = entry.loss(model, 0)
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure)
    counted = count(lambda: opt.step(closure))
    assert counted == pytest.approx(expected.replayed, rel=0.02)
    assert counted < SAVES * 2 * expected.whole or not expected.prefix
    with pytest.warns(UserWarning, match="switched off"):
        opt._passes.replay.give_up("switched off")
    assert count(lambda: opt.step(closure)) == pytest.approx(2 * expected.whole, rel=0.02)


# -------------------------------------------------------------------------------------------------- page


def test_the_page_has_this_table():
    rows = [row for row in PAGE.read_text().splitlines() if re.match(r"\| .*`.* \|$", row)]
    assert rows == [
        f"| {name} | `{entry.cut}` | {f'falls back: {entry.page}' if entry.falls_back else 'replayed'} |"
        for name, entry in ZOO.items()
    ]
