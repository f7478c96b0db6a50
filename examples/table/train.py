"""A network on a table: numbers in columns, of which the last one is to be predicted."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dsframe

FILE, HELD_OUT = "table.csv", 5  # every fifth row is for evaluation


class Table(dsframe.Task):
    """Predicts the last column from the others."""

    def __init__(self) -> None:
        self.rows = torch.from_numpy(np.loadtxt(FILE, delimiter=",", skiprows=1, dtype=np.float32))
        self.held_out = torch.arange(len(self.rows)) % HELD_OUT == 0

    def model(self) -> nn.Module:
        """Returns a network of two layers that scales its inputs itself."""
        columns = self.rows.shape[1] - 1
        return nn.Sequential(nn.BatchNorm1d(columns), nn.Linear(columns, 64), nn.ReLU(), nn.Linear(64, 1))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean squared error of a micro-batch."""
        return nn.functional.mse_loss(outputs, targets)

    def metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, dsframe.Sum]:
        """Returns the mean absolute error."""
        return {"error": dsframe.Sum((outputs - targets).abs().sum(), len(targets))}

    def train_data(self) -> TensorDataset:
        """Returns the rows that are not held out: ``[rows, columns - 1]`` and ``[rows, 1]``."""
        return split(self.rows[~self.held_out])

    def eval_data(self) -> TensorDataset:
        """Returns the held-out rows."""
        return split(self.rows[self.held_out])


def split(rows: torch.Tensor) -> TensorDataset:
    """Returns inputs and targets of the rows."""
    return TensorDataset(rows[:, :-1], rows[:, -1:])


if __name__ == "__main__":
    dsframe.main(Table())
