"""A user's own task that is not the same on every rank, in the way DIFFERS says."""

import os

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dsframe import Task


class Heads(nn.Module):
    """A linear layer per name, added up."""

    def __init__(self, names):
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(4, 1) for name in names})

    def forward(self, inputs):
        return torch.stack([head(inputs) for head in self.heads.values()]).sum(0)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Noise from the system, not from the generators that dsframe seeds: other values at each reading."""

    def __init__(self, *, long=False):
        self.random, self.long = np.random.default_rng(), long

    def __len__(self):
        return 64

    def __getitem__(self, index):
        target = torch.ones(1, dtype=torch.int64) if self.long else torch.ones(1)
        return torch.from_numpy(self.random.normal(size=4)).float(), target


class DifferingTask(Task):
    def __init__(self):
        rank = int(next(os.environ[name] for name in ("RANK", "HOROVOD_RANK") if name in os.environ))
        self.how = os.environ["DIFFERS"]
        self.odd = rank == 1

    def model(self):
        names = [f"head{number}" for number in range(8)]
        if self.how == "names from a set":
            names = list(set(names))
        model = nn.Sequential(nn.Linear(4, 4), Heads(names))
        if self.odd and self.how == "shape":
            model[1].heads["head2"] = nn.Linear(4, 2)
        if self.odd and self.how == "frozen":
            model[1].heads["head2"].weight.requires_grad_(False)
        if self.odd and self.how == "more":
            model.append(nn.Linear(1, 1))
        if self.odd and self.how == "buffer":
            model.register_buffer("scale", torch.ones(3))
        if self.how == "tie":
            model[1].heads["head1"].weight = model[1].heads["head0"].weight
            if self.odd:
                model[1].heads["head1"].weight = nn.Parameter(torch.zeros(1, 4))
        return model

    def train_data(self):
        if self.how in ("augmented", "types"):
            return Augmented(long=self.odd and self.how == "types")
        rows = torch.arange(64.0)
        if self.odd and self.how == "last sample":
            rows[-1] = 0
        return TensorDataset(rows[:, None].expand(64, 4) / 64, torch.ones(64, 1))

    def eval_data(self):
        if self.how != "evaluation sample":
            return None
        rows = torch.arange(64.0)
        rows[-1] = 0 if self.odd else 63
        return TensorDataset(rows[:, None].expand(64, 4) / 64, torch.ones(64, 1))

    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets.float())
