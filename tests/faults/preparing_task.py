"""A user's own task that writes its data in prepare(), and fails there as FAULT says: "raise", "sleep", or not at all."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dsframe import Task
from dsframe.data.files import data_root, replacing


class Preparing(Task):
    """Trains a line on what prepare() wrote."""

    def model(self):
        return nn.Linear(4, 1)

    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)

    def prepare(self, say):
        path = data_root(None) / "numbers.pt"
        with (data_root(None) / "calls").open("a") as calls:
            calls.write(f"{os.getpid()}\n")
        say("preparing numbers")
        if path.exists():
            return
        if os.environ.get("FAULT") == "raise":
            raise ValueError("no such server")
        with replacing(path) as out:
            out.write(b"half")
            out.flush()
            if os.environ.get("FAULT") == "sleep":
                (data_root(None) / "sleeps").write_text(str(os.getpid()))
                time.sleep(1000)
            out.seek(0)
            torch.save(torch.ones(64, 4), out)

    def train_data(self):
        numbers = torch.load(Path(data_root(None), "numbers.pt"))
        return TensorDataset(numbers, numbers[:, :1])
