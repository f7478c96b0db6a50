"""One process, plain PyTorch: the reference for the other engines."""

from __future__ import annotations

from torch import Tensor

from dsframe.engines.replica import ReplicaEngine
from dsframe.errors import EngineError
from dsframe.model.plan import Plan


class SingleEngine(ReplicaEngine):
    """Plain PyTorch on one device."""

    shows_missing = True

    def __init__(self, plan: Plan) -> None:
        """Raises EngineError if more than one process was started."""
        if plan.world.size != 1:
            raise EngineError(
                f'engine "single" is one process, but {plan.world.launcher} started {plan.world.size}; '
                'start one, or choose "ddp", "horovod" or "deepspeed"'
            )
        super().__init__(plan)

    @property
    def description(self) -> str:
        return "PyTorch, one process"

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Returns ``values``: there is one rank."""
        return values

    def close(self) -> None:
        """Does nothing: there is no process group."""
