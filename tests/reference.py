"""What sparsam computes, written slowly: float64, loops over single weights, no foreach, no masks classes.

The network is torch's (its gradients are not what is being checked); everything that an optimizer does with
a gradient is spelled out here from the paper's formulas. Parameters are lists of flat Python-indexable
float64 vectors in the optimizer's order; a mask is a list of bool lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import nn

Vector = np.ndarray


class Reference:
    """SGD with momentum and weight decay, SAM, ASAM, F-SAM, Momentum-SAM and SSAM on a float64 model."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, int], torch.Tensor],
        *,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float | Callable[[torch.Tensor], float] = 0.0,
        rho: float | None = None,
        adaptive: bool = False,
        mask: Callable[[Reference], list[Vector]] | None = None,
        clip: float | None = None,
        order: list[int] | None = None,
        momentum_rho: float = 0.0,
        friendly: tuple[float, float] | None = None,
        share: float | None = None,
    ) -> None:
        self.model, self.loss = model, loss
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.rho, self.adaptive, self.mask, self.clip = rho, adaptive, mask, clip
        self.momentum_rho, self.friendly, self.share = momentum_rho, friendly, share
        self.mean: list[Vector | None] = []  # F-SAM's m, tensor by tensor
        params = [p for p in model.parameters() if p.requires_grad]
        self.params = params if order is None else [params[i] for i in order]
        self.velocity = [np.zeros(p.numel()) for p in self.params]
        self.step_count = 0
        self.m: list[Vector] | None = None

    def step(self, micro_batches: int = 1, ascent_batches: int | None = None) -> float:
        """Take one step, rho None meaning the base optimizer, at w or along the momentum; return the loss there.

        The gradient is the mean over micro-batches, at w only over the first `ascent_batches` of them. With a share,
        batch 0 is that share and batch 1 is the rest, whose gradient at w is added.
        """
        w = [self.read(p) for p in self.params]
        if self.rho is None and self.momentum_rho:
            for p, values in zip(self.params, self.ahead(w), strict=True):
                self.write(p, values)
        random_state = torch.get_rng_state()
        value, g = self.gradient(ascent_batches or micro_batches)
        self.g = g
        if self.rho is not None:
            after_first = torch.get_rng_state()
            statistics = {k: b.clone() for k, b in self.model.named_buffers()}
            self.m = self.mask(self) if self.mask else [np.ones(len(v), dtype=bool) for v in w]
            d = self.direction(g)
            for p, values in zip(self.params, self.perturbed(w, d, self.m), strict=True):
                self.write(p, values)
            torch.set_rng_state(random_state)
            _, g = self.gradient(micro_batches)
            torch.set_rng_state(after_first)
            for k, b in self.model.named_buffers():
                b.copy_(statistics[k])
            if self.share is not None:
                for p, values in zip(self.params, w, strict=True):
                    self.write(p, values)
                of_rest, g_rest = self.gradient(1, first=1)
                value = self.share * value + (1 - self.share) * of_rest
                g = [self.share * gs + (1 - self.share) * gr for gs, gr in zip(g, g_rest, strict=True)]
        self.descend(w, g)
        return value

    def descend(self, w: list[Vector], g: list[Vector]) -> None:
        """Take the step of SGD from w, with a gradient from elsewhere."""
        for p, values, gradient, v in zip(self.params, w, g, self.velocity, strict=True):
            decay = self.weight_decay(p) if callable(self.weight_decay) else self.weight_decay
            for i in range(len(values)):
                v[i] = self.momentum * v[i] + gradient[i] + decay * values[i]
            self.write(p, np.array([values[i] - self.lr * v[i] for i in range(len(values))]))
        self.step_count += 1

    def direction(self, g: list[Vector]) -> list[Vector]:
        """Return g, or F-SAM's d = g - sigma m, after which m <- decay m + (1 - decay) g; at first d = g and m = g."""
        if self.friendly is None:
            return g
        sigma, decay = self.friendly
        means = self.mean or [None] * len(g)
        d = [gt if mt is None else gt - sigma * mt for gt, mt in zip(g, means, strict=True)]
        if all(np.isfinite(gt).all() for gt in g):
            self.mean = [gt if mt is None else decay * mt + (1 - decay) * gt for gt, mt in zip(g, means, strict=True)]
        return d

    def ahead(self, w: list[Vector]) -> list[Vector]:
        """Return w - momentum_rho v / |v|, or w - momentum_rho w² v / ||w| v|: ascent along -v."""
        one = [np.ones(len(v), dtype=bool) for v in w]
        return self.perturbed(w, [-v for v in self.velocity], one, self.momentum_rho)

    def perturbed(self, w: list[Vector], g: list[Vector], m: list[Vector], rho: float | None = None) -> list[Vector]:
        """Return w + eps: rho g / |g| m, or rho w² g / ||w| g| m."""
        rho = self.rho if rho is None else rho
        square = 0.0
        for wt, gt in zip(w, g, strict=True):
            for wi, gi in zip(wt, gt, strict=True):
                square += (abs(wi) * gi) ** 2 if self.adaptive else gi**2
        norm = math.sqrt(square)
        result = []
        for wt, gt, mt in zip(w, g, m, strict=True):
            new = np.array(wt)
            for i in range(len(wt)):
                if mt[i] and norm > 0 and math.isfinite(norm):
                    direction = wt[i] ** 2 * gt[i] if self.adaptive else gt[i]
                    new[i] = wt[i] + rho * direction / norm
            result.append(new)
        return result

    def gradient(self, micro_batches: int, first: int = 0) -> tuple[float, list[Vector]]:
        """Return the loss, a mean over micro-batches, and its gradient, clipped if asked for."""
        total, g = 0.0, [np.zeros(p.numel()) for p in self.params]
        for k in range(first, first + micro_batches):
            loss = self.loss(self.model, k) / micro_batches
            grads = torch.autograd.grad(loss, self.params, allow_unused=True)
            total += loss.item()
            for t, gradient in enumerate(grads):
                if gradient is not None:
                    g[t] += gradient.detach().reshape(-1).numpy()
        if self.clip is not None:
            norm = math.sqrt(sum(float(gi) ** 2 for gt in g for gi in gt))
            g = [gt * min(1.0, self.clip / (norm + 1e-6)) for gt in g]
        return total, g

    @staticmethod
    def read(p: torch.Tensor) -> Vector:
        return p.detach().reshape(-1).numpy().copy()

    @staticmethod
    def write(p: torch.Tensor, values: Vector) -> None:
        with torch.no_grad():
            p.copy_(torch.from_numpy(values).view(p.shape))


class SuffixReference(Reference):
    """Knows no gradient before the cut: d is zero there, and its norm that of the suffix."""

    def __init__(self, model: nn.Module, *arguments, suffix: list[Vector], **options) -> None:
        super().__init__(model, *arguments, **options)
        self.suffix = suffix
        self.mask = self.mask or (lambda reference: suffix)

    def direction(self, g: list[Vector]) -> list[Vector]:
        return [np.where(inside, d, 0.0) for d, inside in zip(super().direction(g), self.suffix, strict=True)]


def local_step(replicas: list[Reference]) -> None:
    """Perturb each replica by its own gradient, with its own norm; step all by the mean of the gradients there.

    The mask is that of the first replica. F-SAM's mean is each replica's own.
    """
    w = [[r.read(p) for p in r.params] for r in replicas]
    for r in replicas:
        _, r.g = r.gradient(1)
    m = replicas[0].mask(replicas[0]) if replicas[0].mask else [np.ones(len(v), dtype=bool) for v in w[0]]
    gradients = []
    for r, values in zip(replicas, w, strict=True):
        r.m = m
        for p, moved in zip(r.params, r.perturbed(values, r.direction(r.g), m), strict=True):
            r.write(p, moved)
        gradient = r.gradient(1)[1]
        if r.share is not None:
            for p, at_w in zip(r.params, values, strict=True):
                r.write(p, at_w)
            rest = r.gradient(1, first=1)[1]
            gradient = [r.share * gs + (1 - r.share) * gr for gs, gr in zip(gradient, rest, strict=True)]
        gradients.append(gradient)
    mean = [sum(parts) / len(replicas) for parts in zip(*gradients, strict=True)]
    for r, values in zip(replicas, w, strict=True):
        r.descend(values, mean)


def check_step(reference: Reference, model: nn.Module, step: Callable[[], torch.Tensor], seed: int) -> None:
    """Take a step of each with the same random numbers; refuse losses, weights or statistics that differ."""
    torch.manual_seed(seed)
    loss = step().item()
    torch.manual_seed(seed)
    assert math.isclose(loss, reference.step(), rel_tol=1e-12)
    for a, b in zip(model.state_dict().values(), reference.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def suffix_masks(model: nn.Module, cut: int) -> list[Vector]:
    """Return the mask of a Sequential's parameters from the module with this number on."""
    return [np.full(p.numel(), int(name.split(".")[0]) >= cut) for name, p in model.named_parameters()]


def count(total: int, sparsity: float) -> int:
    return round((1 - sparsity) * total)


def ranked(scores: list[float]) -> list[int]:
    """Return indices from the largest to the smallest score, of equal ones the lower index first."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def split(flat: list[bool], sizes: list[int]) -> list[Vector]:
    cuts = np.cumsum([0, *sizes])
    return [np.array(flat[a:b], dtype=bool) for a, b in pairwise(cuts)]


def top_k(scores: list[Vector], sparsity: float) -> list[Vector]:
    """Return the k = round((1 - s) |w|) largest over all tensors together."""
    flat = [float(v) for tensor in scores for v in tensor]
    chosen = set(ranked(flat)[: count(len(flat), sparsity)])
    return split([i in chosen for i in range(len(flat))], [len(t) for t in scores])


def drop_and_grow(
    m: list[Vector],
    g: list[Vector],
    *,
    sparsity: float,
    drop: float,
    t: int,
    total_steps: int,
    growth: list[float],
    drop_order: list[float],
) -> list[Vector]:
    """Return the SSAM-D update of m: drop the first N by `drop_order`, grow the first N by `growth`."""
    before = [bool(b) for tensor in m for b in tensor]
    size = len(before)
    decay = drop / 2 * (1 + math.cos(math.pi * t / total_steps)) if t < total_steps else 0.0
    number = min(round(decay * (1 - sparsity) * size), size - count(size, sparsity))
    active = [i for i in ranked(drop_order) if before[i]]
    idle = [i for i in ranked(growth) if not before[i]]
    after = set(active[number:]) | set(idle[:number])
    return split([i in after for i in range(size)], [len(tensor) for tensor in m])


def fisher(model: nn.Module, loss_fn: Callable, x: torch.Tensor, y: torch.Tensor) -> list[Vector]:
    """Return the mean over samples of the squared gradient of each sample's loss, BatchNorm in eval mode."""
    params = [p for p in model.parameters() if p.requires_grad]
    was_training = model.training
    model.eval()
    total = [np.zeros(p.numel()) for p in params]
    for i in range(len(x)):
        for t, g in enumerate(sample_gradient(model, loss_fn, params, x[i], y[i])):
            total[t] += g**2 / len(x)
    model.train(was_training)
    return total


def signs_fisher(
    model: nn.Module, loss_fn: Callable, x: torch.Tensor, y: torch.Tensor, signs: list[int], chunk: int
) -> list[Vector]:
    """Return the mean over samples of the squared signed sums of gradients, chunk by chunk."""
    params = [p for p in model.parameters() if p.requires_grad]
    was_training = model.training
    model.eval()
    total = [np.zeros(p.numel()) for p in params]
    for start in range(0, len(x), chunk):
        signed = [np.zeros(p.numel()) for p in params]
        for i in range(start, min(start + chunk, len(x))):
            for t, g in enumerate(sample_gradient(model, loss_fn, params, x[i], y[i])):
                signed[t] += signs[i] * g
        for t, g in enumerate(signed):
            total[t] += g**2 / len(x)
    model.train(was_training)
    return total


def sample_gradient(model, loss_fn, params, x, y) -> list[Vector]:
    loss = loss_fn(model(x[None]), y[None])
    return [g.detach().reshape(-1).numpy().copy() for g in torch.autograd.grad(loss, params)]
