"""Train one small network with SGD, SAM and two kinds of sparse SAM, and compare them in a table.

The data are scikit-learn's digits, made harder so that the methods differ: 500 images to train on, of which 20 % carry
a wrong label, 300 to choose settings on, 997 to test on. All methods share the network, the batches, the learning
rate, the weight decay and the number of epochs.
"""

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from train_plain import accuracy, digits, network

from sparsam import SAM, DenseMask, DynamicMask, FisherMask

TRAIN, VALIDATION, WRONG_LABELS, BATCH = 500, 300, 0.2, 50
METHODS = ("SGD", "SAM", "SSAM-F", "SSAM-D")
BASE = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
RHO = {"SAM": 0.2, "SSAM-F": 0.2, "SSAM-D": 0.2}
RISE_RHO = 0.1  # one radius for all methods, to compare them


def load():
    """Return the training data with their wrong labels, and the validation and test data, the same at every call."""
    train_set, rest = digits(TRAIN, seed=0)
    x, y = train_set.tensors
    generator = torch.Generator().manual_seed(1)
    wrong = torch.randperm(TRAIN, generator=generator)[: round(WRONG_LABELS * TRAIN)]
    y[wrong] = (y[wrong] + torch.randint(1, 10, wrong.shape, generator=generator)) % 10
    validation, test = (TensorDataset(*(t[part] for t in rest.tensors)) for part in
                        (slice(VALIDATION), slice(VALIDATION, None)))
    return TensorDataset(x, y), validation, test


def make_optimizer(method, model, train_set, seed, epochs, rho=None, base=BASE):
    """Return SGD, or SAM around SGD with the mask that the method's name stands for."""
    if method == "SGD":
        return SGD(model.parameters(), **base)
    epoch = TRAIN // BATCH  # steps; both sparse masks are made anew after each
    mask = {
        "SAM": DenseMask(),
        "SSAM-F": FisherMask(0.5, model, F.cross_entropy, train_set, interval=epoch, seed=seed),
        "SSAM-D": DynamicMask(0.5, interval=epoch, total_steps=epochs * epoch, seed=seed),
    }[method]
    return SAM(model.parameters(), SGD, rho=rho or RHO[method], mask=mask, model=model, **base)


def train(method, train_set, seed, epochs, report=None, **kw):
    torch.manual_seed(seed)
    loader = DataLoader(train_set, batch_size=BATCH, shuffle=True)
    model = network()
    optimizer = make_optimizer(method, model, train_set, seed, epochs, **kw)
    schedule = CosineAnnealingLR(optimizer, T_max=epochs)
    for epoch in range(1, epochs + 1):
        model.train()
        for x, y in loader:
            def closure():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss
            optimizer.step(closure)
        schedule.step()
    return model

def loss_rise(model, dataset, rho=RISE_RHO):
    x, y = dataset.tensors
    model.eval()
    weights = list(model.parameters())
    loss = F.cross_entropy(model(x), y)
    gradient = torch.autograd.grad(loss, weights)
    norm = torch.stack([g.norm() for g in gradient]).norm()
    with torch.no_grad():
        for w, g in zip(weights, gradient, strict=True):
            w += rho * g / norm
        return (F.cross_entropy(model(x), y) - loss).item(), loss.item()
