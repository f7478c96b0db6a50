"""A model with BatchNorm, whose evaluation tells by whose statistics it was made."""

import torch
from torch import nn

from dsframe import Sum, Task
from dsframe.data import TensorSource


class Normed(Task):
    """A small network on rows of eight numbers, and their mean square as the target."""

    def model(self):
        # A bias before BatchNorm has a gradient of nothing but rounding, which Adam makes as large as any.
        return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)

    def metrics(self, outputs, targets):
        return {"loss": Sum(((outputs - targets) ** 2).sum(), targets.numel())}

    def train_data(self):
        return rows(96, 1)

    def eval_data(self):
        return rows(41, 2)


def rows(count, seed):
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=draw) * torch.linspace(0.5, 3, count)[:, None]
    return TensorSource(inputs, inputs.square().mean(1, keepdim=True))
