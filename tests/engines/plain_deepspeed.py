"""A training as somebody writes it with DeepSpeed alone, and the same model and data as a task of dsframe's.

    torchrun ... tests/engines/plain_deepspeed.py CONFIG.json FOLDER   # 5 steps, save_checkpoint, 5 more

Rank 0 writes the losses of the last 5 steps to losses.json. All that it
shares with dsframe is the order of the samples.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dsframe import Task
from dsframe.data.sampler import Sampler
from tests.files import read_json, write_json

SAVED, STEPS = 5, 10


class Net(nn.Module):
    """Odd sizes, a shared layer, a buffer, and a parameter that is not trained."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(7, 19)
        self.middle = nn.Linear(19, 19)
        self.last = nn.Linear(19, 3)
        self.again = self.middle
        if frozen:
            self.scale = nn.Parameter(torch.rand(3) + 0.5, requires_grad=False)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.again(torch.tanh(self.middle(torch.tanh(self.first(inputs))))))
        outputs: Tensor = self.last(hidden)
        return outputs * self.scale if hasattr(self, "scale") else outputs


def data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(64, 7, generator=torch.Generator().manual_seed(1))
    return inputs, torch.sin(inputs[:, :3])


class Plain(Task):
    def __init__(self, frozen: bool = True) -> None:
        self.frozen = frozen

    def model(self) -> nn.Module:
        return Net(self.frozen)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)

    def train_data(self) -> TensorDataset:
        return TensorDataset(*data())


GROUPS = [{"match": ["*.bias"], "weight_decay": 0}, {"match": ["last.weight"], "lr_scale": 3}]


def in_groups(model: Net, rate: float) -> list[dict[str, Any]]:
    """:data:`GROUPS`, by hand."""
    layers = (model.first, model.middle, model.last)
    return [
        {"params": [model.first.weight, model.middle.weight]},
        {"params": [layer.bias for layer in layers], "weight_decay": 0.0},
        {"params": [model.last.weight], "lr": 3 * rate},
    ]


def main(file: str, folder: str) -> None:
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles, which takes a minute
    config = read_json(Path(file))
    settings = config.pop("dsframe")
    frozen = settings["task"]["options"]["frozen"]
    deepspeed.init_distributed("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(99)
    model = Net(frozen)
    groups = in_groups(model, config["optimizer"]["params"]["lr"]) if "parameter_groups" in settings else None
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config, dist_init_required=False)
    (inputs, targets), sampler = data(), Sampler(64, 8, seed=0)
    dtype = next(engine.module.parameters()).dtype

    def step(number: int) -> float:
        (_, rows) = sampler.global_batch(number)[0]
        own = rows[rank * 8 // ranks : (rank + 1) * 8 // ranks]
        loss = nn.functional.mse_loss(engine(inputs[own].to(dtype)).float(), targets[own])
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return float(total) / ranks

    for number in range(SAVED):
        step(number)
    engine.save_checkpoint(folder)
    losses = [step(number) for number in range(SAVED, STEPS)]
    torch.distributed.barrier()
    if rank == 0:
        write_json(Path("losses.json"), losses)
    os._exit(0)  # DeepSpeed's threads at times abort a regular exit


if __name__ == "__main__":
    main(*sys.argv[1:])
