"""A user's own task whose ranks call other modules than each other, in the way HOW says, from step FROM on; "changing": all ranks
call others in each step."""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dsframe import Task
from dsframe.cluster import world
from dsframe.run_dir.outcome import reporter

WIDTH = 16


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.how, self.begins = os.environ["HOW"], int(os.environ.get("FROM", "1"))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.large = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs))
        rank = world.here().rank if reporter().step >= self.begins - 1 else 0
        if self.how == "sizes" and rank:
            hidden = self.large(hidden)
        elif self.how == "skips" and rank:
            pass
        elif self.how == "unused":
            both = [branch(hidden) for branch in self.branches[:2]]
            hidden = both[rank] if self.training else both[0]
        elif self.how == "changing":
            hidden = self.branches[reporter().step % 3](hidden)
        elif self.how == "evaluation":
            hidden = self.branches[0 if self.training else rank](hidden)
        else:
            hidden = self.branches[rank](hidden)
        return self.last(hidden)


class BranchingTask(Task):
    """Trains a line."""

    def model(self):
        return Branching()

    def train_data(self):
        points = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))
        return TensorDataset(points, points.sum(1, keepdim=True))

    def eval_data(self):
        return self.train_data() if os.environ["HOW"] == "evaluation" else None

    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)
