"""Trains a line and writes which samples each rank had; with FAULT a process that reads dies."""

import multiprocessing
import os
import time
from pathlib import Path

from torch import nn
from torch.utils.data import ConcatDataset

from dsframe import Hooks, Task
from tests.sources import Pairs


class Dies(Hooks):
    """Kills a worker of rank 0 after step 5."""

    def on_step(self, view):
        if view.step == 5 and view.rank == 0 and os.environ.get("FAULT"):
            multiprocessing.active_children()[0].kill()
            time.sleep(30)  # torch interrupts it


class Sources(Task):
    """Each sample is its number."""

    hooks = (Dies(),)

    def __init__(self, workers=0):
        self.workers = workers

    def model(self):
        return nn.Linear(2, 1)

    def loss(self, outputs, targets):
        if not self.context.evaluating:
            with Path(f"seen-{os.environ.get('RANK', '0')}").open("a") as out:
                out.write(",".join(map(str, targets.tolist())) + "\n")
        return nn.functional.mse_loss(outputs, targets[:, None] / 1000)

    def train_data(self):
        return ConcatDataset([Pairs(90, 2000), Pairs(40, 1000)])
