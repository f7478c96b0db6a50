"""Tasks of tests/features.py: a loss over the global batch with groups of its own, and a loss with further figures."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.utils.data import TensorDataset

import dsframe


def _net(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, outputs))


class Pairs(nn.Module):
    """Two encoders, whose outputs are put side by side."""

    def __init__(self):
        super().__init__()
        self.left, self.right = _net(6, 8), _net(5, 8)

    def forward(self, left, right):
        return torch.stack([normalize(self.left(left), dim=-1), normalize(self.right(right), dim=-1)], 1)


class Contrastive(dsframe.Task):
    """As CLIP: each left one belongs to one right one of the global batch. Biases have a rate of their own."""

    def model(self):
        return Pairs()

    def parameter_groups(self, model):
        return [{"match": ["*.bias"], "lr_scale": 3.0, "weight_decay": 0.0}]

    def loss(self, outputs, targets):
        left, right = self.all_rows(outputs).unbind(1)
        scores = 4.0 * left @ right.T
        truth = torch.arange(len(scores))
        return (cross_entropy(scores, truth) + cross_entropy(scores.T, truth)) / 2

    def train_data(self):
        draw = torch.Generator().manual_seed(3)
        common = torch.randn(192, 5, generator=draw)
        left = torch.cat([common, torch.randn(192, 1, generator=draw)], 1)
        return _Inputs(left, common + 0.1 * torch.randn(192, 5, generator=draw), torch.zeros(192))


class _Inputs(TensorDataset):
    """The model has two inputs."""

    def __getitem__(self, index):
        left, right, target = super().__getitem__(index)
        return (left, right), target


class Watched(dsframe.Task):
    """A loss with further figures; its evaluation no longer gets better after a while."""

    def model(self):
        return _net(6, 2)

    def loss(self, outputs, targets):
        found = mse_loss(outputs, targets)
        near = dsframe.Sum(((outputs - targets).abs() < 0.3).sum(), outputs.numel())
        return found, {"near": near, "size": dsframe.Sum(outputs.abs().sum(), outputs.numel())}

    def metrics(self, outputs, targets):
        return {"error": dsframe.Sum((outputs - targets).abs().sum(), outputs.numel())}

    def train_data(self):
        inputs = torch.randn(192, 6, generator=torch.Generator().manual_seed(3))
        return TensorDataset(inputs, torch.stack([inputs.sum(1).sin(), inputs.prod(1)], 1))

    def eval_data(self):
        return self.train_data()
