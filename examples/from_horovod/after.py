"""The same training as a task: every line with hvd is gone, and the engine is a word in config.json."""

import torch
from model import Net, points
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import dsframe


class Sine(dsframe.Task):
    """The sine of a sum."""

    def model(self) -> torch.nn.Module:
        """Returns the network."""
        return Net()

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of a micro-batch."""
        return mse_loss(outputs, targets)

    def train_data(self) -> TensorDataset:
        """Returns the points."""
        return points()


if __name__ == "__main__":
    dsframe.main(Sine())
