"""A task with one mistake, FAULT, in the code of its user."""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dsframe import Hooks, Task


def fails(where):
    if os.environ["FAULT"] == where:
        raise ValueError(f"a mistake in {where}")


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        fails("model")
        self.layer = nn.Linear(4, 1)

    def forward(self, rows):
        fails("forward" if self.training else "evaluation")
        return self.layer(rows)


class InHook(Hooks):
    def on_step(self, run):
        fails("hook")


class FaultyTask(Task):
    """Trains a line."""

    hooks = (InHook(),)

    def model(self):
        return Line()

    def train_data(self):
        fails("data")
        return TensorDataset(torch.ones(64, 4), torch.ones(64, 1))

    def eval_data(self):
        return TensorDataset(torch.ones(8, 4), torch.ones(8, 1))

    def loss(self, outputs, targets):
        errors = (outputs - targets).square()
        return errors if os.environ["FAULT"] == "vector" else errors.mean()

    def metrics(self, outputs, targets):
        fails("metrics")
        return super().metrics(outputs, targets)

    def after_step(self, name, weight):
        fails("after_step")
