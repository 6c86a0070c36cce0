"""Initial weights of the paper's networks."""

from __future__ import annotations

from torch import nn


def initialise(model: nn.Module) -> None:
    """Draw convolutions from He et al.'s normal distribution; linear layers and BatchNorm keep torch's defaults."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
