"""Sequences with padding, of which some are nothing else: a loss whose mean is over another number in every micro-batch."""

from functools import partial

import torch
from torch import nn

from dsframe import Task
from dsframe.data import TensorSource

CLASSES, TIME, PADDING = 3, 6, -100


class Unweighted(Task):
    """As one would write it first."""

    def layers(self):
        return [
            lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh()),
            lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()),
            partial(nn.Linear, 16, CLASSES),
        ]

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING)

    def train_data(self):
        return sequences(64, 1)

    def eval_data(self):
        return sequences(21, 2)


class Padded(Unweighted):
    """With what the loss is a mean over."""

    def loss_weight(self, targets):
        return (targets != PADDING).sum()


class Gathering(Unweighted):
    """A loss over the rows of all ranks."""

    def loss(self, outputs, targets):
        return super().loss(self.all_rows(outputs), self.all_rows(targets))


def sequences(count, seed):
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, TIME, 4, generator=draw)
    targets = inputs[..., :CLASSES].argmax(-1)
    lengths = torch.randint(0, TIME + 1, (count, 1), generator=draw) * torch.randint(0, 2, (count, 1), generator=draw)
    return TensorSource(inputs, targets.masked_fill(torch.arange(TIME) >= lengths, PADDING))
