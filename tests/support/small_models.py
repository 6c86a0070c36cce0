"""Small models with data and a loss, for tests that compare with brute force in float64."""

import torch
from torch import nn
from torch.nn import functional as F

from cases import task


def trained_task(**options):
    """Some steps in, so that running statistics are not 0 and 1."""
    t = task(**options)
    opt = torch.optim.SGD(t.model.parameters(), lr=0.1)
    for _ in range(5):
        t.closure(opt)()
        opt.step()
    return t


class TiedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))

    def forward(self, x):
        return torch.tanh(x @ self.weight.t()) @ self.weight


def mlp():
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return model, F.cross_entropy, torch.randn(20, 6, dtype=torch.float64), torch.randint(0, 3, (20,))


def conv():
    t = trained_task()
    return t.model, F.cross_entropy, t.x, t.y


def tied():
    x = torch.randn(9, 5, dtype=torch.float64)
    return TiedAutoencoder(), F.mse_loss, x, x


def shared():
    """One layer under two names."""
    layer = nn.Linear(5, 5).double()
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(5, 3).double())
    return model, F.cross_entropy, torch.randn(20, 5, dtype=torch.float64), torch.randint(0, 3, (20,))


def frozen():
    model, *rest = conv()
    model[0].requires_grad_(False)
    return model, *rest


def unused():
    model, *rest = mlp()
    model.register_parameter("unused", nn.Parameter(torch.ones(4, dtype=torch.float64)))
    return model, *rest


class Attention(nn.Module):
    """Through kernels that have no second derivative, unless others are chosen."""

    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(4, 12).double(), nn.Linear(4, 3).double()

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        return self.head(F.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))


def attention():
    return Attention(), F.cross_entropy, torch.randn(8, 6, 4, dtype=torch.float64), torch.randint(0, 3, (8,))


CASES = [mlp, conv, tied, shared, frozen, unused, attention]
