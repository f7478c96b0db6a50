"""Models of which not every parameter takes part in every loss, on one engine after another, in one process group.

    torchrun --nproc-per-node 2 -m tests.engines.branches FOLDER CASE ...        a case: ENGINE[:STAGE]

leaves the losses and the last weights of each training in FOLDER/CASE.json. tests/engines/test_branches.py compares them.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dsframe
from dsframe.cluster import world
from dsframe.model.micro_batch import MicroBatch
from tests.engines import several
from tests.engines.several import prepare

STEPS, ROWS, WIDTH = 8, 8, 6


class Network(nn.Module):
    """Layers ``left`` and ``right`` of one size, of which the inputs or the rank decide, and one that nobody calls."""

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
        elif self.way == "ranks":
            hidden = (self.left, self.right)[world.here().rank](hidden)
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


def file(case, way, accumulation):
    engine, _, stage = case.partition(":")
    return {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.01}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": int(stage or 0),
            "reduce_bucket_size": 60,
        },  # several buckets, of 42 elements a layer
        "dsframe": {
            "engine": engine,
            "task": {"name": "tests.engines.branches:Branches", "options": {"way": way}},
        },
    }


def train(case, way, accumulation):
    """Losses of the global batch, and each parameter's last weights."""
    make, loader = prepare(file(case, way, accumulation), case.partition(":")[0])
    engine = make()
    try:
        losses = []
        for step in range(STEPS):
            loss = engine.train_step(MicroBatch.of(loader.micro_batches(step))).loss.reshape(1).double()
            losses.append(float(engine.sum_over_ranks(loss)) / engine.plan.world.size)
        weights = {one.name: one.weight.double().flatten().tolist() for one in engine.state().parameters}
        return {"losses": losses, "weights": weights}
    finally:
        engine.close()


def each_way(case):
    """Where ranks of ZeRO-3 call different layers, they are told so."""
    ways = ["idle", "rows", "ranks"][: 1 if case == "deepspeed:3" else 3 if world.here().size > 1 else 2]
    return {f"{way}, accumulation {n}": train(case, way, n) for way in ways for n in (1, 2)}


if __name__ == "__main__":
    several.report(each_way, [])
