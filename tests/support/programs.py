"""Random programs to cut: small modules, and a forward of random lines over them. Each is drawn from one integer.

A program is Python source, so that a test can show the one that failed. Nothing here knows how replay works: the tables
hold whatever people write in a `forward`.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from textwrap import indent
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZE = 6  # of each value, which is a square: it can be transposed
STEPS = 5
LARGEST = 50.0  # gradient of a program that is taken: rounding grows with it

# --------------------------------------------------------------------------------------------------------- parts


class Drawer(dict[str, Tensor]):
    """Values that a forward leaves in an attribute. They stay there between passes; a copy of the model has none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Drawer:
        return Drawer()


class Block(nn.Module):
    """What most parts are: a layer and a drawer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drawer = nn.Linear(SIZE, SIZE), Drawer()

    def forward(self, h: Tensor) -> Any:
        return torch.tanh(self.layer(h))


class Residual(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, h: Tensor) -> Tensor:
        return h + super().forward(self.norm(h))


class Task(Block):
    def forward(self, h: Tensor, sign: int = 1) -> Tensor:
        return super().forward(sign * h)


class Pair(Block):
    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(h), h.mean(0)


class Named(Block):
    def forward(self, h: Tensor) -> dict[str, Tensor]:
        return {"h": super().forward(h), "gate": (h > 0).to(h.dtype)}


class Appends(Block):
    def forward(self, h: Tensor, notes: list[Tensor]) -> Tensor:
        out = super().forward(h)
        notes.append(out.mean(0))
        return out


class Changes(Block):
    def forward(self, context: dict[str, Tensor]) -> dict[str, Tensor]:
        context["h"] = super().forward(context["h"])
        return context


class Tells(Block):
    def forward(self, h: Tensor, context: dict[str, Tensor]) -> Tensor:
        context["told"] = h.detach().mean(0).tanh()
        return super().forward(h)


class Keeps(Block):
    def forward(self, h: Tensor) -> Tensor:
        self.drawer["h"] = super().forward(h)
        return self.drawer["h"] * 2


class Counts(Block):
    """Moves a buffer, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(SIZE))
        self.mean: Tensor

    def forward(self, h: Tensor) -> Tensor:
        self.mean = self.mean.lerp(h.detach().mean(0), 0.1)
        return super().forward(h - self.mean)


class Silent(Block):
    """Looks at its layer without a gradient."""

    @torch.no_grad()
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h)


class Part(NamedTuple):
    """How a part is built and called: {n} is the new value's name, {p} the part, {v} its input."""

    build: Callable[[], nn.Module]
    calls: tuple[str, ...] = ("{n} = {p}({v})",)
    often: int = 1


PARTS: dict[str, Part] = {
    "Linear": Part(lambda: nn.Linear(SIZE, SIZE), often=5),
    "Residual": Part(Residual, often=5),
    "Norm": Part(lambda: nn.LayerNorm(SIZE), often=5),
    "BatchNorm": Part(lambda: nn.BatchNorm1d(SIZE), often=5),
    "Dropout": Part(lambda: nn.Dropout(0.2), often=5),
    "InPlace": Part(lambda: nn.ReLU(inplace=True)),
    "Chain": Part(lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(inplace=True), Residual()), often=5),
    "Task": Part(Task, ("{n} = {p}({v})", "{n} = {p}({v}, sign=-1)", "{n} = {p}({v}) - {p}({v}, sign=-1)")),
    "Pair": Part(Pair, ("{n} = {p}({v})[0]", "{n} = sum({p}({v}))")),
    "Named": Part(Named, ('{n} = {p}({v})["h"]', '{n} = {p}({v})\n{n}["h"] = {n}["h"] * 2\n{n} = {n}["h"] * {n}["gate"]')),
    "Appends": Part(Appends, ("{n} = {p}({v}, notes)",)),
    "Changes": Part(Changes, ('context["h"] = {v}\n{p}(context)\n{n} = context["h"]', '{n} = {p}({{"h": {v}}})["h"]')),
    "Tells": Part(Tells, ("{n} = {p}({v}, context)",)),
    "Keeps": Part(Keeps, ("{n} = {p}({v})", '{n} = {p}({v}) + {p}.drawer["h"].T')),
    "Counts": Part(Counts),
    "Silent": Part(Silent, ("{n} = {p}({v})", "{n} = {p}({v}) + {v}")),
}  # fmt: skip


# --------------------------------------------------------------------------------------------------------- lines


@dataclass
class Draw:
    """What the next line can use."""

    random: Random
    parts: dict[str, str]  # kinds by name
    lines: list[Callable[[Draw], str]]
    reach: int  # how far back a line looks for its values
    values: list[str] = field(default_factory=lambda: ["v0"])
    kept: list[str] = field(default_factory=list)  # what the model's drawer holds for certain
    names: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def value(self) -> str:
        """Choose a value: mostly one of the last, so that a program is deep."""
        return self.random.choice(self.values[-self.random.choice([1, 1, self.reach]) :])

    def new(self) -> str:
        """Name a new value."""
        self.values.append(f"v{next(self.names)}")
        return self.values[-1]

    def layer(self) -> str:
        """Choose a layer whose weight is used without calling it."""
        return self.random.choice(
            [p if kind == "Linear" else f"{p}.layer" for p, kind in self.parts.items() if kind in ("Linear", "Task")]
            or ["head"]
        )

    def line(self) -> str:
        """Draw an instruction: one line, or a few."""
        return self.random.choices(self.lines, [LINES[line] for line in self.lines])[0](self)


def expression(template: str) -> Callable[[Draw], str]:
    """A new value from others, {a} and {b}."""

    def write(d: Draw) -> str:
        text = template.format(a=d.value(), b=d.value(), layer=f"self.{d.layer()}")
        return f"{d.new()} = {text}"

    return write


def statement(template: str) -> Callable[[Draw], str]:
    """A change of a value {a}, perhaps by another, {b}."""
    return lambda d: template.format(a=d.value(), b=d.value())


def call(d: Draw) -> str:
    """A call of a part."""
    name = d.random.choice(list(d.parts))
    template = d.random.choice(PARTS[d.parts[name]].calls)
    value = d.value()
    return template.format(n=d.new(), p=f"self.{name}", v=value)


def block(*headers: str) -> Callable[[Draw], str]:
    """An instruction that is run on some conditions only, or differently."""

    def write(d: Draw) -> str:
        header, otherwise = d.random.choice(headers).format(a=d.value()), d.value()
        values, kept = list(d.values), list(d.kept)
        inside, result = d.line(), d.values[-1]
        d.values, d.kept = values, kept  # what is new inside is not known outside
        name = d.new()
        inside = indent(f"{inside}\n{name} = {result}", "    ")
        return f"{name} = {otherwise}\n{header}\n{inside}"

    return write


def keep(d: Draw) -> str:
    """A value is kept in an attribute."""
    d.kept.append(f"k{len(d.kept)}")
    return f'self.drawer["{d.kept[-1]}"] = {d.value()}'


def use_kept(d: Draw) -> str:
    """A kept value is used."""
    if not d.kept:
        return keep(d)
    value, key = d.value(), d.random.choice(d.kept)
    return f'{d.new()} = {value} + 0.5 * self.drawer["{key}"]'


LINES: dict[Callable[[Draw], str], int] = {
    call: 16,
    expression("{a} + {b}"): 4,
    expression("{a} * {b}.sigmoid()"): 2,
    expression("torch.tanh({a})"): 2,
    expression("{a}.T"): 1,
    expression("torch.cat({a}.chunk(2, 1)[::-1], 1)"): 1,
    expression("torch.cat([{a}[:, :2], {b}[:, 2:]], 1)"): 1,
    expression("{a}.detach()"): 1,
    expression("{a} + {b}.detach()"): 1,
    expression("F.dropout({a}, 0.2)"): 1,
    expression("{a} + 0.1 * torch.randn_like({a})"): 1,
    # parameters and buffers of the model itself
    expression("{a} * self.scale"): 2,
    expression("{a} + self.shift"): 1,
    expression("{a} * self.scale.detach()"): 1,
    expression("{a} - self.mean"): 1,
    expression("F.linear({a}, {layer}.weight)"): 1,
    statement("self.mean = self.mean.lerp({a}.detach().mean(0), 0.1)"): 1,
    # values of which no gradient tells
    expression("{a} * ({b}.detach().mean(1, keepdim=True) > 0)"): 1,
    expression("torch.where({b} > 0, {a}, 0.5 * {a})"): 1,
    expression("{a} * {b}.mean().tanh().item()"): 1,
    expression("{a}.roll(int({b}[0].argmax()), 1)"): 1,
    expression("{a} * (1 + context['told'])"): 1,
    # in place
    statement("{a} += 0.5 * {b}"): 2,
    statement("{a}.mul_(1.5)"): 1,
    statement("{a}.relu_()"): 1,
    statement("{a}.data.mul_(1.5)"): 1,
    statement("{a}.detach().add_(0.2)"): 1,
    # what stays
    keep: 1,
    use_kept: 3,
    statement("notes.append({a}.mean(0))"): 1,
    # control flow
    block("with torch.no_grad():"): 1,
    block("if odd:", "if not odd:", "if {a}.sum() > 0:"): 2,
    block("if x.sum() > 0:"): 4,  # on late batches only, for half of the seeds
    block("for _ in range(2 if odd else 1):"): 1,
}


# ------------------------------------------------------------------------------------------------------ programs


class Program(nn.Module):
    """A model whose forward is drawn.

    Args:
        kinds: Its parts, by name; "Same p1" is another name of a part, "Tied p1" shares its weight.
        source: Of the forward.
    """

    def __init__(self, kinds: dict[str, str], source: str) -> None:
        super().__init__()
        for name, kind in kinds.items():
            what, _, other = kind.partition(" ")
            part = self.get_submodule(other) if what == "Same" else PARTS["Linear" if other else kind].build()
            if what == "Tied":
                part.weight = self.get_submodule(other).weight
            self.add_module(name, part)
        self.head = nn.Linear(SIZE, 2)
        self.scale, self.shift = nn.Parameter(torch.rand(SIZE) + 0.5), nn.Parameter(torch.randn(SIZE))
        self.register_buffer("mean", torch.zeros(SIZE))
        self.drawer = Drawer()
        namespace: dict[str, Any] = {"torch": torch, "F": F}
        exec(source, namespace)
        self._forward = namespace["forward"]
        self.double()

    def forward(self, x: Tensor, odd: bool) -> tuple[Tensor, list[Tensor]]:
        return self._forward(self, x, odd)


@dataclass
class Case:
    """A program, where it is cut, and its batches."""

    kinds: dict[str, str]
    source: str
    seed: int
    cut: str = ""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.batches = torch.randn(STEPS, SIZE, SIZE, generator=generator, dtype=torch.float64)
        if self.seed % 2:  # a branch on x.sum() > 0 is first taken in a late step
            self.batches = self.batches[self.batches.sum((1, 2)).argsort()]
        self.targets = torch.randn(STEPS, SIZE, 2, generator=generator, dtype=torch.float64)

    def __str__(self) -> str:
        parts = ", ".join(f"{name}: {kind}" for name, kind in self.kinds.items())
        return f"seed {self.seed}, cut at {self.cut!r}\n{parts}\n{self.source}"

    def build(self) -> Program:
        """Build the model."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return Program(self.kinds, self.source)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """Return the loss in a step: of the output, of what was appended, of what stays in the drawer."""
        # One more argument is one more path to prove: a program that does not use it is not given it.
        used = "odd:" in self.source or "odd else" in self.source
        out, notes = model(self.batches[step], odd=used and step % 2 == 1)
        extra = [*notes, *(t for key, t in model.drawer.items() if key == "loss")]
        return (out.tanh() - self.targets[step]).square().mean() + sum(0.3 * t.tanh().square().mean() for t in extra)


def draw(seed: int) -> Case:
    """Draw a program that torch itself can run forward and backward on every batch."""
    for attempt in itertools.count():
        random = Random(f"{seed} {attempt}")
        kinds = _draw_parts(random)
        case = Case(kinds, _draw_source(random, kinds), seed)
        called = _called(case)
        if len(called) >= 4:
            parts = [name for name in called[1:] if "." not in name]  # before the first there is nothing
            case.cut = random.choice(parts if random.random() < 0.8 else called[1:])
            return case
    raise AssertionError


def _draw_parts(random: Random) -> dict[str, str]:
    kinds: dict[str, str] = {}
    for k in range(random.randint(4, 10)):
        kind = random.choices(list(PARTS), [part.often for part in PARTS.values()])[0]
        if k > 1 and random.random() < 0.15:
            kind = f"Same {random.choice(list(kinds))}"
        linear = [name for name, other in kinds.items() if other == "Linear"]
        if linear and random.random() < 0.1:
            kind = f"Tied {random.choice(linear)}"
        kinds[f"p{k}"] = kind
    return kinds


def _draw_source(random: Random, kinds: dict[str, str]) -> str:
    # Each program knows some instructions only: what always comes together is not told apart.
    known = [line for line in LINES if line is call or random.random() < 0.4]
    d = Draw(random, {name: _kind(kinds, name) for name in kinds}, known, random.choice([1, 1, 1, 3, 20]))
    lines = [d.line() for _ in range(random.randint(6, 14))]
    if random.random() < 0.15:
        lines.append(f'self.drawer["loss"] = {random.choice(d.values)}')
    body = ["notes, context = [], {'told': torch.zeros(())}", "v0 = x.clone()", *lines]
    body.append(f"return self.head({d.values[-1]} + {d.value()}), notes")
    return "def forward(self, x, odd):\n" + indent("\n".join(body), "    ")


def _kind(kinds: dict[str, str], name: str) -> str:
    what, _, other = kinds[name].partition(" ")
    return "Linear" if what == "Tied" else _kind(kinds, other) if other else what


def _called(case: Case) -> list[str]:
    """Return the names of the modules that a program calls, in order; none if torch refuses it, or its gradients are large."""
    model = case.build()
    called: dict[str, None] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            module.register_forward_pre_hook(lambda module, args, name=name: called.setdefault(name))
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(STEPS):
            model.zero_grad()
            try:
                case.loss(model, step).backward()
            except RuntimeError:  # of autograd, mostly: changed in place
                return []
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            if not all(bool(g.isfinite().all()) and float(g.abs().max()) < LARGEST for g in grads):
                return []
    return list(called)


# ------------------------------------------------------------------------------------------------------- witness


class Witness:
    """Stands between an optimizer, or the oracle, and a program's loss; sees which modules each pass calls.

    Args:
        case: The program.
        model: The model that is trained. Others are the oracle's copies.
    """

    def __init__(self, case: Case, model: Program) -> None:
        self.case, self.model = case, model
        self.calls: list[list[str]] = []  # of modules, in each pass of the model
        self.buffers: dict[int, list[Tensor]] = {}  # at the start of a step
        self.expected: dict[int, list[Tensor]] = {}  # after the oracle's first pass of a step
        names = {module: name for name, module in model.named_modules()}

        def note(module: nn.Module, args: Any, output: Any) -> None:  # a function: copies of the model share it
            if module in names:
                self.calls[-1].append(names[module])

        for module in names:
            module.register_forward_hook(note)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """Return the loss, and take notes."""
        self._last = step, torch.get_rng_state(), {name: t.clone() for name, t in model.state_dict().items()}
        if model is self.model:
            self.calls.append([])
            self.buffers.setdefault(step, _buffers(model))
            return self.case.loss(model, step)
        loss = self.case.loss(model, step)
        self.expected.setdefault(step, _buffers(model))
        return loss

    @property
    def saved(self) -> int:
        """How many calls of modules the second pass of the last step has left out."""
        first, second = self.calls[-2:]
        return len(first) - len(second)

    def refused_by_torch(self) -> bool:
        """Tell whether a plain pass fails where the last pass did: programs that branch are not seen through."""
        model, (step, random, state) = self.case.build(), self._last
        model.load_state_dict(state)
        with torch.random.fork_rng():
            torch.set_rng_state(random)
            try:
                self.case.loss(model, step).backward()
            except RuntimeError:
                return True
        return False

    @property
    def wrong_buffers(self) -> float:
        """How far buffers were from those that the oracle's first pass leaves."""
        started = {**self.buffers, max(self.buffers) + 1: _buffers(self.model)}
        pairs = [(a, b) for step, left in self.expected.items() for a, b in zip(started[step + 1], left, strict=True)]
        return max(float((a - b).abs().max()) for a, b in pairs)


def _buffers(model: nn.Module) -> list[Tensor]:
    return [buffer.detach().clone().double() for buffer in model.buffers()]
