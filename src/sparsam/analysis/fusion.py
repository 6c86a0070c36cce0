r"""Convolution, BatchNorm in eval mode, addition and ReLU as one kernel, for models that are run thousands of times.

BatchNorm with fixed statistics is a convolution's own scale and shift,

.. math::  W' = W\, \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}}, \qquad
           b' = (b - \mu)\, \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}} + \beta

and cuDNN adds the shift, a shortcut and the ReLU before anything is written to memory.
"""

from __future__ import annotations

import copy
import inspect
import operator
import warnings
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_weights

from sparsam.analysis.kernels import kernels
from sparsam.analysis.objective import Objective

RELUS = (F.relu, torch.relu, "relu", "relu_")  # functions, and methods of tensors
CHANNELS = 8  # tensor cores take so many at a time: with 3, cuDNN falls back to kernels without them
SAME = 1e-4  # the relative difference of two losses in float32 that are the same function
BF16 = 2e-2  # and of one in bf16


def fastest(objective: Objective) -> FusedForward | None:
    """Return a faster forward pass of an objective's model in bf16; None where there is none that computes the same.

    What it does not fuse runs as it is, so it is to be called under autocast.
    """
    if objective.device.type != "cuda":
        return None  # the fused kernels are cuDNN's
    try:
        return checked(objective)
    except Exception as error:  # what cannot be copied, traced, or run so: there is the model itself
        warnings.warn(f"convolutions are not fused, which takes longer: {error}", stacklevel=3)
        return None


def checked(objective: Objective) -> FusedForward | None:
    """Return a fused forward pass in bf16, if there is something to fuse and the first batch has the same loss.

    That is seen in float32, sharply, since a trace does not show that `x += h` changes an x that is used again; and in
    bf16, with cuDNN's fused kernels.
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
    """x -> what a model in eval mode returns for it, with the model's own weights at the time of the last refresh.

    Args:
        model: Any module; nothing of it changes.
        dtype: For the convolutions that are fused.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.module = fused(model, dtype)
        self.fused = [part for part in self.module.modules() if isinstance(part, Fused)]
        self.refresh()

    def __call__(self, x: Any) -> Any:
        """Run it."""
        return self.module(x)

    def refresh(self) -> None:
        """Take the weights that the model has now."""
        for part in self.fused:
            part.refresh()


class Fused(nn.Module):
    """A convolution and what follows it.

    Args:
        convolution: Of the model.
        norm: The BatchNorm behind it.
        relu: Whether a ReLU follows.
        dtype: To compute in.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, convolution: nn.Conv2d, norm: nn.BatchNorm2d, *, relu: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts, self.relu, self.dtype = (convolution, norm), relu, dtype  # in a tuple: the model's, not of this one
        self.how: Any = (convolution.stride, convolution.padding, convolution.dilation, convolution.groups)
        self.missing = -convolution.in_channels % CHANNELS if convolution.groups == 1 else 0
        self.pointwise = convolution.kernel_size == (1, 1) and self.how[1:] == ((0, 0), (1, 1), 1)
        self.cudnn = convolution.weight.is_cuda and dtype == torch.bfloat16

    def refresh(self) -> None:
        """Take the weights that the model has now."""
        convolution, norm = self.parts
        weight, bias = fuse_conv_bn_weights(
            convolution.weight,
            convolution.bias,
            norm.running_mean,  # type: ignore[arg-type]
            norm.running_var,  # type: ignore[arg-type]
            norm.eps,
            norm.weight,
            norm.bias,
        )
        padded = F.pad(weight.detach(), (0, 0, 0, 0, 0, self.missing))
        self.weight = padded.to(self.dtype).contiguous(memory_format=torch.channels_last)
        self.bias = bias.detach().to(self.dtype)

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """Return relu(norm(convolution(x)) + shortcut), as far as these are there."""
        x = F.pad(x.to(self.dtype), (0, 0, 0, 0, 0, self.missing)) if self.missing else x.to(self.dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        if self.relu and self.cudnn:
            if shortcut is None:
                return torch.cudnn_convolution_relu(x, self.weight, self.bias, *self.how)
            shortcut = shortcut.to(self.dtype).contiguous(memory_format=torch.channels_last)
            return torch.cudnn_convolution_add_relu(x, self.weight, shortcut, 1.0, self.bias, *self.how)
        with torch.autocast(x.device.type, enabled=False):
            if self.pointwise:  # a matrix product, which can add the shift on its way
                down, across = self.how[0]
                pixels = x.permute(0, 2, 3, 1)[:, ::down, ::across]
                h = F.linear(pixels, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)
            else:
                h = F.conv2d(x, self.weight, self.bias, *self.how)
        h = h if shortcut is None else h + shortcut
        return F.relu(h) if self.relu else h


def fused(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a module that computes what a model does in eval mode, with :class:`Fused` parts; or the model itself.

    Args:
        model: Nothing of it changes: a copy is traced, which shares its weights.
        dtype: For the convolutions that are fused.
    """
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules()):
        return model  # what they do is lost in a trace
    twin = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())}).eval()
    defaults = {a.name: a.default for a in inspect.signature(model.forward).parameters.values()}
    known = {name: value for name, value in defaults.items() if value is None or type(value) in (bool, int, float, str)}
    graph = fx.Tracer().trace(twin, concrete_args=known or None)
    result = fx.GraphModule(twin, graph)
    modules = dict(result.named_modules())
    for node in list(graph.nodes):
        chain, shortcut = _chain(node, modules)
        if not chain:
            continue
        convolution, norm = (modules[str(n.target)] for n in chain[:2])
        name = f"fused_{len(modules)}"
        modules[name] = Fused(convolution, norm, relu=len(chain) > 2, dtype=dtype)
        result.add_submodule(name, modules[name])
        with graph.inserting_before(chain[-1]):
            new = graph.call_module(name, (chain[0].args[0], *shortcut))
        chain[-1].replace_all_uses_with(new)
        for old in reversed(chain):
            graph.erase_node(old)
    if any(_in_place(node, modules) for node in graph.nodes):
        return model  # a fused convolution may read its input later than the convolution did
    result.recompile()
    return result


def _chain(norm: fx.Node, modules: dict[str, nn.Module]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return convolution, norm[, addition][, ReLU] around a BatchNorm, and what is added; nothing where they differ."""
    convolution = norm.args[0] if norm.args and _is(norm, modules, nn.BatchNorm2d) else None
    if not isinstance(convolution, fx.Node) or not _is(convolution, modules, nn.Conv2d) or len(convolution.users) > 1:
        return [], []
    one, other = (modules[str(node.target)] for node in (convolution, norm))
    unusual = isinstance(one.padding, str) or one.padding_mode != "zeros" or not convolution.args
    if unusual or other.training or other.running_mean is None:
        return [], []
    after = _only_user(norm)
    if after is not None and _is(after, modules, nn.ReLU, *RELUS):
        return [convolution, norm, after], []
    last = None if after is None else _only_user(after)
    if after is None or last is None or not _is(last, modules, nn.ReLU, *RELUS):
        return [convolution, norm], []
    added = [a for a in after.args if a is not norm]
    adds = _is(after, modules, operator.add, torch.add) and len(after.args) == 2 and not after.kwargs
    if adds and len(added) == 1 and isinstance(added[0], fx.Node):
        return [convolution, norm, after, last], [added[0]]
    return [convolution, norm], []


def _is(node: fx.Node, modules: dict[str, nn.Module], *kinds: Any) -> bool:
    """Tell whether a node calls one of these functions, or a module of exactly one of these classes."""
    return (type(modules[str(node.target)]) if node.op == "call_module" else node.target) in kinds


def _in_place(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Tell whether a node writes, or may write, into what others read too."""
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


FRESH = (Fused, nn.Linear, nn.Conv2d, nn.BatchNorm2d, operator.add, operator.mul, torch.add, torch.mul)
"""Whose outputs share no memory with anything."""


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
