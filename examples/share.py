"""Train a small network with SAM on a share of each batch; `diff` with train_plain.py shows what that takes."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from sparsam import SAM


def digits(train, seed):
    """Return `train` training samples of scikit-learn's 1,797 digits (8 x 8 pixels) and the rest for testing."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    x = (torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1)[order]
    y = torch.tensor(data.target)[order]
    return TensorDataset(x[:train], y[:train]), TensorDataset(x[train:], y[train:])


def network():
    """Return two convolutions with BatchNorm, dropout and a linear layer: 6,138 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(128, 10),
    )


def train_step(model, optimizer, x, y):
    """Take one step on a batch; return the loss."""

    def closure(rows):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows(x)), rows(y))
        loss.backward()
        return loss

    return optimizer.step(closure)


def accuracy(model, dataset):
    """Return the percentage of the data that the model, in eval mode, gets right."""
    x, y = dataset.tensors
    model.eval()
    with torch.no_grad():
        return 100 * (model(x).argmax(1) == y).double().mean().item()


def main():
    """Train, and print the test accuracy after the last epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=25, help="how often to go through the training data")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout; the split is fixed")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train_set, test_set = digits(train=1297, seed=0)
    loader = DataLoader(train_set, batch_size=64, shuffle=True)
    model = network()
    optimizer = SAM(model.parameters(), SGD, rho=0.2, share=1 / 8, model=model, lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = CosineAnnealingLR(optimizer, T_max=args.epochs)

    for epoch in range(1, args.epochs + 1):
        model.train()
        loss = sum(train_step(model, optimizer, x, y).item() for x, y in loader) / len(loader)
        schedule.step()
        if epoch % 5 == 0:
            print(f"epoch {epoch:3d}   training loss {loss:.4f}   test accuracy {accuracy(model, test_set):.1f} %")
    print(f"test accuracy {accuracy(model, test_set):.1f} %")


if __name__ == "__main__":
    main()
