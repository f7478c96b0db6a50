"""The share of time that pipeline stages wait, beside the formula (p - 1) / (m + p - 1) of Huang et al. (2019, arXiv 1811.06965).

    torchrun --nproc-per-node=2 -m tests.pipeline_bubble     # prints a line for each number of micro-batches m; p is 2

Two models. In one, each stage's layer waits for a while instead of computing, the same on every stage: what is measured is the
schedule, on however few cores. The other is a GPT of equal halves, whose stages compute. A stage is busy while DeepSpeed runs its
forward or backward instruction; the span of a step is from the first beginning to the last end over all stages.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import mean
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from dsframe import Task
from dsframe.cluster.exchange import all_gather_text
from dsframe.data import TensorSource
from dsframe.model.forward import MicroBatch
from dsframe.tasks.layers import Layer
from dsframe.train import leave_at_once
from tests.engines.several import one_process_group, prepare

FORWARD_SECONDS, BACKWARD_SECONDS = 0.01, 0.02
STEPS = 4


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        time.sleep(FORWARD_SECONDS)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(BACKWARD_SECONDS)
        return gradients[0]


class Waiting(nn.Linear):
    """A layer that takes as long as the clock says."""

    def forward(self, inputs: Tensor) -> Tensor:
        return _Pause.apply(super().forward(inputs))  # type: ignore[no-any-return, no-untyped-call]


class Still(Task):
    """As many such layers as there are stages."""

    def __init__(self, stages: int = 2) -> None:
        self.stages = stages

    def layers(self) -> Sequence[Layer]:
        return [partial(Waiting, 4, 4)] * self.stages

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    def train_data(self) -> TensorSource:
        return TensorSource(torch.zeros(64, 4), torch.ones(64, 4))


def document(task: dict[str, Any], stages: int, micro_batches: int, samples: int) -> dict[str, Any]:
    """A file that trains ``task`` in ``stages`` stages on ``micro_batches`` of ``samples`` samples each."""
    return {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "pipeline": {"stages": stages, "partition": "uniform"},
        "dsframe": {"engine": "deepspeed", "task": task},
    }


WAITING = partial(document, {"name": "tests.pipeline_bubble:Still"}, samples=1)
GPT = partial(
    document, {"name": "language", "layers": 4, "width": 256, "context": 128, "corpus": "synthetic"}, samples=4
)


@contextmanager
def timed(engine: Any) -> Iterator[list[tuple[float, float]]]:
    """When DeepSpeed's ``engine`` began and ended each forward and backward instruction, in seconds of the machine's clock."""
    spans: list[tuple[float, float]] = []

    def watch(instruction: Any) -> Any:
        def watched(*arguments: Any, **keywords: Any) -> Any:
            begun = time.perf_counter()
            result = instruction(*arguments, **keywords)
            spans.append((begun, time.perf_counter()))
            return result

        return watched

    computes = ("ForwardPass", "BackwardPass")
    table = {kind: watch(run) if kind.__name__ in computes else run for kind, run in engine._INSTRUCTION_MAP.items()}
    with mock.patch.object(type(engine), "_INSTRUCTION_MAP", table):
        yield spans


def idle_shares(file: dict[str, Any]) -> list[float]:
    """**Collective.** The share of each step that stages wait, the mean over stages, the first step left out."""
    make, loader = prepare(file, "deepspeed")
    engine: Any = make()
    steps = []
    for step in range(STEPS):
        with timed(engine._engine) as spans:
            engine.train_step(MicroBatch.of(loader.micro_batches(step)))
        stages = [json.loads(text) for text in all_gather_text(engine, json.dumps(spans))]
        flat = [span for stage in stages for span in stage]
        whole = max(end for _, end in flat) - min(begun for begun, _ in flat)
        steps.append(1 - sum(end - begun for begun, end in flat) / len(stages) / whole)
    engine._engine.destroy()
    return steps[1:]


def formula(stages: int, micro_batches: int) -> float:
    """What the schedule alone leaves idle."""
    return (stages - 1) / (micro_batches + stages - 1)


def main() -> None:
    """Prints the table."""
    with one_process_group():
        for micro_batches in (1, 2, 4, 8):
            measured = [mean(idle_shares(file(stages=2, micro_batches=micro_batches))) for file in (WAITING, GPT)]
            if int(torch.distributed.get_rank()) == 0:
                print(
                    f"p = 2, m = {micro_batches}: formula {formula(2, micro_batches):.3f}, "
                    f"waiting layers {measured[0]:.3f}, GPT {measured[1]:.3f}",
                    flush=True,
                )
    leave_at_once(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
