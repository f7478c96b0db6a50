"""A data set in which one sample is NaN."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dsframe import Task

BROKEN = 27


class OneBrokenSample(Task):
    """64 samples, 8 a step: one step of each epoch's eight has the broken one."""

    def __init__(self, broken=BROKEN):
        self.broken = broken

    def model(self):
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)

    def train_data(self):
        inputs = torch.randn(64, 5, generator=torch.Generator().manual_seed(3))
        targets = inputs.sum(1, keepdim=True)
        inputs[self.broken :, 2][:1] = torch.nan
        return TensorDataset(inputs, targets)
