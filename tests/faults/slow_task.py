"""Tasks whose steps take a while, so that something can happen to them."""

import os
import time

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from dsframe import Task


class SlowTask(Task):
    """Trains a line; the order of its samples shows in the losses.

    A step takes ``STEP_SECONDS``. The looks at the loss, some 40 around the first step, take no time.
    """

    def model(self):
        return nn.Linear(4, 1)

    def train_data(self):
        points = torch.randn(512, 4, generator=torch.Generator().manual_seed(1))
        return TensorDataset(points, points.sum(1, keepdim=True))

    def loss(self, outputs, targets):
        if not self.context.evaluating:
            time.sleep(float(os.environ.get("STEP_SECONDS", "0.05")))
        return nn.functional.mse_loss(outputs, targets)


class ReadingTask(SlowTask):
    """Workers read its samples one by one."""

    workers = 2

    def train_data(self):
        return Subset(super().train_data(), range(512))


class GrowingTask(SlowTask):
    """Keeps 16 MiB more in each step."""

    def __init__(self):
        self.kept = []

    def loss(self, outputs, targets):
        self.kept.append(torch.ones(1 << 22))
        return super().loss(outputs, targets)
