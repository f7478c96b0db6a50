"""What a file does not tell, and a run knows."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Facts:
    """Facts that the file does not tell. None: not known (yet)."""

    world_size: int | None = None
    """Processes of the run."""
    total_steps: int | None = None
    """Optimizer steps of the whole training."""
    epoch_steps: Fraction | None = None
    """Optimizer steps of an epoch: no whole number where the last batch takes samples of the next epoch."""
    replicas: bool | None = None
    """True if the engine ignores pipeline and tensor parallelism (full replicas)."""
    engine: str | None = None
    """The engine that will run, if it is not the file's."""
