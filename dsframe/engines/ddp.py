"""PyTorch DistributedDataParallel: bucketed all-reduce, overlapped with the backward pass (Li et al. 2020, arXiv 2006.15704)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dsframe import process_group
from dsframe.engine import Inputs, Plan, StepResult
from dsframe.engines.replica import ReplicaEngine
from dsframe.errors import EngineError


class DdpEngine(ReplicaEngine):
    """Full replicas; gradients are averaged in buckets while the backward pass still runs."""

    def __init__(self, plan: Plan) -> None:
        """**Collective.** Raises WorldError where the processes cannot meet."""
        process_group.open_process_group(plan.world, plan.device)
        if plan.config.deepspeed.gradient_allreduce_op == "sum":
            self.gradient_factor = float(plan.world.size)  # DDP averages
        super().__init__(plan)

    @property
    def description(self) -> str:
        """For the first line of a run."""
        return "PyTorch DDP"

    def _wrap(self, model: nn.Module) -> nn.Module:
        settings = self.plan.config.settings.ddp
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.plan.device] if self.plan.device.type == "cuda" else None,
            bucket_cap_mb=settings.bucket_cap_megabytes,
            static_graph=settings.static_graph,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            find_unused_parameters=settings.find_unused_parameters,
        )
        if self._masters:
            self._masters.take_weights()  # DDP has just made the model rank 0's everywhere
        return wrapped

    def train_step(self, micro_batches: Iterator[tuple[Inputs, Any]]) -> StepResult:
        """**Collective.** As for every replica. Raises EngineError where a parameter takes no part in the loss."""
        try:
            return super().train_step(micro_batches)
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raise EngineError(
                "some parameters take no part in the loss, and DDP waits for their gradients; "
                'set "ddp": {"find_unused_parameters": true} in the "dsframe" section'
            ) from error

    def _accumulating(self) -> AbstractContextManager[Any]:
        return cast(DistributedDataParallel, self.module).no_sync()

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """**Collective.** Element-wise sum over the ranks."""
        return process_group.sum_over_ranks(values)

    def close(self) -> None:
        """**Collective.** Leaves the process group."""
        process_group.close_process_group()
