"""A task with one mistake, FAULT, in the code of its user."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dsframe import Hooks, RunView, Task


def fails(where: str) -> None:
    if os.environ["FAULT"] == where:
        raise ValueError(f"a mistake in {where}")


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        fails("model")
        self.layer = nn.Linear(4, 1)

    def forward(self, rows: Tensor) -> Tensor:
        fails("forward" if self.training else "evaluation")
        return self.layer(rows)


class InHook(Hooks):
    def on_step(self, run: RunView) -> None:
        fails("hook")


class FaultyTask(Task):
    """Trains a line."""

    hooks = (InHook(),)

    def model(self) -> nn.Module:
        return Line()

    def train_data(self) -> TensorDataset:
        fails("data")
        return TensorDataset(torch.ones(64, 4), torch.ones(64, 1))

    def eval_data(self) -> TensorDataset:
        return TensorDataset(torch.ones(8, 4), torch.ones(8, 1))

    def loss(self, outputs: Tensor, targets: Tensor) -> Any:
        errors = (outputs - targets).square()
        other = {"vector": errors, "nothing": None, "number": 1.0, "detached": errors.mean().detach()}
        return other.get(os.environ["FAULT"], errors.mean())

    def metrics(self, outputs: Tensor, targets: Tensor) -> Any:
        fails("metrics")
        return super().metrics(outputs, targets)

    def after_step(self, name: str, weight: Tensor) -> None:
        fails("after_step")
