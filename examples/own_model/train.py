"""A model of your own: replace what the four methods return, and keep the last line."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dsframe


class Circles(dsframe.Task):
    """Tells whether a point lies within a distance of 1."""

    def model(self) -> nn.Module:
        """Returns the network, with its first weights."""
        return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of a micro-batch."""
        return nn.functional.cross_entropy(outputs, targets)

    def metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, dsframe.Sum]:
        """Returns sums with their counts, which are added up over all samples and processes."""
        return {"accuracy": dsframe.Sum((outputs.argmax(1) == targets).sum(), len(targets))}

    def train_data(self) -> TensorDataset:
        """Returns rows of (input, target). The same on every process: dsframe gives each its part."""
        return points(10_000, seed=0)

    def eval_data(self) -> TensorDataset:
        """Returns rows that training does not see. Leave it out if there are none."""
        return points(2_000, seed=1)


def points(count: int, seed: int) -> TensorDataset:
    """Returns points ``[count, 2]`` and classes ``[count]``."""
    found = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(found, (found.norm(dim=1) > 1).long())


if __name__ == "__main__":
    dsframe.main(Circles())
