"""A network with BatchNorm over the global batch."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dsframe
from tests.files import ds_config


class BatchNormAct(nn.BatchNorm1d):
    """With an activation behind it, as timm's."""

    def forward(self, rows):
        tracked = self.running_mean, self.running_var
        normal = nn.functional.batch_norm(rows, *tracked, self.weight, self.bias, self.training, 0.1, self.eps)
        return normal.tanh()


class Picture(dsframe.Task):
    def model(self):
        inner = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.ReLU(), nn.Flatten())
        return nn.Sequential(inner, nn.Linear(6 * 16, 8), BatchNormAct(8), nn.Linear(8, 2))

    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)

    def train_data(self):
        inputs = torch.randn(96, 2, 6, 6, generator=torch.Generator().manual_seed(3)) + 4.0
        return TensorDataset(inputs, torch.sin(inputs.mean((2, 3))))


def file(case, run_dir="run", *, synced=True):
    """``case``: ENGINE[:STAGE]"""
    engine, _, stage = case.partition(":")
    return ds_config(
        12,
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        sections={
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": int(stage or 0), "stage3_param_persistence_threshold": 0},
        },
        engine=engine,
        model={"sync_batch_norm": synced},
        task={"name": "tests.engines.synced:Picture"},
        steps=8,
        log_every_steps=1,
        run_dir=run_dir,
    )
