"""Train with Accelerate and SGD; `diff` with train_accelerate_sparsam.py shows what sparse SAM changes."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from train_plain import accuracy, digits, network


def main(arguments=None):
    """Train, print the test accuracy, and return the network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=25, help="how often to go through the training data")
    parser.add_argument("--accumulate", type=int, default=2, help="over how many batches of 32 a step goes")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout; the split is fixed")
    args = parser.parse_args(arguments)

    torch.manual_seed(args.seed)
    train_set, test_set = digits(train=1297, seed=0)
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(train_set, batch_size=32, shuffle=True))
    schedule = CosineAnnealingLR(optimizer, T_max=args.epochs)

    for _ in range(args.epochs):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        schedule.step()
    network_alone = accelerator.unwrap_model(model)
    print(f"test accuracy {accuracy(network_alone, test_set):.1f} %")
    return network_alone


if __name__ == "__main__":
    main()
