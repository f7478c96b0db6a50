"""Facts about a run that the file does not contain, and checks of the file against them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from dsframe.config.read.findings import Findings
from dsframe.config.resolve import batch
from dsframe.config.resolve.batch import MICRO, STEPS, TRAIN
from dsframe.config.schema.deepspeed import DeepSpeed


@dataclass(frozen=True)
class Facts:
    """Facts that the file does not contain. None: not known (yet)."""

    world_size: int | None = None
    total_steps: int | None = None
    """Optimizer steps of the whole training."""
    epoch_steps: Fraction | None = None
    """Optimizer steps in an epoch: a fraction if the last batch takes samples of the next epoch."""
    replicas: bool | None = None
    """True if the engine ignores pipeline and tensor parallelism (full replicas)."""
    engine: str | None = None
    """The engine of the run, if it is not the file's."""


def check(file: DeepSpeed, facts: Facts, findings: Findings) -> None:
    """Reports what depends on the run: whether the batch fits its number of processes."""
    if any(findings.fails(key) for key in (TRAIN, MICRO, STEPS)):
        return
    if facts.world_size is None:
        batch.check(file, findings)
    elif batch.solve(file, facts.world_size, findings, bool(facts.replicas)):
        batch.check_groups(file, facts.world_size, findings)
