"""Data that depend on the model: targets that are moved towards what the model says, every few steps."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import dsframe
from tests.files import ds_config

REFRESH_STEPS = 4


class Points(Dataset[Any]):
    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.inputs, self.targets = torch.randn(64, 3, generator=draw), torch.randn(64, 2, generator=draw)
        self.current = self.targets

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.inputs[index], self.current[index]

    @torch.no_grad()
    def refresh(self, model):
        self.current = 0.5 * self.targets + 0.5 * model(self.inputs)


class Refresh(dsframe.Hooks):
    def __init__(self, points):
        self.points = points

    def on_start(self, run):
        self.on_step(run)  # a run that goes on has the data that it had

    def on_step(self, run):
        if run.step % REFRESH_STEPS == 0:
            model = run.model(all_ranks=True)
            assert model is not None
            self.points.refresh(model)


class SelfLabelled(dsframe.Task):
    def __init__(self):
        self.points = Points()
        self.hooks = [Refresh(self.points)]

    def model(self):
        return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))

    def loss(self, outputs, targets):
        return (outputs - targets).square().mean()

    def train_data(self):
        return self.points


def file(run, engine, steps=12):
    every = {"every_steps": REFRESH_STEPS}
    task = {"name": "tests.engines.model_data:SelfLabelled"}
    own = {"engine": engine, "steps": steps, "run_dir": run, "checkpoints": every, "task": task, "log_every_steps": 1}
    return ds_config(8, "AdamW", 0.05, **own)
