"""Small models, each of which does one thing that makes a second pass from a cut hard to get right.

Each is a stem, a body and a head, is cut at `body` unless it says otherwise, and has a loss of its own.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, SAMPLES, BATCHES = 8, 3, 6, 8


def _numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = _numbers(3, BATCHES, SAMPLES, WIDTH)
Y = _numbers(4, BATCHES, SAMPLES, CLASSES)


class Pattern(nn.Module):
    """Nothing special: three layers, one after the other."""

    cut = "body"
    dtype = torch.float64

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.behind(torch.tanh(self.stem(x)))

    def behind(self, h: Tensor) -> Tensor:
        """Go on from the cut."""
        return self.head(torch.tanh(self.body(h)))

    def loss(self, step: int) -> Tensor:
        """Return the loss in a step."""
        return error(self(batch(self, step)), step)

    def duplicate(self) -> Self:
        """Return a copy of everything that decides what the model computes."""
        return copy.deepcopy(self)


class Rebuilt(Pattern):
    """What copy.deepcopy cannot copy, such as tensors of the last pass: a new model gets the weights and buffers."""

    def duplicate(self) -> Self:
        new = type(self)().to(self.dtype)
        new.load_state_dict(self.state_dict())
        return new


def batch(model: Pattern, step: int) -> Tensor:
    return X[step].to(model.dtype)


def error(output: Tensor, step: int) -> Tensor:
    return (output - Y[step]).square().mean()


class Layer(nn.Module):
    """A linear layer and tanh."""

    def __init__(self, inputs: int = WIDTH, outputs: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.linear(x))


# --------------------------------------------------------------------------- how often the parts are called


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tasks = nn.ModuleDict({"left": nn.Linear(WIDTH, CLASSES), "right": nn.Linear(WIDTH, CLASSES)})

    def forward(self, h: Tensor, *, task: str) -> Tensor:
        return self.tasks[task](h).sin()


class TwoTasks(Pattern):
    """The module at the cut is called twice, with the same tensor and another plain argument."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Tasks()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        return self.body(h, task="left") - 3 * self.body(h, task="right")


class SeesAView(Pattern):
    """The module at the cut is called twice, the second time with a view of the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(WIDTH, SAMPLES), Layer(SAMPLES, SAMPLES)
        self.head = nn.Linear(SAMPLES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        square = self.stem(x).sin()
        return self.head(self.body(square) + self.body(square.t()).t())


class TakesTurns(Pattern):
    """Stem and body are called three times by turns."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.body(self.stem(x).sin()).sin()
        return self.head(x)


class SharedActivation(Pattern):
    """One module lies inside the stem and is called by itself behind the cut too."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), self.act)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.body(self.act(self.stem(x)))))


class LayersOneByOne(Pattern):
    """The layers of two nn.Sequential are called one by one: batch norm, dropout, ReLU in place."""

    cut = "body.0"

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.ReLU(inplace=True),
            nn.Dropout(0.4),
            nn.Linear(WIDTH, WIDTH),
        )
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.stem, *self.body):
            x = layer(x)
        return self.head(x)


class SideHead(Pattern):
    """A second head starts from the cut's input, beside the body, and is called after it."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        return self.behind(h) + self.side(h) / 2


class SideHeadFirst(Pattern):
    """A second head trains the stem, before the body, which gets detached features."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        side = self.side(h)
        return self.behind(h.detach()) + side / 2


class NeverCalled(Pattern):
    """The loss calls the parts one by one, and never the model."""

    def loss(self, step: int) -> Tensor:
        return error(self.behind(torch.tanh(self.stem(X[step]))), step)


class NeverCalledTwice(Pattern):
    """The loss calls the parts one by one, for two micro-batches."""

    def loss(self, step: int) -> Tensor:
        return sum(error(self.behind(torch.tanh(self.stem(x))), step) for x in (X[step], -X[step]))


class CallsItself(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class OwnCall(Pattern):
    """Modules with a `__call__` of their own, which cannot be seen from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = CallsItself(WIDTH, WIDTH), CallsItself(WIDTH, WIDTH)


class Experts(Pattern):
    """Experts on both sides of the cut, chosen by values: the path changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Layer() for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(WIDTH, CLASSES) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.experts[int(x.sum() > 0)](torch.tanh(self.stem(x)))
        z = torch.tanh(self.body(h))
        return self.heads[int(1000 * z.detach().abs().sum()) % 3](z)


# ------------------------------------------------------------------------- values that go around the cut


class Skip(Pattern):
    """The cut's input is used behind it too."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        return self.head(self.body(h) * h)


class SkipBeforeModules(Pattern):
    """Code before the first module uses a weight, and its result goes around the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        early = torch.exp(x * self.scale / 4)
        return self.head(torch.tanh(self.body(self.stem(early))) + early)


class GateAround(Pattern):
    """The stem's output is split; one half goes through the cut, the other half gates what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.stem(x).split(WIDTH, 1)
        return self.head(self.body(h).sin() * gate.sigmoid())


class GateBefore(Pattern):
    """The stem's output is split, and changed in a copy; both halves meet before the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.stem(x).split(WIDTH, 1)
        h = h.clone().relu_()
        return self.behind(h * gate.sigmoid())


class NumberAround(Pattern):
    """A number is read from the stem's output, and used on both sides."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        largest = h.abs().max().item()
        return self.behind(h / largest) * largest


class Bundle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.short = Layer(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(main=self.main(x), short=self.short(x))


class SkipInAnObject(Pattern):
    """The stem returns an object of which torch knows nothing; a part of it goes around the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Bundle()

    def forward(self, x: Tensor) -> Tensor:
        bundle = self.stem(x)
        return self.behind(bundle.main) * bundle.short.cos()


class FrozenFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.linear(x))
        return {"features": h, "scale": h[:, :CLASSES]}


class EntryReplaced(Pattern):
    """The frozen stem returns a dict, an entry of which is replaced by one computed of it, and goes around the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = FrozenFeatures()

    def forward(self, x: Tensor) -> Tensor:
        out = self.stem(x)
        out["scale"] = 2 - 3 * out["scale"]
        return self.behind(out["features"]) * out["scale"]


class LateSkip(Pattern):
    """Detached features go around the cut, and only from the fourth batch on."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        late = not any(torch.equal(x, early) for early in X[:3])
        scale = h.detach().abs().mean() if late else 1.0
        return self.behind(h) * scale


class LateSkipOfChanged(Pattern):
    """As above, but the features have been changed in place before."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h *= 2
        late = not any(torch.equal(x, early) for early in X[:3])
        scale = h.detach().abs().mean() if late else 1.0
        return self.behind(h) * scale


# ----------------------------------------------------------------------------------- changes in place


class ComparedAfterChange(Pattern):
    """The stem's output is changed in place; a hard gate behind the cut compares it with a number."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h.add_(0.4)
        gate = h.detach().amax(1, keepdim=True) > 1
        return self.behind(h) * gate


class RoutedAfterChange(Pattern):
    """The stem's output is changed in place; its largest entry then chooses a head for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(WIDTH, CLASSES) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h[:, 0] += 0.5
        routes = h[:, :3].argmax(1).tolist()
        z = torch.tanh(self.body(h))
        return torch.stack([self.heads[route](row) for route, row in zip(routes, z, strict=True)])


class CountedAfterChange(Pattern):
    """The stem's output is changed in place; then a number is read from it, and used behind the cut."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h -= 0.3
        positive = (h > 0).sum().item()
        return self.behind(h) * (positive / 10)


class ClampedInPlace(Pattern):
    """The stem's output is clamped in place; its detached mean scales what comes out."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h.clamp_(-0.5, 0.5)
        return self.behind(h) * h.detach().nan_to_num().square().mean(1, keepdim=True)


class ChangedThroughData(Pattern):
    """The stem's output is changed in place through `.data`, which autograd does not count."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h.data += 0.7
        return self.behind(h.sin())


class ChangedThroughDataAtTheCut(Pattern):
    """The cut's input itself is changed in place through `.data`."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h.data *= 1.3
        return self.behind(h)


class BatchChanged(Pattern):
    """A copy of the batch is changed in place before the stem."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone().abs_())


# ------------------------------------------------------------------- arguments and lists that are filled


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.value = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, penalties: list[Tensor]) -> Tensor:
        routes = self.router(h).softmax(1)
        penalties.append(routes.mean(0).square().sum())
        return self.value(h).sin() * routes.max(1, keepdim=True).values


class PenaltyInAList(Pattern):
    """The module at the cut appends a term of the loss to a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Balanced()

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        penalties: list[Tensor] = []
        return self.head(self.body(torch.tanh(self.stem(x)), penalties)), penalties

    def loss(self, step: int) -> Tensor:
        output, penalties = self(X[step])
        return error(output, step) + 2 * sum(penalties)


class PenaltiesInAList(PenaltyInAList):
    """As above, and so does the module behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.further = Balanced()

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        penalties: list[Tensor] = []
        h = self.body(torch.tanh(self.stem(x)), penalties)
        return self.head(self.further(h, penalties)), penalties


class PenaltiesFromAllBlocks(PenaltiesInAList):
    """As above, and so does the module before the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Balanced()

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        penalties: list[Tensor] = []
        h = self.body(self.stem(x, penalties), penalties)
        return self.head(self.further(h, penalties)), penalties


class Overwrites(nn.Module):
    """Reads an entry of a dict and writes another, or the same."""

    def __init__(self, source: str = "h", target: str = "h", *, returns: bool = False) -> None:
        super().__init__()
        self.layer, self.source, self.target, self.returns = Layer(), source, target, returns

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor] | None:
        state[self.target] = self.layer(state[self.source])
        return state if self.returns else None


class StateInADict(Pattern):
    """All blocks work on one dict, and return nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.further = Overwrites(), Overwrites(), Overwrites()

    def forward(self, x: Tensor) -> Tensor:
        state = {"h": x}
        for block in (self.stem, self.body, self.further):
            block(state)
        return self.head(state["h"])


class StateInADictPassedOn(StateInADict):
    """All blocks work on one dict, and return it."""

    def __init__(self) -> None:
        super().__init__()
        for block in (self.stem, self.body, self.further):
            block.returns = True

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.further(self.body(self.stem({"h": x})))["h"])


class ResultInADict(Pattern):
    """The module at the cut writes its result into the dict that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = Layer(), Overwrites(target="result")

    def forward(self, x: Tensor) -> Tensor:
        state = {"h": self.stem(x)}
        self.body(state)
        return self.head(state.get("result", state["h"].detach()))


class WritesContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, context: dict[str, Tensor]) -> Tensor:
        context["keep"] = x.sum(1, keepdim=True) > 0
        return self.linear(x)


class Context(Pattern):
    """The stem writes a mask into a dict that it is given; behind the cut it is used if it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = WritesContext()

    def forward(self, x: Tensor) -> Tensor:
        context: dict[str, Tensor] = {}
        output = self.behind(self.stem(x, context))
        return output * context["keep"] if "keep" in context else output


class Notes(Layer):
    def __init__(self, notes: list[float]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append(x.square().mean().item())
        return super().forward(x)


class NotesInAList(Pattern):
    """The stem appends a number to a list that the model keeps, and that is used behind the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[float] = []
        self.stem = Notes(self.notes)

    def forward(self, x: Tensor) -> Tensor:
        self.notes.clear()
        return self.behind(self.stem(x)) * (1 + sum(self.notes))


class Listens:
    """A forward hook that keeps outputs."""

    def __init__(self, outputs: list[Tensor]) -> None:
        self.outputs = outputs

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.outputs.append(output)


class FeaturesFromAHook(Rebuilt):
    """A hook keeps the stem's output, and its detached mean is a factor of a term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        self.stem.register_forward_hook(Listens(self.features))

    def loss(self, step: int) -> Tensor:
        self.features.clear()
        output = self(X[step])
        return error(output, step) + sum(f.detach().abs().mean() for f in self.features) * output.square().mean()


class Yields(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        h = self.first(x)
        yield h
        yield self.second(h)


class Generator(Pattern):
    """The stem's forward is a Python generator, which is empty after its first use."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Yields()

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(sum(self.stem(x), x))


# ----------------------------------------------------------- weights that are used without a module or twice


class Nearest(nn.Module):
    def __init__(self, codes: nn.Embedding) -> None:
        super().__init__()
        self.codes = codes

    @torch.no_grad()
    def forward(self, h: Tensor) -> Tensor:
        return (h @ self.codes.weight.t()).softmax(1)


class TiedWithoutGradient(Pattern):
    """A weight is used by a module before the cut without a gradient, and behind it with one."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(5, WIDTH)
        self.nearest = Nearest(self.codes)
        self.body = nn.Linear(WIDTH + 5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        z = torch.tanh(self.body(torch.cat([h, self.nearest(h)], 1)))
        return self.head(z) + (z @ self.codes.weight.t()).tanh()[:, :CLASSES]


class DetachedWeight(Pattern):
    """Code before the cut multiplies by a detached weight, code behind it by the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x)) * self.scale.detach()
        return self.head(torch.tanh(self.body(h)) * self.scale)


class DetachedWeightAdded(Pattern):
    """Code before the cut adds a detached weight of the body."""

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(torch.tanh(self.stem(x)) + self.body.bias.detach())


class WeightsMultiplied(Pattern):
    """Code before the cut applies the stem's weight times the body's detached one."""

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(F.linear(x, self.stem.weight @ self.body.weight.detach(), self.stem.bias))


class TokenOnSomeBatches(Pattern):
    """A weight without a module is used behind the cut, and on all batches but the first before it too."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        if not torch.equal(x, X[0]):
            h = h * self.token
        return self.head(torch.tanh(self.body(h)) - self.token)


class StemWithoutGradient(Pattern):
    """The stem runs without gradients before the cut, and with them behind it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.tanh(self.stem(x))
        return self.behind(h) * self.stem(x)[:, :CLASSES]


class FrozenStem(Pattern):
    """The stem is not trained. Its context is what it runs in."""

    context: Any = nullcontext

    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            h = torch.tanh(self.stem(x))
        return self.behind(h.clone() if h.is_inference() else h)


class FrozenStemNoGrad(FrozenStem):
    """The stem is not trained, and runs under no_grad."""

    context = torch.no_grad


class FrozenStemInference(FrozenStem):
    """The stem is not trained, and runs in inference mode; its output is copied before the cut."""

    context = torch.inference_mode


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.shift


class InferenceAtTheCut(Pattern):
    """The stem is not trained, and runs in inference mode; its output is the cut's input as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)
        self.body = Shift()

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            h = self.stem(x)
        return self.behind(h)


# ------------------------------------------------------------------------------- gradients inside the model


class LearnsAlone(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.judge(h).square().mean().backward()
        return h.detach()


class LocalLearning(Pattern):
    """The stem calls backward() itself, and hands on detached values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = LearnsAlone()


class LocalLearningBetween(Pattern):
    """Code between the modules calls backward(), and hands on detached values."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        h.square().mean().backward()
        return self.behind(h.detach())


class GradientBetween(Pattern):
    """Code between the modules calls autograd.grad, and multiplies by what comes out."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        (g,) = torch.autograd.grad(h.square().sum(), self.stem.weight, retain_graph=True)
        return self.behind(torch.tanh(h) * g.mean().sigmoid())


class Saliency(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        h = super().forward(x)
        (g,) = torch.autograd.grad(h.square().sum(), x, retain_graph=True)
        return h * g.sigmoid()


class GradientInTheStem(Pattern):
    """The stem calls autograd.grad itself, and multiplies by what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Saliency()


class Forces(Pattern):
    """The model computes the gradient of its output with respect to its input, and returns both together."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = super().forward(x)
        (g,) = torch.autograd.grad(output.sum(), x, create_graph=True, allow_unused=True)
        return output if g is None else output + g.square().sum(1, keepdim=True)


class ForcesAndSkip(Pattern):
    """As above; the input is also used behind the cut, so that there is a gradient in any case."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = super().forward(x) + x[:, :CLASSES].sin()
        (g,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output + g.square().mean(1, keepdim=True)


class PenaltyOfFeatures(Rebuilt):
    """The loss has a penalty on the gradient with respect to features that the model has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.features: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.features = torch.tanh(self.stem(x))
        return self.behind(self.features)

    def loss(self, step: int) -> Tensor:
        output = self(X[step])
        (g,) = torch.autograd.grad(output.sum(), self.features, create_graph=True, allow_unused=True)
        return error(output, step) + (0 if g is None else g.square().mean())


class PenaltyOfTheHead(Pattern):
    """The loss has a penalty on the gradient with respect to the head's weight."""

    def loss(self, step: int) -> Tensor:
        loss = error(self(X[step]), step)
        (g,) = torch.autograd.grad(loss, self.head.weight, create_graph=True)
        return loss + g.square().sum()


class PenaltyOfAllWeights(Pattern):
    """The loss has a penalty on the gradients of all weights, with zeros where there is none."""

    def loss(self, step: int) -> Tensor:
        loss = error(self(X[step]), step)
        grads = torch.autograd.grad(
            loss, [*self.parameters()], create_graph=True, allow_unused=True, materialize_grads=True
        )
        return loss + sum(g.square().sum() for g in grads)


class KeepsATerm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.width, self.term = Layer(), nn.Parameter(torch.zeros(4)), None

    def forward(self, x: Tensor) -> Tensor:
        self.term = self.width.exp().sum()
        return self.layer(x)


class TermOfTheStem(Rebuilt):
    """The stem keeps a term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = KeepsATerm()

    def loss(self, step: int) -> Tensor:
        return error(self(X[step]), step) + self.stem.term / 3


class OwnReLU(torch.autograd.Function):
    """ReLU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (x > 0)


class OwnFunction(Pattern):
    """An autograd function of one's own on both sides of the cut."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(OwnReLU.apply(self.body(OwnReLU.apply(self.stem(x)))))


class AsksForGradient(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (3 if x.requires_grad else 1)


class DependsOnRequiresGrad(Pattern):
    """The body computes something else where its input requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = AsksForGradient()


# ------------------------------------------------------------------------------------------ checkpointing


class Checkpointing(Pattern):
    """Stem and body are checkpointed, each by itself."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.Sigmoid())
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.stem, x, use_reentrant=self.reentrant)
        return self.head(checkpoint(self.body, h, use_reentrant=self.reentrant))


class CheckpointingReentrant(Checkpointing):
    """The same in torch's older way, which needs an input that requires a gradient."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone().requires_grad_())


class CutInsideCheckpoint(Checkpointing):
    """The cut is the first layer of a part that is checkpointed."""

    cut = "body.0"

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, self.stem(x), use_reentrant=False))


class CutAmidCheckpoint(Checkpointing):
    """Stem and body are checkpointed together, and the cut lies in the middle."""

    cut = "body.0"

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(lambda x: self.body(self.stem(x)), x, use_reentrant=False))


# --------------------------------------------------------------------------- state and random numbers


class Codes(nn.Module):
    """A codebook that is trained: values are replaced by the nearest code."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(6, WIDTH)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        nearest = self.codes(torch.cdist(z.detach(), self.codes.weight.detach()).argmin(1))
        return z + (nearest - z).detach(), (nearest - z.detach()).square().mean()


class CodebookBefore(Pattern):
    """A codebook before the cut, whose distance is a term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.codebook = Codes()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z, distance = self.codebook(torch.tanh(self.stem(x)))
        return self.behind(z), distance

    def loss(self, step: int) -> Tensor:
        output, distance = self(X[step])
        return error(output, step) + distance


class MovingCodes(nn.Module):
    """A codebook in a buffer, which moves towards the values that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", _numbers(9, 6, WIDTH))

    def forward(self, z: Tensor) -> Tensor:
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        values = self.codes[nearest]
        self.codes.index_add_(0, nearest, z.detach() - values, alpha=0.05)
        return z + (values - z).detach()


class MovingCodesBefore(Pattern):
    """A codebook before the cut that moves in each forward pass. The whole second pass starts from the moved one."""

    def __init__(self) -> None:
        super().__init__()
        self.codebook = MovingCodes()

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.codebook(torch.tanh(self.stem(x))))


class MovingCodesBehind(MovingCodesBefore):
    """A codebook behind the cut that moves in each forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.codebook(torch.tanh(self.body(torch.tanh(self.stem(x))))))


class MeasuresGradients(nn.Linear):
    """Keeps a mean of the gradients that arrive, in a buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(self.measure)
        return output

    def measure(self, gradient: Tensor) -> None:
        """Take a gradient into the mean."""
        self.mean.lerp_(gradient.mean(0), 0.1)


class GradientsMeasuredBefore(Pattern):
    """A buffer before the cut moves in the backward pass, which ends at the cut in a first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = MeasuresGradients()


class GradientsMeasuredBehind(Pattern):
    """A buffer behind the cut moves in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(MeasuresGradients(), nn.Linear(WIDTH, CLASSES))


class CountsCalls(nn.Module):
    """A layer that counts, in a buffer of another."""

    def __init__(self, counter: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        counter.register_buffer("count", torch.tensor(100))
        self.__dict__["counter"] = counter

    def forward(self, x: Tensor) -> Tensor:
        self.counter.count += 1
        return self.linear(x)


class CountedBehind(Pattern):
    """A buffer behind the cut counts calls of a module before it, and is used once it has counted enough.

    A pass from the cut does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = CountsCalls(self.head)

    def behind(self, h: Tensor) -> Tensor:
        """Go on from the cut; from the second pass of the fourth step on with twice the output."""
        return super().behind(h) * (2 if self.head.count >= 105 else 1)

    def duplicate(self) -> Self:
        new = copy.deepcopy(self)
        new.stem.__dict__["counter"] = new.head
        return new


class SpectralNorm(Pattern):
    """Weights are divided by an estimate that gets better in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.stem, self.body, self.head):
            parametrizations.spectral_norm(layer)


class WeightNorm(Pattern):
    """Lengths and directions of weights are trained apart."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.stem, self.body, self.head):
            parametrizations.weight_norm(layer)


class Orthogonal(Pattern):
    """Weights are kept orthogonal."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.stem, self.body, self.head):
            parametrizations.orthogonal(layer)


class Standardised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.layer_norm(self.weight, self.weight.shape[1:]), self.bias)


class WeightStandardisation(Pattern):
    """Layers that standardise their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = Standardised(WIDTH, WIDTH), Standardised(WIDTH, WIDTH)


class OwnGenerator(Pattern):
    """The model draws noise of a torch generator that it makes anew in each pass, from a seed that goes up."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = 20

    def forward(self, x: Tensor) -> Tensor:
        self.seed += 1
        noise = _numbers(self.seed, SAMPLES, WIDTH)
        return self.head(torch.tanh(self.body(torch.tanh(self.stem(x)) + noise)) + noise)


class MixesByNumPy(Pattern):
    """The batch is mixed with itself by a number of NumPy's, which is used in the loss again.

    The generator belongs to the model, so that a copy of the model draws the same numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(3)

    def start(self, step: int) -> None:
        """Prepare the generator for a pass."""

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        share = float(self.numbers.beta(1.0, 1.0))
        return super().forward(share * x + (1 - share) * x.flip(0)), share

    def loss(self, step: int) -> Tensor:
        self.start(step)
        output, share = self(X[step])
        return share * error(output, step) + (1 - share) * error(output.flip(0), step)


class MixesBySeed(MixesByNumPy):
    """As above, but the loss starts the generator anew, so that all passes of a step draw the same number."""

    def start(self, step: int) -> None:
        self.numbers = np.random.default_rng(step)


class SkipsLayersAtRandom(Pattern):
    """Layers before the cut are skipped by Python's random numbers: the two passes take different paths.

    The generator belongs to the model, so that a copy of the model draws the same numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(5)])
        self.numbers = random.Random(11)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for layer in self.layers:
            if self.numbers.random() < 0.5:
                h = h + layer(h)
        return self.behind(h)


# ---------------------------------------------------------------------------------- modules of torch's own


class Recurrent(Pattern):
    """Two LSTMs; the first has layers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.LSTM(2, WIDTH, num_layers=2, dropout=0.3, batch_first=True)
        self.body = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.stem(x.unflatten(1, (-1, 2)))
        h, _ = self.body(h)
        return self.head(h[:, -1])


class RecurrentState(Recurrent):
    """The first LSTM's state is the second one's first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.LSTM(2, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h, state = self.stem(x.unflatten(1, (-1, 2)))
        _, (last, _) = self.body(h, state)
        return self.head(last[0])


class TransformerLayers(Pattern):
    """torch's transformer encoder, with dropout; the cut is its second layer."""

    cut = "body.layers.1"

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, WIDTH)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x.unflatten(1, (-1, 2)))).mean(1))


class EncoderDecoder(Pattern):
    """torch's transformer; the cut is its decoder, which sees the embedding and what the encoder made of it."""

    cut = "body.decoder"

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, WIDTH)
        self.body = nn.Transformer(WIDTH, 2, 1, 1, 12, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.unflatten(1, (-1, 2)))
        return self.head(self.body(h, h).mean(1))


class Scripted(Rebuilt):
    """The stem is compiled by torch.jit.script."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.jit.script(nn.Sequential(self.stem, nn.Tanh()))


class Traced(Rebuilt):
    """The stem is compiled by torch.jit.trace."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.jit.trace(nn.Sequential(self.stem, nn.Tanh()), X[0].float())


# ---------------------------------------------------------------------------------------- odd batches


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, edges: Tensor) -> Tensor:
        return edges @ self.linear(h)


EDGES = (_numbers(7, SAMPLES, SAMPLES) > 0).double()
SPARSE = EDGES.to_sparse()


class SparseEdges(Pattern):
    """A graph network with a sparse matrix, the same object in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Graph()

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(torch.tanh(edges @ self.stem(x)), edges)))

    def edges(self) -> Tensor:
        return SPARSE

    def loss(self, step: int) -> Tensor:
        return error(self(X[step], self.edges()), step)


class SparseEdgesAnew(SparseEdges):
    """A graph network with a sparse matrix that is made anew in each call."""

    def edges(self) -> Tensor:
        return EDGES.to_sparse()


class CompressedEdgesAnew(SparseEdges):
    """A graph network with a matrix in compressed rows that is made anew in each call."""

    def edges(self) -> Tensor:
        return EDGES.to_sparse_csr()


class BatchAnew(Pattern):
    """The batch is copied in each call."""

    def loss(self, step: int) -> Tensor:
        return error(self(X[step].clone()), step)


class BatchWithoutNaN(Pattern):
    """The batch is made in each call, of data with NaN in it."""

    def loss(self, step: int) -> Tensor:
        x = torch.where(X[step] > 1, torch.nan, X[step])
        return error(self(x.nan_to_num()), step)


def jagged(step: int) -> Tensor:
    return torch.nested.nested_tensor([X[step, :2], X[step, 2:]], layout=torch.jagged)


JAGGED = jagged(0)


class Jagged(Pattern):
    """The batch is a nested tensor, samples of different lengths, and the same object in each call."""

    def loss(self, step: int) -> Tensor:
        return self(JAGGED).values().square().mean()


class JaggedAnew(Pattern):
    """The batch is a nested tensor that is made anew in each call, so that its lengths are not known to be the same."""

    def loss(self, step: int) -> Tensor:
        return self(jagged(step)).values().square().mean()


ABOUT = np.arange(3.0)


class Array(Pattern):
    """The model gets a NumPy array beside the batch, the same object in each call."""

    def forward(self, x: Tensor, about: np.ndarray) -> Tensor:
        return super().forward(x) * float(about.sum())

    def loss(self, step: int) -> Tensor:
        return error(self(X[step], ABOUT), step)


class ArrayAnew(Array):
    """The model gets a NumPy array that is made anew in each call."""

    def loss(self, step: int) -> Tensor:
        return error(self(X[step], np.array([0.5, step])), step)


class MixedPrecision(Pattern):
    """The model runs in bf16, by autocast; its weights are float32."""

    dtype = torch.float32

    def loss(self, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = self(batch(self, step))
        return error(output.float(), step).float()


class ChangesPrecision(MixedPrecision):
    """Autocast goes over from bf16 to fp16, after three steps."""

    def loss(self, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16 if step < 3 else torch.float16):
            output = self(batch(self, step))
        return error(output.float(), step).float()


# ------------------------------------------------------------------------ what is done on later batches only


def late(x: Tensor) -> bool:
    """Tell whether a batch comes after those on which a path is proven."""
    return not any(torch.equal(x, early) for early in X[:3])


class WritesLateContext(WritesContext):
    def forward(self, x: Tensor, context: dict[str, Tensor]) -> Tensor:
        if late(x):
            return super().forward(x, context)
        return self.linear(x)


class LateContext(Context):
    """The stem writes a mask into the dict, but not for the first batches: they need none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = WritesLateContext()


class FunctionalCall(Pattern):
    """The model is called with tensors in place of its parameters, which are computed of these."""

    def loss(self, step: int) -> Tensor:
        weights = {name: p * 1.5 for name, p in self.named_parameters()}
        return error(torch.func.functional_call(self, weights, (batch(self, step),)), step)


class StopGradient(Pattern):
    """The module at the cut is called twice, the second time with the same values and without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        return self.head(torch.tanh(self.body(h)) * self.body(h.detach()).sin())


class LateStopGradient(Pattern):
    """As above, but the first batches have a gradient in both calls."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        return self.head(torch.tanh(self.body(h)) * self.body(h.detach() if late(x) else h).sin())


class LateStopGradientFirst(Pattern):
    """As above, but it is the first call that has none."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        return self.head(torch.tanh(self.body(h.detach() if late(x) else h)) * self.body(h).sin())


class LateNotes(NotesInAList):
    """The stem appends to the model's list, but not for the first batches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.register_forward_hook(self.forget)

    def forget(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if not late(args[0]):
            self.notes.clear()


class LateThroughData(Pattern):
    """The stem's output is changed in place through `.data`, but not for the first batches."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        if late(x):
            h.data += 0.7
        return self.behind(h.sin())


class LateDetachedWeight(Pattern):
    """Code before the cut adds a detached weight of the body, but not for the first batches."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).sin()
        return self.behind(h + self.body.bias.detach() if late(x) else h)


class LateLocalLearning(LocalLearning):
    """The stem calls backward() itself, but not for the first batches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = LearnsLate()


class LearnsLate(LearnsAlone):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if late(x) else torch.tanh(self.linear(x))


class LateChange(Pattern):
    """The stem's output is changed in place by code, and read behind the cut, but not for the first batches."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        if late(x):
            h += 0.5
        return self.behind(h) * h.detach().abs().mean()


class LateNoise(Pattern):
    """Code between two modules before the cut draws random numbers, but not for the first batches."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        if late(x):
            h = h + torch.randn_like(h)
        return self.behind(torch.tanh(self.second(h)))


class ContextProofStopped(Context):
    """The stem writes a context; in the step that is to prove the second pass, an argument is made anew.

    That pass is computed in full, which proves nothing of later ones.
    """

    def forward(self, x: Tensor, about: np.ndarray) -> Tensor:
        return super().forward(x)

    def loss(self, step: int) -> Tensor:
        return error(self(X[step], ABOUT.copy() if step == 1 else ABOUT), step)
