"""The same training as a task: everything that was about processes, batches and the optimizer is in config.json."""

import torch
from model import Net, images
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import dsframe


class Quarters(dsframe.Task):
    """Which quarter of an image is bright."""

    def model(self) -> torch.nn.Module:
        """Returns the network."""
        return Net()

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of a micro-batch."""
        return cross_entropy(outputs, targets)

    def train_data(self) -> TensorDataset:
        """Returns the images."""
        return images()


if __name__ == "__main__":
    dsframe.main(Quarters())
