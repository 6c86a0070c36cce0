"""Train with FSDP2 and SGD; `diff` with train_fsdp_sparsam.py shows what sparse SAM changes.

Start it with torchrun: `torchrun --nproc-per-node 2 examples/train_fsdp.py`, on GPUs with `--device cuda`.
"""

import argparse

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from train_plain import accuracy, digits, network


def main():
    """Train on this process' share of each batch; rank 0 prints the test accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=25, help="how often to go through the training data")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout; the split is fixed")
    parser.add_argument("--device", default="cpu", help="cpu, where processes talk by gloo, or cuda, by NCCL")
    parser.add_argument("--save", help="a folder for the checkpoint after the last epoch")
    args = parser.parse_args()

    dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))  # takes the GPU of this process' number
    torch.manual_seed(args.seed)
    train_set, test_set = (
        TensorDataset(*(tensor.to(args.device) for tensor in part.tensors)) for part in digits(train=1297, seed=0)
    )
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=64 // dist.get_world_size(), sampler=sampler)
    model = network()
    torch.manual_seed(args.seed + dist.get_rank())  # each process draws its own dropout
    for layer in (model[0], model[4], model[10]):  # both convolutions and the linear layer; the rest with the model
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = CosineAnnealingLR(optimizer, T_max=args.epochs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        schedule.step()
    if args.save:
        optimizer_state = get_optimizer_state_dict(model, optimizer)
        dcp.save({"model": get_model_state_dict(model), "optimizer": optimizer_state}, checkpoint_id=args.save)
    correct = accuracy(model, test_set)  # in every process: a forward pass gathers the weights
    if dist.get_rank() == 0:
        print(f"test accuracy {correct:.1f} %")


if __name__ == "__main__":
    main()
    dist.barrier()  # all end together
    dist.destroy_process_group()
