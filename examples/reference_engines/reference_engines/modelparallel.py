"""Reference: layer-wise model parallelism, without micro-batches in flight.

Each of ``"pipeline": {"stages": N}`` ranks holds some consecutive layers. Activations are sent forward and gradients back, one
micro-batch at a time, so that at any moment one rank computes and N - 1 wait: a model that fits nowhere can be trained, N times
slower than on a processor that could hold it. A pipeline (Huang et al. 2019, arXiv 1811.06965: GPipe) sends the next
micro-batch after the first instead of waiting: of m micro-batches on N stages the idle share is (N - 1) / (m + N - 1).

Layers are shared out by their numbers of parameters; ``pipeline.partition`` is DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsframe.engine import StepResult
from dsframe.engines.deepspeed.state_pipeline import Column, Share
from dsframe.engines.masters import MasterWeights
from dsframe.errors import EngineError, TaskError
from dsframe.model.micro_batch import Inputs, Measure, MicroBatch
from dsframe.model.persistent import aliases, compare, persistent_buffers
from dsframe.model.plan import Plan
from dsframe.model.state import EngineState, SavedState
from dsframe.tasks.layers import ready
from dsframe.tasks.task import Sum
from reference_engines.common import ReferenceEngine

_HEADER = 8
"""int64 numbers that announce an activation: how many dimensions, and each."""


class ModelParallelEngine(ReferenceEngine):
    """A few layers on each rank; who has none of a micro-batch's work waits."""

    def __init__(self, plan: Plan) -> None:
        """**Collective.** Raises EngineError for another number of processes, and once they have met TaskError for other models."""
        self._rank, self._last = plan.world.rank, plan.world.size - 1
        if plan.config.deepspeed.pipeline.stages != plan.world.size:
            raise EngineError(
                f'engine "reference-model-parallel" has one rank for each of pipeline.stages, which is '
                f"{plan.config.deepspeed.pipeline.stages}, and {plan.world.size} processes were started; make them equal"
            )
        super().__init__(plan)

    @property
    def description(self) -> str:
        """For the first line of a run."""
        return f"reference: layer-wise model parallelism over {self._last + 1} ranks"

    def _place(self, model: nn.Module) -> MasterWeights | None:
        """Keeps this rank's layers; the others' weights leave the model, whose names stay."""
        layers = self.plan.task.cut(model)
        if layers is None:
            raise TaskError(
                f"{type(model).__name__} is not made of layers; return an nn.Sequential, or define cut(model)"
            )
        parts = ready(layers)
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._buffers = {name: tuple(b.shape) for name, b in persistent_buffers(model).items()}
        self._aliases = aliases(model)
        holders = _holders(
            [sum(p.numel() for p in part.parameters() if p.requires_grad) for part in parts], self._last + 1
        )
        holder: dict[int, int] = {}
        for part, rank in zip(parts, holders, strict=True):
            for parameter in part.parameters():
                if holder.setdefault(id(parameter), rank) != rank:
                    raise TaskError(
                        "two ranks would have to share a weight, which this engine cannot: give its second use one of its own "
                        '("tie_embeddings": false for "language"), or choose another engine'
                    )
        for part, rank in zip(parts, holders, strict=True):
            for module in part.modules() if rank != self._rank else ():
                for held in (module._parameters, module._buffers):
                    held.update(dict.fromkeys(held))
        self._chunk = nn.Sequential(*(part for part, rank in zip(parts, holders, strict=True) if rank == self._rank))
        return super()._place(model)

    def _wrap(self, model: nn.Module) -> nn.Module:
        return self._chunk  # all ranks have drawn the whole model from one seed, so nothing needs to be sent

    def _send(self, activation: Any, rank: int) -> None:
        if not isinstance(activation, Tensor) or activation.ndim >= _HEADER:
            raise TaskError(f"layers hand on one tensor here, not a {type(activation).__name__}")
        numbers = [activation.ndim, *activation.shape]
        header = torch.tensor(numbers + [0] * (_HEADER - len(numbers)), device=self.plan.device)
        dist.send(header, rank)
        dist.send(activation.detach().contiguous(), rank)

    def _receive(self, rank: int) -> Tensor:
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self.plan.device)
        dist.recv(header, rank)
        dimensions, *sizes = header.tolist()
        activation = torch.empty(sizes[:dimensions], device=self.plan.device)
        dist.recv(activation, rank)
        return activation

    def _pass(self, batch: MicroBatch, factor: float) -> Tensor:
        """**Collective.** One micro-batch forward through all ranks and back; the loss, and 0 on all but the last rank."""
        arrived = self._receive(self._rank - 1).requires_grad_() if self._rank else batch.inputs
        loss = torch.zeros((), device=self.plan.device)
        outputs = self._forward(self.module, arrived)
        if self._rank == self._last:
            loss = self._loss(outputs, batch)
            (loss * factor).backward()  # type: ignore[no-untyped-call]
        else:
            self._send(outputs, self._rank + 1)
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, self._rank + 1)
            outputs.backward(gradient)
        if self._rank:
            assert isinstance(arrived, Tensor) and arrived.grad is not None  # noqa: PT018
            dist.send(arrived.grad.contiguous(), self._rank - 1)
        return loss.detach()

    def _update(self, loss: Tensor, learning_rate: float, scale: float) -> StepResult:
        loss = loss.float().clone()
        dist.broadcast(loss, src=self._last)
        return super()._update(loss, learning_rate, scale)

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        square = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square)
        return square.sqrt()

    @torch.no_grad()
    def eval_step(self, batch: tuple[Inputs, Any], measure: Measure | None) -> Mapping[str, Sum]:
        """**Collective.** The last rank measures; the others have no outputs."""
        inputs, targets = batch
        self.model.eval()
        outputs = self._forward(self.module, self._receive(self._rank - 1) if self._rank else inputs)
        self.model.train()
        if self._rank == self._last:
            return measure(outputs, targets) if measure else {}
        self._send(outputs, self._rank + 1)
        return {}

    def state(self) -> EngineState:
        """**Collective.** Every rank's parameters on every rank; sent when their turn comes."""
        own, column = super().state(), self._column()
        parameters = column.parameters(own.parameters, frozenset())
        return replace(own, buffers=column.buffers(own.buffers), aliases=self._aliases, parameters=parameters)

    def _column(self) -> Column:
        return Column(None, range(self._last + 1), self._rank)

    def load_state(self, saved: SavedState) -> None:
        """Each rank takes its layers out of the whole."""
        compare("parameter", self._shapes, saved.shapes)
        compare("buffer", self._buffers, {name: tuple(buffer.shape) for name, buffer in saved.buffers().items()})
        mine = [name for name, _ in self.model.named_parameters()]
        super().load_state(Share(saved, mine, persistent_buffers(self.model)))


def _holders(sizes: list[int], ranks: int) -> list[int]:
    """The rank of each layer: where the middle of its parameters falls. Raises EngineError where a rank has nothing to train."""
    total = max(sum(sizes), 1)
    holders = [
        min(ranks - 1, int((end - size / 2) * ranks / total))
        for size, end in zip(sizes, accumulate(sizes), strict=True)
    ]
    trained = {rank for rank, size in zip(holders, sizes, strict=True) if size}
    idle = sorted(set(range(ranks)) - trained)
    if idle:
        raise EngineError(
            f"rank {idle[0]} of {ranks} would have nothing to train: the model has too few layers; use fewer"
        )
    return holders
