"""The smallest task: a linear layer, squares, and rows of a normal distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dsframe
from dsframe.data import TensorSource


class Line(dsframe.Task):
    inputs, outputs, rows = 2, 1, 64
    """Their numbers."""

    def model(self) -> nn.Module:
        return nn.Linear(self.inputs, self.outputs)

    def loss(self, outputs: Tensor, targets: Tensor) -> Any:
        return (outputs - targets).square().mean()

    def train_data(self) -> Any:
        numbers = torch.Generator().manual_seed(0)
        sizes = (self.rows, self.inputs), (self.rows, self.outputs)
        return TensorSource(*(torch.randn(size, generator=numbers) for size in sizes))


class HeldOut(Line):
    """With an evaluation, on the same rows, where ``held_out``."""

    held_out = True

    def eval_data(self) -> Any:
        return self.train_data() if self.held_out else None
