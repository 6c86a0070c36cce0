"""Networks to cut, each with its cuts, and the masked SAM step in two whole passes. Nothing here knows sparsam's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sparsam.models import build_model

BASE = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
RHO = 0.1

Batch = tuple[Tensor, Tensor]
Closure = Callable[[], Any]


# ------------------------------------------------------------------------------------------------ the plain step


class Plain:
    """SGD on the gradient at w + eps, eps = rho g / |g| over the parameters of a suffix: two whole passes.

    Args:
        model: The network.
        before: How the names of the parameters before the cut begin.
    """

    def __init__(self, model: nn.Module, before: tuple[str, ...], *, rho: float = RHO, adaptive: bool = False) -> None:
        self.model, self.rho, self.adaptive = model, rho, adaptive
        self.before = [p for name, p in model.named_parameters() if name.startswith(before)]
        self.suffix = [p for name, p in model.named_parameters() if not name.startswith(before)]
        self.sgd = torch.optim.SGD(model.parameters(), **BASE)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.sgd.zero_grad(set_to_none)

    def step(self, closure: Closure, **options: Any) -> Any:
        loss = self.passes(closure, **options)
        self.sgd.step()
        return loss

    def passes(
        self,
        closure: Closure,
        *,
        clip: float | None = None,
        masks: dict[Tensor, Tensor] | None = None,
    ) -> Any:
        """Leave the gradient at w + eps in `.grad` and everything else as the first pass left it; return its loss.

        Args:
            closure: Clears the gradients and leaves new ones.
            clip: To which norm gradients are clipped in each pass.
            masks: Which weights of each parameter of the suffix are perturbed.
        """
        numbers = torch.get_rng_state()
        loss = closure()
        numbers_after = torch.get_rng_state()
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        params = list(self.model.parameters())
        perturbed = self.suffix
        if clip is not None:
            for p in self.before:  # a first pass that ends at the cut has nothing else to clip
                p.grad = None
            nn.utils.clip_grad_norm_(params, clip)

        w = {p: p.detach().clone() for p in perturbed}
        length = self.length(perturbed)
        with torch.no_grad():
            for p in perturbed:
                if p.grad is not None and length > 0:
                    direction = p.grad * p.square() if self.adaptive else p.grad
                    moved = torch.add(p, direction, alpha=float(self.rho / length))
                    p.copy_(moved if masks is None else moved.where(masks[p], p))

        torch.set_rng_state(numbers)
        closure()
        torch.set_rng_state(numbers_after)
        if clip is not None:
            nn.utils.clip_grad_norm_(params, clip)
        with torch.no_grad():
            for p in perturbed:
                p.copy_(w[p])
            for buffer, value in buffers:
                buffer.copy_(value)
        return loss

    @torch.no_grad()
    def length(self, params: list[Tensor]) -> Tensor:
        """|g|, or ||w| g|, added up in the library's order, which decides the last bit."""
        terms = [p.grad * p if self.adaptive else p.grad for p in params if p.grad is not None]
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(term) for term in terms]))


def closure_of(model: Callable[..., Tensor], zero_grad: Closure, batch: Batch) -> Closure:
    x, y = batch

    def closure() -> Tensor:
        zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        return loss

    return closure


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


def snapshot(model: nn.Module, loss: Any = None) -> dict[str, Tensor]:
    """What a step leaves: copies of weights, gradients and buffers, torch's random state, and the loss."""
    state = {"random numbers": torch.get_rng_state()}
    if isinstance(loss, Tensor):
        state["loss"] = loss.detach().clone()
    for name, p in model.named_parameters():
        state[name] = p.detach().clone()
        state[f"{name}, gradient"] = torch.zeros(0) if p.grad is None else p.grad.clone()
    state |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {name.replace("_orig_mod.", ""): t for name, t in state.items()}  # torch.compile's


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of what is not the same bit for bit."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one
        or name not in other
        or one[name].shape != other[name].shape
        or not torch.equal(_bits(one[name]), _bits(other[name]))
    ]


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().flatten().view(torch.uint8)


# --------------------------------------------------------------------------------------------------- networks


class VGG(nn.Sequential):
    """One flat chain with ReLUs that work in place."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in ((1, 4), (4, 6), (6, 8)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(2)]
        super().__init__(
            *layers, nn.Flatten(), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 3)
        )


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        h = self.dropout(scores.softmax(-1)) @ v
        return self.out(h.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, *, causal: bool = False, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention or Attention(width, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        if isinstance(self.attention, nn.MultiheadAttention):
            x = x + self.attention(h, h, h, need_weights=False)[0]
        else:
            x = x + self.attention(h)
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Class token and position embedding are added in the outermost forward, outside any module."""

    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.patches = nn.Conv2d(1, 8, 4, stride=4)
        self.dropout = nn.Dropout(0.1)
        attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.blocks = nn.ModuleList([Block(8), Block(8, attention=attention), Block(8)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.cls.expand(len(x), -1, -1), h], 1) + self.position
        h = F.dropout(self.dropout(h), 0.1, self.training)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)[:, 0])


class Encoder(nn.Module):
    """torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(3)]
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        mask = torch.zeros(x.shape, dtype=torch.bool)
        for layer in self.layers:
            h = layer(h, src_key_padding_mask=mask)
        return self.head(h.mean(1))


class GPT(nn.Module):
    """The head is the embedding, so that one weight is used on both sides of every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.position = nn.Embedding(6, 8)
        self.blocks = nn.ModuleList([Block(8, causal=True) for _ in range(3)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class UNet(nn.Module):
    """What goes down is used again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(1, 4, 3, padding=1)
        self.down = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.bottom = nn.Conv2d(6, 4, 3, padding=1)
        self.up = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.ReLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        fine = F.relu(self.inner(x))
        coarse = self.bottom(self.down(fine))
        coarse = F.interpolate(coarse, scale_factor=2.0)
        return self.head(self.up(torch.cat([fine, coarse], 1)))


class Residual(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.mlp(h)


class Chain(nn.Module):
    """A stem, blocks and a head, to go wrong in one point each."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
        self.blocks = nn.ModuleList([Residual() for _ in range(blocks)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class AddInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.ones(8))
        self.residual = Residual()

    def forward(self, h: Tensor) -> Tensor:
        h += self.position
        return self.residual(h)


class ChangesItsInput(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = AddInPlace()


class Detour(Chain):
    """Goes through `extra` before the blocks whenever `takes` says so of the number of the call."""

    def __init__(self, takes: Callable[[int], bool]) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)  # draws no random numbers: to draw other amounts gives another warning
        self.takes, self.calls = takes, 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        if self.takes(self.calls):
            h = self.extra(h)
        self.calls += 1
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class LateSkip(Chain):
    """Carries the stem's output past all blocks, but only from some call on."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.since, self.calls = since, 0

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.stem(x)
        for block in self.blocks:
            h = block(h)
        self.calls += 1
        return self.head(h + first if self.calls > self.since else h)


class Checkpointed(Chain):
    """Some of its blocks are checkpointed, block -1 being the stem."""

    def __init__(self, which: tuple[int, ...], *, reentrant: bool, batch_norm: bool = False) -> None:
        super().__init__()
        if not batch_norm:  # whose statistics move once more in the backward pass
            for layers in (self.stem, *(block.mlp for block in self.blocks)):
                layers[1] = nn.LayerNorm(8)
        self.which, self.reentrant = which, reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.stem, x, use_reentrant=self.reentrant) if -1 in self.which else self.stem(x)
        for i, block in enumerate(self.blocks):
            h = checkpoint(block, h, use_reentrant=self.reentrant) if i in self.which else block(h)
        return self.head(h)


class Stage(nn.Module):
    """Checkpoints its blocks in the old way, which finds a gradient only if its input needs one."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual() for _ in range(blocks)])
        for block in self.blocks:
            block.mlp[1] = nn.LayerNorm(8)

    def forward(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return h


class Staged(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Stage(2)


class Shared(Chain):
    """One block is used on both sides of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Residual()

    def forward(self, x: Tensor) -> Tensor:
        h = self.shared(self.stem(x))
        for block in self.blocks:
            h = self.shared(block(h))
        return self.head(h)


class Repeated(Chain):
    """One block again and again, and a head that is called twice with the same input."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for _ in range(3):
            h = self.blocks[0](h)
        h = self.blocks[2](self.blocks[1](h))
        return self.head(h) + self.head(h).tanh()


class Rotary(nn.Module):
    """Angles without a gradient, made before the blocks and used in all of them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.arange(x.shape[-1], dtype=x.dtype) / 3
        return angles.cos(), angles.sin()


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.residual = Residual()

    def forward(self, h: Tensor, angles: tuple[Tensor, Tensor], *, mask: Tensor) -> Tensor:
        cos, sin = angles
        return self.residual((h * cos + h.flip(-1) * sin).masked_fill(mask, 0.0))


class RotaryChain(Chain):
    """Angles and mask may be changed in place after their module has returned them."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.rotary, self.mask = Rotary(), Mask()
        self.blocks = nn.ModuleList([Rotated() for _ in range(3)])
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        cos, sin = self.rotary(h)
        mask = self.mask(h)
        if self.in_place:
            cos *= 0.5
            mask |= torch.arange(8) == 3
        for block in self.blocks:
            h = block(h, (cos, sin), mask=mask)
        return self.head(h)


class Mask(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return torch.arange(h.shape[-1]) == 5


class Branches(nn.Module):
    """Two encoders side by side; the other one runs before the one that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.other = Shift()
        self.block = Residual()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, other = self.stem(x), self.other(x)
        return self.head(self.block(h) + other)


class Shift(nn.Module):
    """Its backward pass needs no saved tensor, so that going through it twice raises no error."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x + self.shift, (0, 2))


class Switched(Chain):
    """A plain argument of forward changes what the stem computes."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        h = self.stem(scale * x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Wrapped:
    """A value that torch cannot look into."""

    def __init__(self, h: Tensor) -> None:
        self.h = h


class TakesWrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.residual = Residual()

    def forward(self, wrapped: Wrapped) -> Tensor:
        return self.residual(wrapped.h)


class Opaque(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = TakesWrapped()

    def forward(self, x: Tensor) -> Tensor:
        h = Wrapped(self.blocks[0](self.stem(x)))
        return self.head(self.blocks[2](self.blocks[1](h)))


class FrozenFeatures(Chain):
    """Features without a gradient are used behind the cut, and the next block changed them in place before it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = nn.Sequential(nn.ReLU(inplace=True), Residual())
        for module in (self.stem, self.blocks[0]):
            module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = features = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h + features)


class InPlaceThenDetour(Chain):
    """A tensor is changed in place outside any module, right before the way parts in every second call."""

    def __init__(self, *, consumed: bool) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)
        self.consumed, self.calls = consumed, 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h.relu_()
        if self.consumed:
            h = h * 2
        self.calls += 1
        if self.calls % 2 == 0:
            h = self.extra(h)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Borrowed(Chain):
    """Calls the parts of its stem one by one."""

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.stem:
            h = layer(h)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Uncuttable(nn.Module):
    """Every module sees only a part of what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 8))
        self.left, self.right = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.w
        return self.left(h) + self.right(h)


# ------------------------------------------------------------------------------------------------------- cases


def images(channels: int = 1, size: int = 8, classes: int = 3, samples: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, channels, size, size, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, classes, (samples,), generator=generator)


def vectors(width: int = 6, classes: int = 3, samples: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, width, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, classes, (samples,), generator=generator)


def tokens(classes: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 11, (6, 6), generator=generator), torch.randint(0, classes, (6,), generator=generator)


def next_tokens() -> Batch:
    x = torch.randint(0, 11, (6, 7), generator=torch.Generator().manual_seed(5))
    return x[:, :-1], x[:, 1:]


class Case(NamedTuple):
    """A network, its data, and its cuts: for each, how the names of the parameters before it begin."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    cuts: dict[str, tuple[str, ...]]

    def model(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.make().double()


CASES = {
    "resnet18": Case(
        lambda: build_model("resnet18", 10),
        lambda: images(3, 8, 10, 3),
        {
            "layer4": ("stem.", "layer1.", "layer2.", "layer3."),
            "layer3.1": ("stem.", "layer1.", "layer2.", "layer3.0."),
        },
    ),
    "resnet": Case(
        lambda: build_model("resnet-small", 3, channels=1),
        images,
        {"stem": ("no parameter",), "layer2": ("stem.", "layer1."), "head.2": ("stem.", "layer")},
    ),
    "wrn-10-2": Case(
        lambda: build_model("wrn-10-2", 3, channels=1),
        images,
        {"layer3": ("stem.", "layer1.", "layer2."), "layer1": ("stem.",), "head": ("stem.", "layer")},
    ),
    "vgg": Case(
        VGG,
        images,
        {
            "4": ("0.", "1."),
            "5": ("0.", "1.", "4."),
            "8": ("0.", "1.", "4.", "5."),
            "16": ("0.", "1.", "4.", "5.", "8.", "9.", "13."),
        },
    ),
    "vit": Case(
        ViT,
        images,
        {
            "blocks.0": ("cls", "position", "patches."),
            "blocks.1": ("cls", "position", "patches.", "blocks.0."),
            "norm": ("cls", "position", "patches.", "blocks."),
        },
    ),
    "encoder": Case(
        Encoder,
        tokens,
        {
            "layers.1": ("embedding.", "layers.0."),
            "layers.2.norm2": ("embedding.", "layers.0.", "layers.1.", "layers.2.self", "layers.2.lin", "layers.2.norm1."),
            "head": ("embedding.", "layers."),
        },
    ),
    "gpt": Case(
        GPT,
        next_tokens,
        {
            "blocks.1": ("embedding.", "position.", "blocks.0."),
            "norm": ("embedding.", "position.", "blocks."),
        },
    ),
}  # fmt: skip

EVERY_CUT = [(name, cut) for name, case in CASES.items() for cut in case.cuts]
