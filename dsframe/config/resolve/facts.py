"""Facts about a run that the file does not contain, and checks of the file against them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from dsframe.config.read.findings import Findings
from dsframe.config.resolve import batch
from dsframe.config.resolve.batch import MICRO, STEPS, TRAIN
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.settings import Settings


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


def check(file: DeepSpeed, settings: Settings, facts: Facts, findings: Findings) -> None:
    """Reports what depends on the run: whether batch, groups and profiles fit its number of processes and steps."""
    _check_profiles(settings, facts.world_size, facts.total_steps, findings)
    if any(findings.fails(key) for key in (TRAIN, MICRO, STEPS)):
        return
    if facts.world_size is None:
        batch.check(file, findings)
    elif batch.solve(file, facts.world_size, findings, bool(facts.replicas)):
        batch.check_groups(file, facts.world_size, findings)


def _check_profiles(settings: Settings, world_size: int | None, total_steps: int | None, findings: Findings) -> None:
    """Reports profiles of ranks and steps that the run does not have."""
    profile = settings.profile
    steps = settings.steps if total_steps is None else total_steps
    if profile is not None and steps is not None and profile.steps > steps:
        message = f"takes {profile.steps} steps, but the run has only {steps}"
        findings.error("dsframe.profile", message, "shorten it", code="conflict")
    path, ranks = "dsframe.profile.ranks", profile.ranks if profile else "all"
    if ranks == []:
        findings.error(path, "the list is empty", 'write [0] or "all"', code="value", at_value=True)
    if ranks and ranks != "all" and world_size is not None and max(ranks) >= world_size:
        message, remedy = f"there is no rank {max(ranks)} among {world_size} processes", "ranks are counted from 0"
        findings.error(path, message, f'{remedy}; write [0] or "all"', code="world", at_value=True)
