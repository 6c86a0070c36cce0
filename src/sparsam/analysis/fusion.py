r"""Convolution, BatchNorm in eval mode, addition and ReLU in one kernel, for models that run thousands of times.

BatchNorm with fixed statistics is a scale and a shift of the convolution,

.. math::  W' = W\, \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}}, \qquad
           b' = (b - \mu)\, \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}} + \beta

so it can be *folded* into the convolution, and no BatchNorm is left to differentiate. Without derivatives it can also
be *fused*: cuDNN adds the shift, a shortcut and the ReLU before anything is written to memory.
"""

from __future__ import annotations

import copy
import inspect
import operator
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from sparsam.analysis.kernels import kernels

if TYPE_CHECKING:  # whose Hessian products are those of folded models
    from sparsam.analysis.objective import Objective

RELUS = (F.relu, torch.relu, "relu", "relu_")  # functions, and methods of tensors
CHANNELS = 8  # tensor cores take multiples of 8: with 3, cuDNN falls back to kernels without tensor cores
MIN_WIDTH = 32  # with 8 it takes slow ones: on an H200, 32 channels take less time, and windows the least
POINTWISE = ((0, 0), (1, 1), 1)  # padding, dilation and groups of a convolution that is a matrix product
SAME = 1e-4  # the largest relative difference of one loss computed in two ways, in float32
BF16 = 2e-2  # the same in bf16


def fastest(objective: Objective) -> FusedForward | None:
    """Return a faster forward pass of an objective's model in bf16; None if there is none that computes the same.

    Call it under autocast: what is not fused runs as before.
    """
    if objective.device.type != "cuda":
        return None  # the fused kernels are cuDNN's
    try:
        return checked(objective)
    except Exception as error:  # the model cannot be copied, traced or run so
        warnings.warn(f"convolutions are not fused, which takes longer: {error}", stacklevel=3)
        return None


def checked(objective: Objective) -> FusedForward | None:
    """Return a fused forward pass in bf16, if there is something to fuse and the first batch has the same loss.

    The loss is compared in float32, sharply, since a trace does not show that `x += h` changes an x that is used again,
    and in bf16 with cuDNN's fused kernels.
    """
    part, device = next(objective.parts()), objective.device.type
    exact, fast = (FusedForward(objective.model, dtype) for dtype in (torch.float32, torch.bfloat16))
    if not fast.fused:
        return None
    with torch.autocast(device, enabled=False), kernels():
        same = torch.isclose(part.loss(exact), part.loss(), rtol=SAME)
    with torch.autocast(device, torch.bfloat16, cache_enabled=False):
        near = torch.isclose(part.loss(fast), part.loss(), rtol=BF16)
    return fast if same & near else None


class FusedForward:
    """The forward pass of a model in eval mode, with the weights that it had at the last refresh.

    Args:
        model: Any module. It does not change.
        dtype: The type of the fused convolutions.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.module = fused(model, dtype)
        self.fused = [part for part in self.module.modules() if isinstance(part, Fused)]
        self.first = _first(self.module)
        self.refresh()

    def __call__(self, x: Any) -> Any:
        """Return the outputs of the model."""
        return self.module(x)

    def prepare(self, x: Any) -> Any:
        """Return inputs in the form of the first convolution, once for many runs; unchanged if others read them too."""
        return x if self.first is None else self.first.prepare(x)

    def refresh(self) -> None:
        """Take the weights that the model has now."""
        for part in self.fused:
            part.refresh()


class Folded(nn.Module):
    """A convolution and what follows it, differentiable in the weights of the model.

    Args:
        convolution: A layer of the model.
        batch_norm: The BatchNorm after it.
        relu: Whether a ReLU follows.
    """

    def __init__(self, convolution: nn.Conv2d, batch_norm: nn.BatchNorm2d, *, relu: bool) -> None:
        super().__init__()
        self.parts, self.relu = (convolution, batch_norm), relu  # in a tuple: not sub-modules of this one
        self.how: Any = (convolution.stride, convolution.padding, convolution.dilation, convolution.groups)

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """Return relu(batch_norm(convolution(x)) + shortcut), without what is absent."""
        weight, bias = _fold(*self.parts, _inverse_deviation(self.parts[1]))
        return self.after(F.conv2d(x, weight, bias, *self.how), shortcut)

    def after(self, h: Tensor, shortcut: Tensor | None) -> Tensor:
        """Return relu(h + shortcut), without what is absent."""
        h = h if shortcut is None else h + shortcut
        return F.relu(h) if self.relu else h


class Fused(Folded):
    """The same, faster: with the weights of the last refresh, and without derivatives.

    Args:
        convolution: A layer of the model.
        batch_norm: The BatchNorm after it. Its running statistics must not change.
        relu: Whether a ReLU follows.
        dtype: The type to compute in.
    """

    def __init__(self, convolution: nn.Conv2d, batch_norm: nn.BatchNorm2d, *, relu: bool, dtype: torch.dtype) -> None:
        super().__init__(convolution, batch_norm, relu=relu)
        stride, padding, *_ = self.how
        outputs, inputs, *kernel = convolution.weight.shape
        narrow = convolution.groups == 1 and inputs % CHANNELS
        self.windows: Callable[[Tensor], Tensor] | None = None
        if narrow and convolution.weight[0].numel() <= MIN_WIDTH and convolution.dilation == (1, 1):
            # The window of each output as the channels of a pixel: as wide as with padding, but a matrix product.
            self.windows = partial(_windows, kernel=kernel, stride=stride, padding=padding)
            inputs, kernel, self.how = convolution.weight[0].numel(), [1, 1], ((1, 1), *POINTWISE)
        width = max(MIN_WIDTH, -(-inputs // CHANNELS) * CHANNELS) if narrow else inputs
        self.pointwise = kernel == [1, 1] and self.how[1:] == POINTWISE
        self.cudnn = convolution.weight.is_cuda and dtype == torch.bfloat16
        self.dtype, self.inverse_deviation = dtype, _inverse_deviation(batch_norm)
        padded = torch.zeros(outputs, width, *kernel, dtype=dtype, device=convolution.weight.device)
        self.weight, self.bias = padded.contiguous(memory_format=torch.channels_last), padded.new_zeros(outputs)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the weights that the model has now."""
        weight, bias = _fold(*self.parts, self.inverse_deviation)
        weight = weight if self.windows is None else weight.flatten(1)[..., None, None]
        self.weight[:, : weight.shape[1]].copy_(weight)
        self.bias.copy_(bias)

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """Return relu(batch_norm(convolution(x)) + shortcut), without what is absent."""
        x = self.prepare(x)
        if self.relu and self.cudnn:
            if shortcut is None:
                return torch.cudnn_convolution_relu(x, self.weight, self.bias, *self.how)
            # torch caches cuDNN's plans without the shape of the shortcut. A plan for a whole shortcut would read
            # beyond the end of one that is to be broadcast.
            if shortcut.shape == self.shape(x):
                shortcut = shortcut.to(self.dtype).contiguous(memory_format=torch.channels_last)
                return torch.cudnn_convolution_add_relu(x, self.weight, shortcut, 1.0, self.bias, *self.how)
        with torch.autocast(x.device.type, enabled=False):
            if self.pointwise:  # a matrix product, which adds the shift too
                down, across = self.how[0]
                pixels = x.permute(0, 2, 3, 1)
                if (down, across) != (1, 1):
                    # A strided copy is faster with 16 bytes than with 2. Prepared inputs have 8 n channels.
                    shape = (*pixels.shape[:3], x.shape[1] * x.itemsize // 16)
                    wide = pixels.flatten().view(torch.complex128).view(shape)
                    pixels = wide[:, ::down, ::across].contiguous().view(self.dtype)
                h = F.linear(pixels, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)
            else:
                h = F.conv2d(x, self.weight, self.bias, *self.how)
        return self.after(h, shortcut)

    def prepare(self, x: Tensor) -> Tensor:
        """Return x in a fast type and memory format, widened or as windows. A prepared x stays as it is."""
        if self.windows is not None and x.shape[1] < self.weight.shape[1]:
            x = self.windows(x.to(self.dtype))
        x = x.to(self.dtype).contiguous(memory_format=torch.channels_last)  # first, while it has few channels
        missing = self.weight.shape[1] * self.how[3] - x.shape[1]
        return F.pad(x, (0, 0, 0, 0, 0, missing)).contiguous(memory_format=torch.channels_last) if missing else x

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the convolution's output."""
        sides = zip(x.shape[2:], self.weight.shape[2:], *self.how[:3], strict=True)
        sizes = ((n + 2 * padding - dilation * (k - 1) - 1) // stride + 1 for n, k, stride, padding, dilation in sides)
        return len(x), len(self.weight), *sizes


def _windows(x: Tensor, *, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Return the content of each window as channels. On a GPU F.unfold would do it image by image."""
    above, beside = padding
    windows = F.pad(x, (beside, beside, above, above)).unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
    return windows.permute(0, 2, 3, 1, 4, 5).flatten(3).permute(0, 3, 1, 2)


def _first(module: nn.Module) -> Fused | None:
    """Return the only part that reads the inputs of a fused module, if there is one."""
    if not isinstance(module, fx.GraphModule):
        return None
    inputs = next(node for node in module.graph.nodes if node.op == "placeholder")
    user = _only_user(inputs)
    if user is None or user.op != "call_module" or user.args != (inputs,):
        return None
    part = module.get_submodule(str(user.target))
    return part if isinstance(part, Fused) else None


def _inverse_deviation(batch_norm: nn.BatchNorm2d) -> Tensor:
    variance: Any = batch_norm.running_var
    return torch.rsqrt(variance + batch_norm.eps)


def _fold(convolution: nn.Conv2d, batch_norm: nn.BatchNorm2d, inverse_deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Return W' and b', differentiable. torch's own function returns parameters that are detached from the graph."""
    mean: Any = batch_norm.running_mean
    mean = mean if convolution.bias is None else mean - convolution.bias
    scale = inverse_deviation if batch_norm.weight is None else batch_norm.weight * inverse_deviation
    bias = -mean * scale if batch_norm.bias is None else torch.addcmul(batch_norm.bias, mean, scale, value=-1)
    return convolution.weight * scale.view(-1, 1, 1, 1), bias


def traced_and_folded(model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Return two modules that compute what a model in eval mode does: as it does, and with :class:`Folded` parts.

    Both run the model's own modules, with the weights and buffers that these hold at the time. Other attributes of the
    model, such as numbers, keep their present values. The result is None if there is nothing to fold.

    Args:
        model: Any module. It does not change.
    """
    found = _traced(model)
    if found is None or any(node.op == "get_attr" for node in found[1].nodes):
        return None  # attributes that are read without a module would keep their present values
    traced = fx.GraphModule(model, copy.deepcopy(found[1]))
    folded = _replaced(model, found[1], Folded)
    return (traced, folded) if folded and any(isinstance(part, Folded) for part in folded.modules()) else None


def fused(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a module that computes what a model does in eval mode, with :class:`Fused` parts; or the model itself.

    Args:
        model: Any module. It does not change: a copy that shares its weights is traced and run.
        dtype: The type of the fused convolutions.
    """
    traced = _traced(model)
    return (traced and _replaced(*traced, partial(Fused, dtype=dtype))) or model


def _traced(model: nn.Module) -> tuple[nn.Module, fx.Graph] | None:
    """Return a copy of a model in eval mode, which shares its weights, and its graph."""
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules()):
        return None  # a trace would lose them
    twin = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())}).eval()
    defaults = {a.name: a.default for a in inspect.signature(model.forward).parameters.values()}
    known = {name: value for name, value in defaults.items() if value is None or type(value) in (bool, int, float, str)}
    return twin, fx.Tracer().trace(twin, concrete_args=known or None)


def _replaced(model: nn.Module, graph: fx.Graph, part: Callable[..., Folded]) -> fx.GraphModule | None:
    """Return a module that runs a graph with parts in place of chains; None if that is impossible."""
    result = fx.GraphModule(model, graph)
    modules = dict(result.named_modules())
    for node in list(graph.nodes):
        chain, shortcut = _chain(node, modules)
        if not chain:
            continue
        convolution, batch_norm = (modules[str(n.target)] for n in chain[:2])
        name = f"fused_{len(modules)}"
        modules[name] = part(convolution, batch_norm, relu=len(chain) > 2)
        result.add_submodule(name, modules[name])
        with graph.inserting_before(chain[-1]):
            new = graph.call_module(name, (chain[0].args[0], *shortcut))
        chain[-1].replace_all_uses_with(new)
        for old in reversed(chain):
            graph.erase_node(old)
    if any(_in_place(node, modules) for node in graph.nodes):
        return None  # a convolution may now read its input after it was overwritten
    result.recompile()
    return result


def _chain(batch_norm: fx.Node, modules: dict[str, nn.Module]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return convolution, batch_norm[, addition][, ReLU] around a BatchNorm, and what is added. Both may be empty."""
    convolution = batch_norm.args[0] if batch_norm.args and _is(batch_norm, modules, nn.BatchNorm2d) else None
    if not isinstance(convolution, fx.Node) or not _is(convolution, modules, nn.Conv2d) or len(convolution.users) > 1:
        return [], []
    one, other = (modules[str(node.target)] for node in (convolution, batch_norm))
    unusual = isinstance(one.padding, str) or one.padding_mode != "zeros" or not convolution.args
    if unusual or other.training or other.running_mean is None:
        return [], []
    after = _only_user(batch_norm)
    if after is not None and _is(after, modules, nn.ReLU, *RELUS):
        return [convolution, batch_norm, after], []
    last = None if after is None else _only_user(after)
    if after is None or last is None or not _is(last, modules, nn.ReLU, *RELUS):
        return [convolution, batch_norm], []
    added = [a for a in after.args if a is not batch_norm]
    adds = _is(after, modules, operator.add, torch.add) and len(after.args) == 2 and not after.kwargs
    if adds and len(added) == 1 and isinstance(added[0], fx.Node):
        return [convolution, batch_norm, after, last], [added[0]]
    return [convolution, batch_norm], []


def _is(node: fx.Node, modules: dict[str, nn.Module], *targets: Any) -> bool:
    """Tell whether a node calls one of these functions, or a module of exactly one of these classes."""
    return (type(modules[str(node.target)]) if node.op == "call_module" else node.target) in targets


def _in_place(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Tell whether a node may write into a tensor that others read."""
    source = next(iter(node.args), None)
    if isinstance(source, fx.Node) and _is(source, modules, *FRESH) and len(source.users) == 1:
        return False
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    functional = getattr(node.target, "__module__", "") == F.__name__ and any(a is True for a in node.args)
    named = node.kwargs.get("inplace") is True or "out" in node.kwargs
    return functional or named or (name.endswith("_") and not name.endswith("__"))


FRESH = (Folded, Fused, nn.Linear, nn.Conv2d, nn.BatchNorm2d, operator.add, operator.mul, torch.add, torch.mul)
"""Their outputs share no memory with anything."""


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
