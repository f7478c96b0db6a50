"""A data set in which one sample is NaN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dsframe import Task

BROKEN = 27


class OneBrokenSample(Task):
    """64 samples, 8 a step: one step of each epoch's eight has the broken one."""

    def __init__(self, broken: int = BROKEN) -> None:
        self.broken = broken

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)

    def train_data(self) -> TensorDataset:
        inputs = torch.randn(64, 5, generator=torch.Generator().manual_seed(3))
        targets = inputs.sum(1, keepdim=True)
        inputs[self.broken :, 2][:1] = torch.nan
        return TensorDataset(inputs, targets)
