r"""Convolution, BatchNorm in eval mode, addition and ReLU as one kernel, for models that are run thousands of times.

BatchNorm with fixed statistics is a convolution's own scale and shift,

.. math::  W' = W\, \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}}, \qquad
           b' = (b - \mu)\, \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}} + \beta

and cuDNN adds the shift, a shortcut and the ReLU before anything is written to memory.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_weights

from sparsam.analysis.objective import Objective
from sparsam.passes import looked_at

RELUS = (F.relu, torch.relu, "relu", "relu_")  # functions, and methods of tensors
ADDITIONS = (operator.add, operator.iadd, torch.add)
CHANNELS = 8  # tensor cores take so many at a time: with 3, cuDNN falls back to a kernel that is six times slower
AGREEMENT = 1e-2  # of the losses with and without fusion, by bf16's rounding


def fastest(objective: Objective) -> Objective:
    """Return the objective with fused kernels where they compute the same, or else as it is.

    It is to be used under autocast, for bf16.
    """
    if objective.device.type != "cuda":
        return objective  # a CPU's convolutions gain nothing
    candidate = FusedObjective(objective)
    try:
        agrees = torch.isclose(candidate.loss(), objective.loss(), rtol=AGREEMENT)
    except RuntimeError:  # a sum of unequal shapes, say, which cuDNN does not take
        return objective
    return candidate if agrees else objective


class FusedObjective(Objective):
    """An objective whose model runs with fused kernels in bf16; its weights remain the model's own.

    Args:
        objective: Of any model. What cannot be fused runs as it is.
        dtype: For the convolutions that are fused.
    """

    def __init__(self, objective: Objective, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(objective.model, objective.loss_fn, objective.batches)
        with looked_at(self.model):
            self.module = fused(self.model, dtype) or self.model
        self.fused = [part for part in self.module.modules() if isinstance(part, Fused)]

    def loss(self) -> Tensor:
        """Return f(w) for the weights that the model has now."""
        for part in self.fused:
            part.refresh()
        return super().loss()

    def outputs(self, x: Any) -> Any:
        """Return what the model returns."""
        return self.module(x)


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
        if self.relu and x.is_cuda:
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


def fused(model: nn.Module, dtype: torch.dtype) -> fx.GraphModule | None:
    """Return a module that computes what a model in eval mode does, with its weights; None where nothing can be fused.

    The weights are taken when `refresh` of its :class:`Fused` parts is called.

    Args:
        model: In eval mode.
        dtype: For the convolutions that are fused.
    """
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return None  # they are lost in a trace
    try:
        graph = fx.symbolic_trace(model)
    except Exception:  # control flow that depends on data, and whatever else cannot be traced
        return None
    modules = dict(graph.named_modules())
    before = len(modules)
    for node in list(graph.graph.nodes):
        chain, shortcut = _chain(node, modules)
        if not chain:
            continue
        convolution, norm = (modules[str(n.target)] for n in chain[:2])
        name = f"fused_{len(modules)}"
        relu = len(chain) > 2
        modules[name] = Fused(convolution, norm, relu=relu, dtype=dtype)
        graph.add_submodule(name, modules[name])
        with graph.graph.inserting_before(chain[-1]):
            new = graph.graph.call_module(name, (chain[0].args[0], *shortcut))
        chain[-1].replace_all_uses_with(new)
        for old in reversed(chain):
            graph.graph.erase_node(old)
    if len(modules) == before:
        return None
    graph.recompile()
    return graph


def _chain(norm: fx.Node, modules: dict[str, nn.Module]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return convolution, norm[, addition][, ReLU] around a BatchNorm, and what is added; nothing where they differ."""
    convolution = norm.args[0] if norm.args and _is(norm, modules, nn.BatchNorm2d) else None
    if not isinstance(convolution, fx.Node) or not _is(convolution, modules, nn.Conv2d) or len(convolution.users) > 1:
        return [], []
    one, other = (modules[str(node.target)] for node in (convolution, norm))
    if isinstance(one.padding, str) or one.padding_mode != "zeros" or other.training or not other.track_running_stats:
        return [], []
    after = _only_user(norm)
    if after is not None and _is(after, modules, nn.ReLU, *RELUS):
        return [convolution, norm, after], []
    if after is not None and _is(after, modules, *ADDITIONS) and not after.kwargs:
        added, last = [a for a in after.args if a is not norm and isinstance(a, fx.Node)], _only_user(after)
        if added and last is not None and _is(last, modules, nn.ReLU, *RELUS):
            return [convolution, norm, after, last], added
    return [convolution, norm], []


def _is(node: fx.Node, modules: dict[str, nn.Module], *kinds: Any) -> bool:
    """Tell whether a node calls one of these functions, or a module of exactly one of these classes."""
    return (type(modules[str(node.target)]) if node.op == "call_module" else node.target) in kinds


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
