"""The smallest task: a linear layer, squares, and rows of a normal distribution."""

import torch
from torch import nn

import dsframe
from dsframe.data import TensorSource


class Line(dsframe.Task):
    inputs, outputs, rows = 2, 1, 64
    """Their numbers."""

    def model(self):
        return nn.Linear(self.inputs, self.outputs)

    def loss(self, outputs, targets):
        return (outputs - targets).square().mean()

    def train_data(self):
        numbers = torch.Generator().manual_seed(0)
        sizes = (self.rows, self.inputs), (self.rows, self.outputs)
        return TensorSource(*(torch.randn(size, generator=numbers) for size in sizes))


class HeldOut(Line):
    """With an evaluation, on the same rows, where ``held_out``."""

    held_out = True

    def eval_data(self):
        return self.train_data() if self.held_out else None
