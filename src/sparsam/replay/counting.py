r"""What a step costs from each cut, counted and not timed: the same on every machine and under every load.

Torch's own formulas count the floating-point operations F of matrix products and convolutions, forward and backward.
They leave out what normalisation, activations and sums take, which is bound by memory. It is proportional to the
number E of elements that the counted operations read and write, since what surrounds them goes over the same tensors.
So the work of a pass is F + c E. A step of the base optimizer reads and writes b numbers for each of W weights, and
perturbing p. From a cut whose suffix does F', E' and has W' weights, a sharpness-aware step costs, in base steps,

.. math::  1 + \frac{F' + c\,(E' + p\,W')}{F + c\,(E + b\,W)}

c = 2000, b = 8 and p = 7 were chosen so that the cost agrees with the step times of ResNet-18 and WRN-28-10 in
`results/ssam-c` (H200, bf16, batch 128, CUDA graph). It is within 0.04 of them, and 0.03 short from the head on, where
starting kernels takes longest. FLOPs alone are off by 0.09 and 0.10 from the first stage on, because early layers have
few FLOPs and large activations. F' has the gradient of the cut's input, which the first pass leaves out. On other
devices c is another number: `sparsam cuts` shows both costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from sparsam.checks import check_module
from sparsam.distributed.shards import fsdp_modules
from sparsam.errors import UserValueError
from sparsam.inventory import is_compiled
from sparsam.passes import model_arguments, naming_inputs, preserve_state
from sparsam.replay.autograd_graph import tensors_in
from sparsam.replay.cuts import Found, parameters_after, spans_after, weight_count
from sparsam.replay.modules import unwrap

ELEMENT = 2000  # c: the FLOPs that take as long as to read or write an element
STEPPING = 8  # b: elements that the base optimizer's step reads and writes for each weight
PERTURBING = 7  # p: those that perturbing along the gradient and restoring do


class Work(NamedTuple):
    """What was computed."""

    flops: int = 0
    """Floating-point operations of matrix products and convolutions."""
    elements: int = 0
    """Elements that these products and convolutions have read and written."""

    def minus(self, other: Work) -> Work:
        """Return what was computed since."""
        return Work(self.flops - other.flops, self.elements - other.elements)


class CountedCut(NamedTuple):
    """The input of a module, and how much follows it."""

    name: str
    """The name of the module."""
    weights: float
    """The fraction of the trained weights that are used after the cut and nowhere before."""
    after: Work
    """The work of forward and backward that follows the cut."""
    sure: bool = True
    """Whether it is a cut whatever outputs the loss uses."""
    before: Work = Work()
    """The work of the forward pass before the cut."""


class Counts(NamedTuple):
    """What a pass of a model computes, in all and after each cut."""

    whole: Work
    """The work of forward and backward."""
    weights: int
    """The number of trained weights."""
    cuts: list[CountedCut]
    """All cuts, the earliest first."""
    after: dict[str, frozenset[Tensor]]
    """As in :class:`~.cuts.Found`: the parameters after each cut, and by the name "" all that are used."""

    @property
    def everything(self) -> CountedCut:
        """The whole pass as what follows a cut without a name."""
        return CountedCut("", 1.0, self.whole)

    def lies_before(self, cut: str) -> dict[Tensor, bool]:
        """Return of each parameter that the pass has used whether it lies before a cut."""
        return {p: p not in self.after[cut] for p in self.after[""]}

    def costs(self, perturbing: int = PERTURBING) -> dict[CountedCut, float]:
        """Return what a sharpness-aware step costs from each cut, in base steps.

        Args:
            perturbing: How many elements perturbing reads and writes for each weight.
        """
        return {cut: self.cost(cut, perturbing) for cut in self.cuts}

    def cost(self, cut: CountedCut, perturbing: int = PERTURBING) -> float:
        """Return what a sharpness-aware step costs from a cut, in base steps."""
        return 1 + self._in_base_steps(cut.after, perturbing * round(cut.weights * self.weights))

    def proofs(self, cut: CountedCut, *, distributed: bool) -> tuple[float, float]:
        """Return the extra costs of the first two sharpness-aware steps from a cut, in base steps: they prove the cut.

        The first step runs two whole passes, and a pass that ends at the cut. The second step runs a whole pass beside
        the pass from the cut. In a DistributedDataParallel each runs one more whole pass.
        """
        passes = 2 if distributed else 1
        second = passes * self._in_base_steps(self.whole)
        return second + self._in_base_steps(cut.before), second

    def skipped(self, cut: CountedCut) -> float:
        """Return what a step from a cut leaves out of its second pass, in base steps."""
        return self._in_base_steps(self.whole.minus(cut.after))

    def _in_base_steps(self, work: Work, further_elements: int = 0) -> float:
        return _weighed(work, further_elements) / _weighed(self.whole, STEPPING * self.weights)


def count_costs(
    model: nn.Module, example_inputs: Any, params: Iterable[Tensor] | None = None, *, cuts: bool = True
) -> Counts:
    """Count what a step of a model takes, in all and after each of its cuts.

    The model runs twice, forward and backward, in the mode it is in and from a fixed seed. Buffers, gradients, random
    numbers, modes and weights are afterwards what they were.

    Args:
        model: The network.
        example_inputs: A batch as in training: `model(example_inputs)` is called (`model(*example_inputs)` for a tuple
            or a list, `model(**example_inputs)` for a dict).
        params: Those that are trained, if they require a gradient; None: all of the model's. A pass computes the
            gradients of the others too.
        cuts: Whether to look for cuts. If not, the model runs once.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> counts = count_costs(model, torch.ones(3, 4))
    >>> counts.whole.flops  # 2 · 3 · (4 · 8 · 2 + 8 · 2 · 3): the batch needs no gradient
    672
    >>> [(cut.name, cut.after.flops) for cut in counts.cuts]
    [('0', 672), ('2', 288)]
    """
    check_module("model", model, optional=False)
    network = unwrap(model)

    def run() -> None:
        _seed(network)
        rule = "example_inputs must be what the model is called with in training, without targets"
        with naming_inputs(rule, example_inputs):
            _run(network, example_inputs)

    with _same_everywhere(network):
        hidden = any(is_compiled(module) and network in set(module.modules()) for module in model.modules())
        with preserve_state(network):
            nothing = Found({"": frozenset()}, frozenset())
            found = parameters_after(network, run) if cuts and not hidden else nothing
        counter = _Counter()
        with preserve_state(network), counter:
            spans = spans_after(network, [name for name in found.after if name], run, lambda: counter.work)
    start, end = spans[""]
    trained = {p for p in (network.parameters() if params is None else params) if p.requires_grad}
    weights = weight_count(trained)
    inside = trained.intersection(network.parameters())
    outside = trained - inside if inside else set()  # those of a loss, say: SAM perturbs them from every cut on
    counted = []
    for name, after in found.after.items():
        if name:
            called, arrived = spans[name]
            share = weight_count((after & trained) | outside) / max(1, weights)
            sure, before = name not in found.unsure, called.minus(start)
            counted.append(CountedCut(name, share, arrived.minus(called), sure, before))
    return Counts(end.minus(start), weights, counted, found.after)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is computed while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            with self:  # in inference mode, what consists of other operations arrives in one piece
                result = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if result is NotImplemented else result
        result = func(*args, **kwargs)
        flops = self.work.flops + int(formula(*args, **kwargs, out_val=result))
        self.work = Work(flops, self.work.elements + sum(t.numel() for t in tensors_in(args, kwargs, result)))
        return result


def _run(model: nn.Module, inputs: Any) -> None:
    """Run one pass, forward and backward, that leaves no gradient."""
    params = [p for p in model.parameters() if p.requires_grad]
    # The first layer may change its input in place.
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), model_arguments(inputs))
    with torch.enable_grad():
        outputs = [t for t in tensors_in(model(*args, **kwargs)) if t.requires_grad]
        if not outputs:
            raise UserValueError("model must have an output that depends on a parameter that requires a gradient")
        # Not of their sum: an output that no loss uses, such as a cache, would lead past every cut.
        ones = [torch.ones_like(t) for t in outputs]
        if fsdp_modules(model.modules()):  # what the graph leads to are the gathered parameters
            grads = [(p, p.grad) for p in params]
            for p in params:
                p.grad = None
            try:
                torch.autograd.backward(outputs, ones)
            finally:
                for p, grad in grads:
                    p.grad = grad
        else:
            torch.autograd.grad(outputs, params, ones, allow_unused=True)


def _seed(model: nn.Module) -> None:
    """Let random numbers, which may skip layers, start where they always do."""
    torch.default_generator.manual_seed(0)
    for device in {p.device for p in model.parameters()}:
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(0)
        elif device.type not in ("cpu", "meta"):
            torch.get_device_module(device).manual_seed(0)


@contextmanager
def _same_everywhere(model: nn.Module) -> Iterator[None]:
    """Take attention and recurrent layers apart into products: devices have operations of their own for the whole."""
    libraries: Any = torch.backends.cudnn, torch.backends.mkldnn
    enabled = [library.enabled for library in libraries]
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    try:
        for library in libraries:
            library.enabled = library.enabled and not recurrent
        with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for library, before in zip(libraries, enabled, strict=True):
            library.enabled = before


def _weighed(work: Work, further_elements: int) -> int:
    return work.flops + ELEMENT * (work.elements + further_elements)
