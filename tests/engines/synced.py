"""A network with BatchNorm over the global batch, on one engine after another, in one process group.

torchrun --nproc-per-node 2 -m tests.engines.synced REPORT.json CASE ...        a case: ENGINE[:STAGE]
"""

import atexit
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dsframe
from dsframe.cluster import world
from dsframe.model.micro_batch import MicroBatch
from dsframe.train import leave_at_once
from tests.engines.several import one_process_group, prepare
from tests.files import ds_config, write_json


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


def file(case, synced):
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
    )


def train(case, synced=True):
    """Losses of the global batch; the last weights and buffers; what the run would announce."""
    make, loader = prepare(file(case, synced), case.partition(":")[0])
    engine = make()
    try:
        losses = []
        for step in range(8):
            loss = engine.train_step(MicroBatch.of(loader.micro_batches(step))).loss.reshape(1).double()
            losses.append(float(engine.sum_over_ranks(loss)) / engine.plan.world.size)
        state = engine.state()
        found = {name: buffer.double().flatten().tolist() for name, buffer in state.buffers.items()}
        found |= {one.name: one.weight.double().flatten().tolist() for one in state.parameters}
        return {"losses": losses, "state": found, "depends": [one.text for one in engine.built.depends]}
    finally:
        engine.close()


def main(path, cases):
    report = {}
    with one_process_group():
        for case in cases:
            report[case] = train(case)
        report["own"] = train(cases[0], synced=False)
    if world.here().is_main:
        write_json(Path(path), report)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    atexit._run_exitfuncs()  # as dsframe.train does: Horovod over MPI leaves here
    leave_at_once(0)
