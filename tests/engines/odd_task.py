"""A model with everything that makes moving state hard: odd sizes, a frozen parameter, buffers, a shared weight."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dsframe import Task


class Network(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(7, width)
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, 3)
        self.again = self.middle  # the same parameters under a second name
        self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, inputs):
        if self.training:
            self.seen += len(inputs)
        hidden = torch.tanh(self.first(inputs))
        hidden = torch.tanh(self.middle(hidden))
        hidden = torch.tanh(self.again(hidden))
        return self.last(nn.functional.dropout(hidden, 0.1, self.training)) * self.scale


class Start(nn.Module):
    """What the network does first: it counts. The buffer stays the network's own."""

    def __init__(self, network):
        super().__init__()
        self.register_buffer("seen", network.seen)

    def forward(self, inputs):
        if self.training:
            self.seen += len(inputs)
        return inputs


class Hidden(nn.Module):
    """One or two of the network's dense layers."""

    def __init__(self, *inner):
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, inputs):
        for layer in self.inner:
            inputs = torch.tanh(layer(inputs))
        return inputs


class Last(nn.Module):
    """What the network does last."""

    def __init__(self, network):
        super().__init__()
        self.last, self.scale = network.last, network.scale
        self.register_buffer("scratch", network.scratch, persistent=False)

    def forward(self, hidden):
        return self.last(nn.functional.dropout(hidden, 0.1, self.training)) * self.scale


class Odd(Task):
    def __init__(self, width=19):
        self.width = width

    def model(self):
        return Network(self.width)

    def cut(self, model):
        return [Start(model), Hidden(model.first), Hidden(model.middle, model.again), Last(model)]

    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)

    def train_data(self):
        generator = torch.Generator().manual_seed(self.seed)
        inputs = torch.randn(64, 7, generator=generator)
        return TensorDataset(inputs, torch.sin(inputs[:, :3]))
