"""What both programs train: it stays as it is."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    """A small convolutional network for images ``[batch, 1, 16, 16]`` and four classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten())
        self.head = nn.Linear(8 * 4 * 4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the classes' scores, ``[batch, 4]``."""
        scores: torch.Tensor = self.head(self.features(inputs))
        return scores


def images() -> TensorDataset:
    """Returns 1,280 images with one bright quarter, and which one it is."""
    draw = torch.Generator().manual_seed(0)
    which = torch.randint(4, (1280,), generator=draw)
    pictures = torch.rand(1280, 1, 16, 16, generator=draw)
    for number, quarter in enumerate(which.tolist()):
        top, left = 8 * (quarter // 2), 8 * (quarter % 2)
        pictures[number, 0, top : top + 8, left : left + 8] += 0.5
    return TensorDataset(pictures, which)
