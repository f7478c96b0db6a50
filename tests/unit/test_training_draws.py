"""What is done beside the training draws nothing of the training's: a VAE is the same whatever is evaluated, saved and logged."""

import random

import numpy as np
import pytest
import torch

import dsframe
from tests.engines.ports import Vae

BESIDE = {
    "evaluation": {"eval_every_steps": 2},
    "saving": {"checkpoints": {"every_steps": 3}},
    "logging": {"log_every_steps": 1},
    "profile": {"profile": {"wait": 1, "warmup": 1, "active": 2}},
}


class Drawing(Vae):
    """One whose metrics seed and draw, with data of its own for them."""

    evaluates = True

    def eval_data(self):
        return self.train_data() if self.evaluates else None

    def metrics(self, outputs, targets):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        torch.rand(3)
        return super().metrics(outputs, targets)

    def loss(self, outputs, targets):
        noise = random.random() + np.random.rand()  # the three generators decide what is trained
        return super().loss(outputs, targets) * (1 + 0.01 * noise)


@pytest.mark.parametrize("beside", BESIDE)
def test_training_does_not_see_it(beside, here):
    usual = {"engine": "single", "steps": 8, "log_every_steps": 100, "checkpoints": {"at_end": False}}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}

    def loss(task, run, **settings):
        return dsframe.fit(
            task, {"train_batch_size": 8, "optimizer": optimizer, "dsframe": {**usual, "run_dir": run, **settings}}
        ).loss

    alone = Drawing()
    alone.evaluates = False
    assert loss(Drawing(), "beside", **BESIDE[beside]) == loss(alone, "alone")
