"""Reference: ``nn.DataParallel``, one process that drives all of a host's GPUs.

At every forward pass it copies the model to each GPU, cuts the batch among them, one thread each, and gathers the outputs on
the first, where the loss is computed. On a CPU there is nothing to cut among: torch then runs the module itself, and so this
engine is "single" there. One process for each GPU has replaced it (torch's own documentation says so): no copy of the weights
at each step, no lock of the interpreter that all threads share, no first GPU that holds all outputs, and more than one host.
"""

from __future__ import annotations

from torch import nn

from dsframe.engines.replica import ReplicaEngine
from dsframe.errors import EngineError
from dsframe.model.plan import Plan


class DataParallelEngine(ReplicaEngine):
    """One process, every GPU; the batch is cut inside the forward pass."""

    def __init__(self, plan: Plan) -> None:
        """Raises EngineError where more than one process was started."""
        if plan.world.size != 1:
            raise EngineError(
                f'engine "reference-dataparallel" is one process with all GPUs, but {plan.world.launcher} started '
                f'{plan.world.size}; start one, or choose "ddp"'
            )
        super().__init__(plan)

    @property
    def description(self) -> str:
        """For the first line of a run."""
        assert isinstance(self.module, nn.DataParallel)
        devices = len(self.module.device_ids)
        if devices == 0:
            return "reference: nn.DataParallel, which runs the module itself where there is no GPU"
        return f"reference: nn.DataParallel over {devices} GPUs"

    def _wrap(self, model: nn.Module) -> nn.Module:
        return nn.DataParallel(model)
