"""The exact Hessian, its eigenvalues and moments, and scipy's answer."""

from __future__ import annotations

import copy

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsam.analysis.hessian import (
    weights_of,
)
from sparsam.analysis.objective import Objective


def objective_of(case, **options):
    model, loss_fn, x, y = case()
    return Objective(model, loss_fn, (x, y), **options)


def exact_hessian(model, loss_fn, x, y):
    """The whole matrix, from torch.func on one flat vector of the trainable weights."""
    model = copy.deepcopy(model).eval()
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(flat):
        pieces = torch.split(flat, [p.numel() for p in params.values()])
        weights = {name: piece.view_as(p) for (name, p), piece in zip(params.items(), pieces, strict=True)}
        return loss_fn(functional_call(model, weights, (x,)), y)

    with sdpa_kernel(SDPBackend.MATH):
        flat = torch.cat([p.flatten() for p in params.values()])
        return torch.func.hessian(loss)(flat).detach()


def descending(matrix):
    return torch.linalg.eigvalsh(matrix).flip(0).numpy()


def eigsh_of(objective, k):
    """scipy's answer, from the products alone."""
    n, like = weights_of(objective), objective.params

    def product(v):
        pieces = torch.split(torch.from_numpy(v).to(like[0].dtype).flatten(), [p.numel() for p in like])
        products = objective.hessian_product([piece.view_as(p) for piece, p in zip(pieces, like, strict=True)])
        return torch.cat([p.flatten() for p in products]).double().numpy()

    operator = LinearOperator((n, n), matvec=product, dtype=np.float64)
    start = torch.randn(n, generator=torch.Generator().manual_seed(9)).double().numpy()
    return np.sort(eigsh(operator, k=k, which="LA", v0=start, return_eigenvectors=False))[::-1]


def moments(matrix, powers=(1, 2, 3)):
    return [torch.trace(torch.linalg.matrix_power(matrix, p)).item() / len(matrix) for p in powers]
