"""Train with Lightning and sparse SAM; `diff` with train_lightning.py shows what that takes."""

import argparse

import lightning as L
import torch.nn.functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from train_plain import accuracy, digits, network

from sparsam import SAM, RandomMask
from sparsam.integrations.lightning import SAMModule, SAMMonitor


class Digits(SAMModule):
    """A small network that learns handwritten digits."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def training_step(self, batch, batch_idx):
        """Return the loss of a batch."""
        x, y = batch
        loss = F.cross_entropy(self.network(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        """Return the optimizer and its schedule."""
        base = SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        optimizer = SAM.wrap(base, rho=0.1, mask=RandomMask(0.5, interval=100), model=self)
        return [optimizer], [CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)]


def main(arguments=None):
    """Train, print the test accuracy, and return the network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=25, help="how often to go through the training data")
    parser.add_argument("--accumulate", type=int, default=2, help="over how many batches of 32 a step goes")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout; the split is fixed")
    args = parser.parse_args(arguments)

    L.seed_everything(args.seed)
    train_set, test_set = digits(train=1297, seed=0)
    module = Digits()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        callbacks=[SAMMonitor()],
    )
    trainer.fit(module, DataLoader(train_set, batch_size=32, shuffle=True))
    print(f"test accuracy {accuracy(module.network, test_set):.1f} %")
    return module.network


if __name__ == "__main__":
    main()
