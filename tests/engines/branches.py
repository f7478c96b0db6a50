"""Models of which not every parameter takes part in every loss."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dsframe
from tests.files import ds_config

STEPS, ROWS, WIDTH = 8, 8, 6


class Network(nn.Module):
    """Layers ``left`` and ``right`` of one size, of which the inputs decide, and one that nobody calls."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.first, self.left = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.idle, self.right = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs))
        if self.way == "rows":
            lefts, rights = inputs[:, :1] > 1.0, inputs[:, :1] < -1.0
            for kind, layer in ((lefts, self.left), (rights, self.right)):
                if kind.any():
                    hidden = torch.where(kind, layer(hidden), hidden)
        else:
            hidden = self.right(self.left(hidden))
        return self.last(hidden)


class Branches(dsframe.Task):
    def __init__(self, way="idle"):
        self.way = way

    def model(self):
        return Network(self.way)

    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)

    def train_data(self):
        inputs = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))
        return TensorDataset(inputs, torch.sin(inputs[:, :1]))


def file(case, way, accumulation, run_dir):
    """``case``: ENGINE[:STAGE]"""
    engine, _, stage = case.partition(":")
    return ds_config(
        ROWS,
        {"type": "SGD", "params": {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.01}},
        sections={
            "gradient_accumulation_steps": accumulation,
            "zero_allow_untested_optimizer": True,
            # several buckets, of 42 elements a layer
            "zero_optimization": {"stage": int(stage or 0), "reduce_bucket_size": 60},
        },
        engine=engine,
        task={"name": "tests.engines.branches:Branches", "options": {"way": way}},
        steps=STEPS,
        log_every_steps=1,
        run_dir=run_dir,
    )
