"""Train with DistributedDataParallel and sparse SAM; `diff` with train_ddp.py shows what that takes.

Start it with torchrun: `torchrun --nproc-per-node 2 examples/train_ddp_sparsam.py`.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler
from train_plain import accuracy, digits, network

from sparsam import SAM, SuffixMask


def main():
    """Train on this process' share of each batch; rank 0 prints the test accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=25, help="how often to go through the training data")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout; the split is fixed")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train_set, test_set = digits(train=1297, seed=0)
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=64 // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(network())
    torch.manual_seed(args.seed + dist.get_rank())  # each process draws its own dropout
    mask = SuffixMask(model, "4")  # from the second convolution on
    options = {"mask": mask, "perturbation": "local"}  # each replica by its own gradient: no more bytes than SGD
    optimizer = SAM(model.parameters(), SGD, rho=0.1, **options, lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = CosineAnnealingLR(optimizer, T_max=args.epochs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        schedule.step()
    if dist.get_rank() == 0:
        print(f"test accuracy {accuracy(model.module, test_set):.1f} %")


if __name__ == "__main__":
    dist.init_process_group("gloo")  # on GPUs: "nccl"
    main()
    dist.barrier()  # all end together
    dist.destroy_process_group()
