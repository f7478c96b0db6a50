"""Defines the values that are determined before an engine is created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from dsframe.model.followers import EarlyStop, Plateau

if TYPE_CHECKING:
    import torch

    from dsframe.cluster.world import World
    from dsframe.config.resolve.batch import Batch
    from dsframe.config.value import Config
    from dsframe.model.optimizers import OptimizerSpec
    from dsframe.model.rates import Schedule
    from dsframe.tasks.task import Task


_COLLECTIVE_SECONDS = 3600.0
"""Shortest timeout of a collective. NCCL's default is 600 s and Gloo's 1800 s: both could end a run before the watchdog
does, which waits 900 s while an engine is set up, and neither names the missing rank."""
_UNWATCHED_SECONDS = 30 * 24 * 3600.0
"""The same if the file disables the watchdog."""


def collective_limit(watched_seconds: float) -> timedelta:
    """Returns a timeout longer than any of the watchdog, whose report names the missing rank. ``watched_seconds``:
    ``hang_timeout_seconds`` of the file; 0 disables the watchdog."""
    from_file = 6.0 * watched_seconds if watched_seconds else _UNWATCHED_SECONDS
    return timedelta(seconds=max(from_file, _COLLECTIVE_SECONDS))


@dataclass(frozen=True)
class Plan:
    """The input for creating an engine."""

    config: Config
    world: World
    task: Task
    optimizer: OptimizerSpec
    schedule: Schedule
    batch: Batch
    device: torch.device
    verbose: bool = False
    """Do not silence the library."""
    directory: Path = Path()
    """Directory of the run's results."""
    stop: EarlyStop | None = None
    """Ends training early, if the file asks for it."""
    part: str = ""
    """Name of this engine's model, if the task has several."""
    frozen: bool = False
    """True if nothing trains this model."""

    @property
    def followers(self) -> Mapping[str, Plateau | EarlyStop]:
        """Returns the followers of evaluations, by the key of their state in a checkpoint's manifest."""
        plateau = self.schedule if isinstance(self.schedule, Plateau) else None
        candidates = {"schedule": plateau, "stop": self.stop}
        return {key: follower for key, follower in candidates.items() if follower is not None}

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config.settings.seed

    @property
    def collective_limit(self) -> timedelta:
        """Timeout of collectives."""
        return collective_limit(self.config.settings.hang_timeout_seconds)

    @property
    def data_rank(self) -> int:
        """Index of this rank's part of each global batch, below data_parallel_size. Ranks of one model share it."""
        return self.batch.data_rank(self.world.rank)
