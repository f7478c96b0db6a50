"""A user's own task that goes wrong in the way FAULT says."""

import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dsframe import Task
from dsframe.guard import watchdog


class BrokenTask(Task):
    """Trains a line; on rank 1 (on all where FAULT is "all") the fifth loss raises where FAULT is "raise"; where it is "sleep"
    it sleeps, and the other rank waits for its gradients. Where it is "build", it sleeps in model()."""

    calls = 0

    def __init__(self):
        if os.environ["FAULT"] == "build":
            watchdog.SETUP_SECONDS = 5.0

    def model(self):
        if os.environ["FAULT"] == "build" and self._rank() == "1":
            time.sleep(1000)
        return nn.Linear(4, 1)

    def train_data(self):
        return TensorDataset(torch.ones(512, 4), torch.ones(512, 1))

    def loss(self, outputs, targets):
        if self.context.evaluating:  # a look at the kind of loss
            return nn.functional.mse_loss(outputs, targets)
        self.calls += 1
        time.sleep(0.05)  # trains until a test ends it, and leaves the processor to others
        if self.calls == 5 and (self._rank() == "1" or os.environ["FAULT"] == "all"):
            if os.environ["FAULT"] in ("raise", "all"):
                raise ValueError("a mistake of the task's own")
            if os.environ["FAULT"] == "sleep":
                time.sleep(1000)
        return nn.functional.mse_loss(outputs, targets)

    @staticmethod
    def _rank():
        return next(os.environ[name] for name in ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
