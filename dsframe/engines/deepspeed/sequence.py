"""Sequence parallelism: ranks split sequences along time (Ulysses; Jacobs et al. 2023, arXiv 2309.14509).

Each rank of a group computes its slice of the positions with the whole model. Only attention needs other positions: for
it the ranks exchange slices of all heads for all positions of some heads, and back. DeepSpeed's engine does not know
about it: the mean over a sequence is the mean over its equal slices, so averaging gradients over all ranks, as in data
parallelism, gives the gradients of the whole batch at every stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dsframe.engines.deepspeed.imports import DistributedAttention
from dsframe.errors import EngineError
from dsframe.model.micro_batch import MicroBatch
from dsframe.model.plan import Plan
from dsframe.tasks.task import Attention


class Slices:
    """This rank's slice of each sequence, and the group of ranks that have the others."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        """**Collective.** Tells ``model`` its slice. Raises TaskError if the task's model does not support this."""
        self._size = plan.batch.sequence_parallel_size
        self._rank = plan.world.rank % self._size
        self._group, _ = dist.new_subgroups(self._size)  # type: ignore[no-untyped-call]
        self._task = plan.task
        plan.task.share_sequences(model, self._rank, self._size, self._exchanged)

    def cut(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """Returns this rank's slice of inputs and targets, ``[rows, time, ...]``. Raises EngineError if uneven."""

        def slice_of(tensor: Tensor) -> Tensor:
            if tensor.ndim < 2 or tensor.shape[1] % self._size:
                shape = list(tensor.shape)
                raise EngineError(
                    f"sequence_parallel_size: {self._size} ranks cannot slice a tensor of shape {shape} along time"
                )
            return tensor.chunk(self._size, dim=1)[self._rank].contiguous()

        inputs, targets = batch
        inputs = tree_map_only(Tensor, slice_of, self._task.before_slicing(inputs))
        return inputs, tree_map_only(Tensor, slice_of, targets)

    def cut_micro_batch(self, batch: MicroBatch) -> MicroBatch:
        """Returns this rank's slice of a micro-batch, as :meth:`cut`."""
        inputs, targets = self.cut((batch.inputs, batch.targets))
        return replace(batch, inputs=inputs, targets=targets)

    def mean(self, loss: Tensor) -> Tensor:
        """**Collective.** Averages the loss over the ranks that share sequences."""
        loss = loss.clone()
        dist.all_reduce(loss, group=self._group)
        return loss / self._size

    def _exchanged(self, attention: Attention) -> Attention:
        return _Exchanged(attention, self._group)


class _Exchanged:
    """Attention over slices with DeepSpeed's exchange. Not a module, so that a model's parameter names do not change."""

    def __init__(self, attention: Attention, group: dist.ProcessGroup) -> None:
        self._distributed = DistributedAttention(attention, group, scatter_idx=2, gather_idx=1)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Arguments and result: ``[rows, slice of the time, heads, head size]``."""
        mixed: Tensor = self._distributed(query, key, value, 0)
        return mixed
