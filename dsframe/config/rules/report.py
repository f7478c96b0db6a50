"""Rules about profilers and loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsframe.config.read.findings import Findings
from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.file import File

if TYPE_CHECKING:
    from dsframe.config.schema.settings_report import Profile

KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "reduce", "gather", "scatter", "send", "receive",
)  # fmt: skip
"""Kinds of collectives that are counted."""
_OTHER_NAMES = {"isend": "send", "irecv": "receive", "recv": "receive"}
_OTHER_NAMES |= {"allreduce": "all-reduce", "allgather": "all-gather"}


def kind_of(operation: str) -> str | None:
    """Return the kind of an operation by DeepSpeed's name: ``all_gather_into_tensor`` is an all-gather."""
    name = operation.strip().lower()
    name = _OTHER_NAMES.get(name, name).replace("_", "-")
    return next((kind for kind in KINDS if name == kind or name.startswith(f"{kind}-")), None)


def check(context: RuleContext) -> None:
    """Report what is wrong with profilers and loggers. Files without a ``dsframe`` section are for DeepSpeed, which differs."""
    if not context.wrote("dsframe"):
        return
    _operations(context)
    if context.file.on("flops_profiler") and context.file.flops_profiler.recompute_fwd_factor:
        message = "has no effect: dsframe counts recomputation when it happens"
        context.no_effect(("flops_profiler", "recompute_fwd_factor"), message)
    if context.wrote("dsframe", "horovod"):
        _horovod(context)
    mlflow = context.file.dsframe.mlflow if context.wrote("dsframe", "mlflow") else None
    written = sorted(mlflow.model_fields_set - {"enabled"}) if mlflow else []
    if mlflow and written and not mlflow.enabled:
        message = "has no effect while mlflow.enabled is false"
        context.no_effect(("dsframe", "mlflow", written[0]), message, 'add "enabled": true')


def _horovod(context: RuleContext) -> None:
    horovod, base = context.file.dsframe.horovod, ("dsframe", "horovod")
    if horovod.timeline_mark_cycles and not horovod.timeline:
        context.no_effect((*base, "timeline_mark_cycles"), "has no effect without a timeline", 'add "timeline": true')
    if horovod.autotune and None not in (horovod.fusion_threshold_bytes, horovod.cycle_time_milliseconds):
        message = "has no effect: fusion_threshold_bytes and cycle_time_milliseconds are both fixed"
        context.no_effect((*base, "autotune"), message, "remove it, or one of the two")


def _operations(context: RuleContext) -> None:
    section = context.file.comms_logger
    if section is None or not section.enabled:
        return
    where = ("comms_logger", "prof_ops")
    if section.prof_all and section.prof_ops:
        context.no_effect(where, "has no effect while prof_all is true", 'add "prof_all": false')
        return
    if not section.prof_all and not section.prof_ops:
        message = "false, and prof_ops is empty: no operation is counted"
        context.no_effect(("comms_logger", "prof_all"), message, "write true")
    unknown = [name for name in section.prof_ops if not isinstance(name, str) or kind_of(name) is None]
    if unknown and not section.prof_all:
        remedy = f"choose from {', '.join(kind.replace('-', '_') for kind in KINDS)}"
        context.findings.error(where, f"{unknown[0]!r} is no collective", remedy, code="value", at_value=True)


def check_world(file: File, world_size: int | None, total_steps: int | None, findings: Findings) -> None:
    """Report what depends on the number of processes or steps."""
    profile = file.dsframe.profile
    steps = total_steps or file.dsframe.steps
    if profile is not None:
        _check_profile(profile, world_size, steps, findings)
    if file.on("flops_profiler") and steps is not None and file.flops_profiler.profile_step >= steps:
        message = f"the profile comes after {file.flops_profiler.profile_step} steps, but the run has only {steps}"
        remedy, path = f"write at most {steps - 1}", ("flops_profiler", "profile_step")
        findings.error(path, message, remedy, code="conflict", at_value=True)


def _check_profile(profile: Profile, world_size: int | None, steps: int | None, findings: Findings) -> None:
    path = ("dsframe", "profile")
    if steps is not None and profile.steps > steps:
        parts = f"({profile.wait} + {profile.warmup} + {profile.active}) x {profile.repeat}"
        message = f"takes {parts} = {profile.steps} steps, but the run has only {steps}"
        findings.error(path, message, "shorten it", code="conflict")
    if profile.ranks == "all":
        return
    if not profile.ranks:
        findings.error((*path, "ranks"), "the list is empty", 'write [0] or "all"', code="value", at_value=True)
    absent = [rank for rank in profile.ranks if world_size is not None and rank >= world_size]
    if absent:
        message = f"there is no rank {absent[0]} among {world_size} processes"
        remedy = 'ranks are counted from 0; write [0] or "all"'
        findings.error((*path, "ranks"), message, remedy, code="world", at_value=True)
