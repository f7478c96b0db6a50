"""Rules about what watches a run: profilers, the logger of collectives."""

from __future__ import annotations

from dsframe.config.findings import Findings
from dsframe.config.model import File
from dsframe.config.rule import Judge
from dsframe.config.settings_report import Profile

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "receive",
)
"""Of collectives, as they are counted."""
_OTHER_NAMES = {
    "isend": "send",
    "irecv": "receive",
    "recv": "receive",
    "allreduce": "all-reduce",
    "allgather": "all-gather",
}


def kind_of(operation: str) -> str | None:
    """The kind that DeepSpeed's name of an operation is of: ``all_gather_into_tensor`` is an all-gather."""
    name = operation.strip().lower()
    name = _OTHER_NAMES.get(name, name).replace("_", "-")
    return next((kind for kind in KINDS if name == kind or name.startswith(f"{kind}-")), None)


def judge(bench: Judge) -> None:
    """Report what is wrong with the sections that watch. A file without a ``dsframe`` section is for DeepSpeed, which differs."""
    if not bench.wrote("dsframe"):
        return
    _operations(bench)
    flops = bench.file.flops_profiler
    if flops.enabled and flops.recompute_fwd_factor:
        bench.idle(
            ("flops_profiler", "recompute_fwd_factor"), "has no effect: what is computed again is counted as it happens"
        )
    horovod = bench.file.dsframe.horovod
    if horovod.timeline_mark_cycles and not horovod.timeline:
        bench.idle(
            ("dsframe", "horovod", "timeline_mark_cycles"), "has no effect without a timeline", 'add "timeline": true'
        )
    if horovod.autotune and None not in (horovod.fusion_threshold_bytes, horovod.cycle_time_milliseconds):
        bench.idle(
            ("dsframe", "horovod", "autotune"),
            "has nothing left to tune: fusion_threshold_bytes and cycle_time_milliseconds are both fixed",
            "remove it or one of them",
        )
    mlflow = bench.file.dsframe.mlflow
    written = sorted(mlflow.model_fields_set - {"enabled"})
    if written and not mlflow.enabled:
        bench.idle(
            ("dsframe", "mlflow", written[0]), "has no effect while mlflow.enabled is false", 'add "enabled": true'
        )


def _operations(bench: Judge) -> None:
    section = bench.file.comms_logger
    if section is None or not section.enabled:
        return
    where = ("comms_logger", "prof_ops")
    if section.prof_all and section.prof_ops:
        bench.idle(where, "has no effect while prof_all is true", 'add "prof_all": false')
        return
    if not section.prof_all and not section.prof_ops:
        bench.idle(
            ("comms_logger", "prof_all"), "false, and prof_ops names nothing: no operation is counted", "write true"
        )
    unknown = [name for name in section.prof_ops if not isinstance(name, str) or kind_of(name) is None]
    if unknown and not section.prof_all:
        known = ", ".join(kind.replace("-", "_") for kind in KINDS)
        bench.findings.error(
            where, f"{unknown[0]!r} is no collective", f"there are {known}", code="value", at_value=True
        )


def check_world(file: File, world_size: int | None, total_steps: int | None, findings: Findings) -> None:
    """What only the number of processes and of steps tells."""
    profile = file.dsframe.profile
    steps = total_steps or file.dsframe.steps
    if profile is not None:
        _check_profile(profile, world_size, steps, findings)
    flops = file.flops_profiler
    if flops.enabled and steps is not None and flops.profile_step >= steps:
        findings.error(
            ("flops_profiler", "profile_step"),
            f"{flops.profile_step} steps come before the one that is profiled, and the run has {steps}",
            f"write at most {steps - 1}",
            code="conflict",
            at_value=True,
        )


def _check_profile(profile: Profile, world_size: int | None, steps: int | None, findings: Findings) -> None:
    path = ("dsframe", "profile")
    if steps is not None and profile.steps > steps:
        parts = f"({profile.wait} + {profile.warmup} + {profile.active}) x {profile.repeat}"
        findings.error(
            path, f"takes {parts} = {profile.steps} steps, and the run has {steps}", "shorten it", code="conflict"
        )
    if profile.ranks == "all":
        return
    if not profile.ranks:
        findings.error((*path, "ranks"), "names no rank", 'write [0] or "all"', code="value", at_value=True)
    absent = [rank for rank in profile.ranks if world_size is not None and rank >= world_size]
    if absent:
        findings.error(
            (*path, "ranks"),
            f"there is no rank {absent[0]} among {world_size} processes",
            'ranks are counted from 0; write [0] or "all"',
            code="world",
            at_value=True,
        )
